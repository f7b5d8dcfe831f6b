#pragma once
/// \file
/// Rounding activations to a scheme's operand: a row of f32 becomes the f32 values of its codes.

#include <optional>

#include "format/row_kernels.h"

namespace gatefold {

/// Buffers for one row of up to k numbers, in the workspace.
struct RowScratch {
  std::byte* codes;    ///< 2 * k bytes
  GroupRange* ranges;  ///< k, as are the next two
  float* scales;
  float* zeros;
};

/// Largest magnitude of a row.
float row_amax(const RowKernels& kernels, const float* x, std::int64_t k);

/// Where the operand has one scale for the whole tensor: the static one of the checkpoint, or the amax over
/// all rows. Unused for the others.
struct TensorRange {
  std::optional<TensorScale> static_scale;
  float amax = 0;
};

/// x [k] rounded in place, by the rules of scale_rule.h. A value that is not stored leaves x as it is.
void round_activations(const RowKernels& kernels, const Operand& operand, const TensorRange& range,
                       const RowScratch& scratch, float* x, std::int64_t k);

/// The same, but x becomes the codes' values without scales. The scales, one per group of the operand, are in
/// scratch.scales after the call.
void code_activations(const RowKernels& kernels, const Operand& operand, const TensorRange& range,
                      const RowScratch& scratch, float* x, std::int64_t k);

}  // namespace gatefold
