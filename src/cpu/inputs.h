#pragma once
/// \file
/// What happens to rows of activations between the multiplies, per instruction set.

#include <cstdint>

#include "format/isa.h"

namespace gatefold {

struct InputKernels {
  /// x [k] rounded to a 16-bit type, in place.
  void (*round_bf16)(float* x, std::int64_t k);
  void (*round_f16)(float* x, std::int64_t k);
  /// x [k] to 16-bit fixed point with a power of two for each `chunk` numbers, at most kPanelChunk:
  /// x = (256 * high + low) * scale. k is a multiple of `block`, and chunks of blocks; the last one may be
  /// shorter. limbs: kLimbColumns high ones, as many low ones, and so on. sums: of 256 * high + low, for each
  /// block.
  void (*fixed_point)(const float* x, std::int64_t k, std::int64_t chunk, std::int64_t block,
                      std::int8_t* limbs, float* scales, std::int32_t* sums);
  /// Small integers, each times `factor`, to bytes. sums: for each block.
  void (*to_bytes)(const float* x, std::int64_t k, std::int64_t block, float factor, std::int8_t* bytes,
                   std::int32_t* sums);
  /// y = g * sigmoid(alpha * g) * (u + beta), clamped before: Activation::Kind::swiglu. `rows` rows of
  /// `count` numbers; those of gate and up are `stride` apart, those of y `y_stride`.
  void (*swiglu)(const float* gate, const float* up, std::int64_t stride, std::int64_t rows,
                 std::int64_t count, float alpha, float beta, float limit, float* y, std::int64_t y_stride);
  /// sum [k] = weights[0] * x[0] + ... of `count` rows, in that order.
  void (*combine)(const float* const* x, const float* weights, std::int64_t count, std::int64_t k,
                  float* sum);
};

const InputKernels& input_kernels(Isa isa);

}  // namespace gatefold
