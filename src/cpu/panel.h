#pragma once
/// \file
/// Weights as panels of 16 rows, for CPUs whose multiply takes pairs of bf16 (AVX512_BF16). Codes of every
/// format are exact in bf16, so the multiply works on codes, and scales are applied to sums.
///
/// A panel holds its values as 64-byte loads, then what belongs to its blocks and rows:
///   values        [blocks][block * bits * 16 / 512] loads. A load holds 2 * 16 / bits columns; how it
///   spreads
///                 over lanes is the decoder's business (panel_avx512bf16.cpp)
///   block scales  [blocks][16] in the scheme's format, or one f32 where the scheme's group has 16 rows or
///   more zero points   [blocks][16] bytes row scales    [16] f32: channel or tensor scale, or the matrix's
///   second-level scale
/// k is cut into blocks within which all scales, of weights and of activations, are constant; the last one is
/// filled up with zeros.

#include <cstddef>
#include <cstdint>
#include <string>

#include "gatefold/quantize.h"

namespace gatefold {

inline constexpr std::int64_t kPanelRows = 16;

/// Sizes of an [n, k] matrix in panels.
struct PanelShape {
  std::int64_t n = 0, k = 0;
  std::int64_t panels = 0, block = 0, blocks = 0;
  std::size_t value_bytes = 0, scale_bytes = 0, zero_bytes = 0;  ///< of one block
  std::size_t panel_bytes = 0;

  std::int64_t padded_k() const { return block * blocks; }
  std::size_t bytes() const { return panel_bytes * static_cast<std::size_t>(panels); }
  std::size_t scales_at() const { return value_bytes * static_cast<std::size_t>(blocks); }
  std::size_t zeros_at() const { return scales_at() + scale_bytes * static_cast<std::size_t>(blocks); }
  std::size_t row_scales_at() const { return panel_bytes - 64; }
};

/// Block scales that a checkpoint holds in another format than the scheme's become f32.
PanelShape panel_shape(const Scheme& scheme, Format scale_format, std::int64_t n, std::int64_t k);

/// Empty if the panels can hold the scheme, and be multiplied with such activations; else why not.
std::string panels_refuse(const Scheme& scheme, const Operand& activation);

/// Fills panels from a matrix in the canonical layout. `out` has shape.bytes(), zeroed, 64-byte aligned.
void pack_panels(const QuantizedMatrix& matrix, const PanelShape& shape, std::byte* out);

/// One row of activations as the multiply wants it.
struct PanelInput {
  const std::uint16_t* codes = nullptr;  ///< bf16 [padded_k]
  const float* block_scales = nullptr;   ///< [blocks], if activations have scales along k
  const float* block_sums = nullptr;     ///< [blocks] sums of the codes, if weights have zero points
  float row_scale = 1.0f;
};

struct PanelKernels {
  /// out[t * stride + r] = row r of the panel times input t.
  using Multiply = void (*)(const PanelShape& shape, const std::byte* panel, const PanelInput* inputs,
                            std::int64_t tokens, float* out, std::int64_t stride);
  Multiply multiply[std::size(operands::table)];      ///< by scheme, activations as in the scheme
  Multiply weights_only[std::size(operands::table)];  ///< by scheme, 16-bit activations
  /// y = g * sigmoid(alpha * g) * (u + beta), clamped before: Activation::Kind::swiglu.
  void (*swiglu)(const float* gate, const float* up, std::int64_t count, float alpha, float beta, float limit,
                 float* y);
};

/// Empty if this CPU can run them, else what is missing.
std::string_view panels_missing();
const PanelKernels& panel_kernels();

}  // namespace gatefold
