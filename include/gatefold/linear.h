#pragma once
/// \file
/// Products with quantized matrices outside of MoE layers, on the CPU: for dense layers, for tests, and for
/// engines that route on their own. Weights are in the canonical layout (quantize.h) and decoded as they are
/// used, so nothing has to be packed; many calls with few rows are what MoePlan is for.
///
/// All sums are in f32, in an order that depends on k alone: the same bits for every thread count, and for
/// every number of rows beside a row. Thread-safe; the work is shared out over OpenMP's threads.

#include <cstdint>
#include <span>
#include <vector>

#include "gatefold/quantize.h"
#include "gatefold/status.h"
#include "gatefold/tensor.h"

namespace gatefold {

/// Rows of activations in the codes of a scheme's activation operand.
struct QuantizedActivation {
  SchemeId scheme = SchemeId::bf16;
  std::int64_t rows = 0, k = 0;
  /// Row-major codes, ceil(k * bits / 8) bytes a row; of two 4-bit codes the even k is in the low nibble.
  std::vector<std::byte> values;
  /// Row-major [rows, ceil(k / group)] in the operand's scale format; one a row where a scale holds for the
  /// row or the tensor.
  std::vector<std::byte> scales;
  std::vector<float> token_scales;  ///< [rows], of two-level operands: real = code * scale * token_scale
};

/// Bytes of values and scales in one row, and what tensors of them are of: F8_E4M3, I8 or F4 (two a byte),
/// and F32, F8_E8M0 or F8_E4M3.
struct ActivationRow {
  std::int64_t value_bytes = 0, scale_bytes = 0;
  DType value_type = DType::u8, scale_type = DType::u8;
};
/// Errors: a scheme that leaves activations in 16 bit, k <= 0, an odd k for 4-bit codes.
Result<ActivationRow> activation_row(SchemeId scheme, std::int64_t k);

/// x [rows, k] (f32, f16, bf16) by the rules of quantize.h; NaN and Inf are left out of the scales, and
/// saturate. The bytes are those of cuda::quantize_activations. Errors: activation_row's, another dtype.
Result<QuantizedActivation> quantize_activation(SchemeId scheme, const MatrixView& x);

/// y [rows, n] = x w^T of quantized activations and a weight matrix of the same scheme. Errors: different
/// schemes or k, parts of the wrong size, y of another shape.
Status scaled_mm(const QuantizedActivation& x, const QuantizedMatrix& w, const MutableMatrixView& y);

/// Rows [offsets[g], offsets[g + 1]) of y = those of x times weights[g]^T, for every group g; x is rounded to
/// the activation operand of each group's scheme first (16-bit ones: not at all). `offsets` has one number
/// more than there are groups, from 0 to x.rows. Errors: offsets that decrease, groups of different n or k.
Status grouped_gemm(const MatrixView& x, std::span<const std::int64_t> offsets,
                    std::span<const QuantizedMatrix* const> weights, const MutableMatrixView& y);

}  // namespace gatefold
