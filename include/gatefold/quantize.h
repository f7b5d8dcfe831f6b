#pragma once
/// \file
/// One weight matrix in one scheme: its canonical layout, the round-to-nearest quantizer, and the way back.
///
/// Canonical layout of W [n, k] (n output channels, k the contraction):
///   values       row-major codes; a row takes ceil(k * bits / 8) bytes; of two 4-bit codes the even k is in
///                the low nibble; int4 is two's complement
///   scales       row-major [scale_rows, scale_cols] in `scale_format`; edge groups may be short in n, and in
///                k for block scales
///   zero_points  (uint4 only) row-major [scale_rows, scale_cols] codes, packed like values, rows
///   byte-aligned
///
///   W[n][k] = (code - zero_point) * (scale * tensor_scale)     all in f32, rounded after each step
///
/// Kernels re-pack from here; checkpoint conventions convert to and from here, without loss.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gatefold/scheme.h"
#include "gatefold/status.h"
#include "gatefold/tensor.h"

namespace gatefold {

/// Sizes of an [n, k] matrix under an operand, in the canonical layout. Bytes.
struct QuantizedLayout {
  std::int64_t row_bytes = 0;  ///< of values
  std::int64_t scale_rows = 0, scale_cols = 0;
  std::int64_t zero_row_bytes = 0;
  std::size_t value_bytes = 0, scale_bytes = 0, zero_bytes = 0;
  std::size_t total() const { return value_bytes + scale_bytes + zero_bytes; }
};
/// `scale_format` is what the scales are really stored in; usually operand.scale.
QuantizedLayout quantized_layout(const Operand& operand, Format scale_format, std::int64_t n, std::int64_t k);

/// Bits per weight of a large matrix, scales and zero points included: value bits + scale bits per weight.
double bits_per_weight(const Scheme& scheme, std::int64_t n, std::int64_t k);

/// Whether [n, k] can be stored in the scheme. The error says which dimension is wrong and what would fit:
/// "k = 96 is not a multiple of group 128; int4_g32 would fit".
Status check_shape(SchemeId scheme, std::int64_t n, std::int64_t k);

/// A second-level f32 scale. Conventions store it as a factor or as a divisor; the inverse of an f32 is not
/// exact, so the direction is kept.
struct TensorScale {
  float value = 1.0f;
  bool divides = false;
  constexpr float apply(float x) const { return divides ? x / value : x * value; }
};

struct QuantizedMatrix {
  SchemeId scheme = SchemeId::bf16;
  std::int64_t n = 0, k = 0;
  Format scale_format;  ///< the table's, or what a checkpoint holds in its place (f16, f32, bf16)
  std::vector<std::byte> values, scales, zero_points;
  /// Empty, or [k], a permutation: column j of the codes multiplies input input_order[j]. Checkpoints whose
  /// groups are not runs of columns (GPTQ's act-order) are held like this; dequantize() undoes it.
  std::vector<std::int32_t> input_order;
  TensorScale tensor_scale;
  std::optional<TensorScale>
      input_scale;  ///< static activation scale: x_real = code * [block scale *] input_scale

  QuantizedLayout layout() const {
    return quantized_layout(gatefold::scheme(scheme).weight, scale_format, n, k);
  }
};

struct QuantizeOptions {
  /// Try smaller (and larger) scales per group and keep the one with the least squared error.
  bool scale_search = false;
  /// Go on when weights are NaN or Inf: they are left out of the scale and saturate (NaN: see codec.h).
  bool allow_nonfinite = false;
  /// ue4m3: the amax_matrix of the rule below; 0: the matrix's own. Engines multiply gate and up as one
  /// matrix with one scale, so that both are quantized for the larger amax.
  float tensor_amax = 0;
};

/// The largest finite magnitude of a matrix (f32, f16, bf16).
float largest_magnitude(const MatrixView& weights);

/// Round-to-nearest quantization of `weights` [n, k] (f32, f16, bf16). The rules, for group maximum amax:
///   plain      the value rounded to the format
///   int        s = rnd(amax / (2^(b-1) - 1)); code = clamp(rne(w / s))        rnd: to the scale's format
///   uint       lo = min(0, min w), hi = max(0, max w); s = rnd((hi - lo) / 15); zero = rne(-lo / s);
///              code = clamp(rne(w / s) + zero)
///   float      s = amax / max(format); code = rne(w / s), saturating
///   ue8m0      s = 2^(floor(log2 amax) - emax(format)), saturating             OCP MX v1.0
///   ue4m3      t = amax_matrix / (max * 448); b = e4m3(amax / max / t); code = rne(w / (b * t));
///              stored: the divisor 1 / t                                       NVFP4
/// A group without a non-zero weight gets scale 1 (ue4m3: 0). Errors: check_shape's, and a NaN or Inf weight
/// ("NaN at [3, 17]"). Thread-safe; single-threaded.
Result<QuantizedMatrix> quantize(SchemeId scheme, const MatrixView& weights,
                                 const QuantizeOptions& options = {});

/// W as f32, row-major [n, k], columns in the order of the inputs, into `out`.
void dequantize(const QuantizedMatrix& matrix, float* out);
/// Rows first, first + 1, ... of it: [count, k].
void dequantize_rows(const QuantizedMatrix& matrix, std::int64_t first, std::int64_t count, float* out);

}  // namespace gatefold
