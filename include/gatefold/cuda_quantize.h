#pragma once
/// \file
/// Activations to the codes of a scheme's activation operand, on the GPU: for MoE layers, and for dense ones.
///
/// The rules are those of the CPU, bit for bit (quantize.h has the formulas): numbers are divided by the
/// scale and rounded to nearest even, saturating; NaN and Inf are left out of the scale; e4m3 scales per
/// token or tensor are at least 1 / (448 * 512). All of the table's activation operands:
///   e4m3 or int8, one f32 scale per token             one pass
///   e4m3, f32 scale per token and 128 columns         one pass
///   e4m3, one f32 scale per tensor                    static: one pass; dynamic: two, without the host
///   e4m3, ue8m0 scale per 32 columns                  one pass
///   e2m1, ue4m3 scale per 16 columns and f32 per token (or static)   one pass
///
/// Layout of the result, rows of k codes:
///   values        row-major, ceil(k * bits / 8) bytes a row; of two 4-bit codes the even k is in the low
///   nibble scales        row-major [rows, ceil(k / group)] in the operand's scale format; per token and per
///   tensor: [rows]
///                 (per tensor all are equal, unless static scales differ by row)
///   token_scales  [rows] f32, for e2m1 only: real = code * scale * token_scale

#include <cstdint>
#include <span>

#include "gatefold/cuda.h"
#include "gatefold/quantize.h"

namespace gatefold::cuda {

/// Bytes of the result of `rows` rows, and of the workspace. Errors: a scheme that leaves activations in 16
/// bit, odd k for 4-bit codes, rows or k of 2^30 and more.
struct ActivationLayout {
  std::int64_t row_bytes = 0;   ///< of values
  std::int64_t scale_cols = 0;  ///< scales per row
  std::size_t value_bytes = 0, scale_bytes = 0, token_scale_bytes = 0;
  std::size_t workspace_bytes = 0;
};
Result<ActivationLayout> activation_layout(SchemeId scheme, std::int64_t rows, std::int64_t k);

/// All pointers are to memory of the current device.
struct QuantizeInputs {
  MatrixView x;           ///< [n, k] f32, f16 or bf16
  std::int64_t rows = 0;  ///< of the result; without `gather` at most x.rows
  /// Row i of the result is row gather[i] / gather_divisor of x. For slots sorted by expert: sorted_slots and
  /// top_k.
  const std::int32_t* gather = nullptr;  ///< [rows], or nullptr: row i
  int gather_divisor = 1;
  /// How many rows there are, known on the device only: rows from it on are left alone. nullptr: `rows`.
  const std::int32_t* row_count = nullptr;
  /// Static scales (operands with one f32 per tensor, or per token beside block scales; ignored by the
  /// others): that of row i is static_scales[static_index[i]], or static_scales[0] if there is no index.
  const TensorScale* static_scales = nullptr;
  const std::int32_t* static_index = nullptr;  ///< [rows]
};
struct QuantizeOutputs {
  void* values = nullptr;  ///< aligned to 16 bytes, as is the next
  void* scales = nullptr;
  float* token_scales = nullptr;  ///< used by two-level operands only
};

/// Quantizes on the stream. x that is aligned to 16 bytes, with k a multiple of 8 (4-bit codes: 16), is read
/// and written with wide accesses; others are right, and slower. Allocates nothing; the workspace must stay
/// until the work is done. Errors: those of activation_layout, another dtype, a null pointer, a workspace too
/// small, a launch that CUDA refuses.
Status quantize_activations(SchemeId scheme, const QuantizeInputs& inputs, const QuantizeOutputs& outputs,
                            std::span<std::byte> workspace, Stream stream = nullptr);

}  // namespace gatefold::cuda
