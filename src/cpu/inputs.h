#pragma once
/// \file
/// Activations on their way into the multiply (PanelForm), and the activation function, per instruction set.

#include <cstdint>

#include "format/isa.h"

namespace gatefold {

struct InputKernels {
  /// x [k] to 16-bit fixed point with a power of two for each `block` numbers: x = (256 * high + low) *
  /// scale. k is a multiple of `block`.
  void (*fixed_point)(const float* x, std::int64_t k, std::int64_t block, std::int8_t* high, std::int8_t* low,
                      float* scales);
  /// Small integers to bytes, each times `factor`.
  void (*to_bytes)(const float* x, std::int64_t k, float factor, std::int8_t* bytes);
  /// Sums of each `block` bytes.
  void (*sum_bytes)(const std::int8_t* bytes, std::int64_t k, std::int64_t block, std::int32_t* sums);
  /// y = g * sigmoid(alpha * g) * (u + beta), clamped before: Activation::Kind::swiglu.
  void (*swiglu)(const float* gate, const float* up, std::int64_t count, float alpha, float beta, float limit,
                 float* y);
};

const InputKernels& input_kernels(Isa isa);

}  // namespace gatefold
