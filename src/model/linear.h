#pragma once
/// \file
/// Dense layers: 16-bit, f32 or quantized weights, f32 or quantized activations, BLAS in f32.

#include <cstdint>
#include <vector>

#include "gatefold/quantize.h"
#include "gatefold/tensor.h"

namespace gatefold {

/// y = A(x) W^T + bias.
struct DenseLayer {
  MatrixView weight;               ///< [n, k]; stays where it is, at any alignment; no data: `quantized`
  std::vector<float> bias;         ///< [n] or empty
  QuantizedMatrix quantized = {};  ///< stays as it is: rows are dequantized when they are multiplied
  Operand activation = {};         ///< A: what x is rounded to; act16 leaves it in f32
};

/// x [tokens, k] -> y [tokens, n], for the tokens at positions first, first + 1, ... of a sequence. The bits
/// of a row of y follow from its row of x and its position alone, not from the other tokens or `threads`
/// (but where A has one scale for all tokens that is not the checkpoint's).
void apply(const DenseLayer& layer, const float* x, std::int64_t first, std::int64_t tokens, float* y,
           int threads);

}  // namespace gatefold
