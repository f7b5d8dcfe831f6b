#pragma once
/// \file
/// GPTQ and what follows it: a matrix quantized for the inputs that it will see.
///
/// Minimizes trace((W - Q) H (W - Q)^T) over what the scheme can store, H = sum of c x x^T over the inputs x
/// (importance c):
///   1. scales: the search of Grid, errors weighted by what GPTQ cannot pass on, 1 / diag(H^-1);
///   2. GPTQ (Frantar et al. 2022): columns in the order of falling diag(H), each rounded, its error passed
///      on to those that follow by way of the Cholesky factor of H^-1. Groups are those of the columns'
///      own places (static), so that nothing is reordered in the file;
///   3. refinement, in turns while it helps: each code to its best value with all others fixed, each scale
///      likewise (both in closed form).

#include <cstdint>
#include <vector>

#include "gatefold/quantize.h"
#include "gatefold/status.h"

namespace gatefold {

struct GptqOptions {
  double damping = 0.1;   ///< of the mean of diag(H), added to it
  int refinements = 4;    ///< turns of step 3 at most
  float tensor_amax = 0;  ///< as in QuantizeOptions
};

/// `weights` [n, k] and `hessian` [k, k] (symmetric; all of it) in f32, finite. Errors: check_shape's, a
/// scheme that does not quantize, a Hessian that is not positive definite even with much damping. One thread.
Result<QuantizedMatrix> gptq(SchemeId id, std::int64_t n, std::int64_t k, const float* weights,
                             std::vector<float> hessian, const GptqOptions& options = {});

class Grid;

/// Step 3: `values` [n, k] on `grid`, both changed in place.
void refine(Grid& grid, const float* weights, const std::vector<float>& hessian, int turns, float* values);

}  // namespace gatefold
