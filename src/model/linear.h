#pragma once
/// \file
/// Dense layers: 16-bit (or f32) weights, f32 activations, BLAS.

#include <cstdint>
#include <vector>

#include "gatefold/tensor.h"

namespace gatefold {

/// y = x W^T + bias. W [n, k] stays where it is, at any alignment.
struct DenseLayer {
  MatrixView weight;
  std::vector<float> bias;  ///< [n] or empty
};

/// x [tokens, k] -> y [tokens, n], for the tokens at positions first, first + 1, ... of a sequence. The bits
/// of a row of y follow from its row of x and its position alone, not from the other tokens or `threads`.
void apply(const DenseLayer& layer, const float* x, std::int64_t first, std::int64_t tokens, float* y,
           int threads);

}  // namespace gatefold
