#pragma once
/// \file
/// Rows of activations as the multiply takes them (GemmInputs): 16-bit numbers, those of a quantized operand
/// as the bf16 (InputOrder::f16: f16) of their codes' values; or codes. Scales of groups that keep them exact
/// in bf16 (ue8m0, ue4m3) are multiplied in, the others lie beside the rows.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/limits.h"
#include "cuda/moe_gemm.h"
#include "gatefold/quantize.h"

namespace gatefold::cuda {

/// Of each expert, the first bytes of its weights.
struct FirstWeights {
  const std::byte* weights = nullptr;  ///< of expert 0
  std::int64_t expert_stride = 0;      ///< bytes
  std::int32_t pieces = 0;             ///< of kPieceBytes

  static constexpr int kPieceBytes = 8192;
};

struct InputArgs {
  Operand activation;        ///< what rows are rounded to (effective_activation)
  MatrixView x;              ///< [.., k]; rows: of the result
  std::int32_t divisor = 1;  ///< row i comes from row i / divisor of x
  std::int32_t copies = 1;   ///< and is that of slots copies * i and on: at most kMostTopK
  /// [slots], where rows are those of slots: those of ids that no expert has are not there.
  const std::int32_t* ids = nullptr;
  std::int32_t experts = 0;
  /// [experts + 1], where rows are in groups: expert e's are [offsets[e], offsets[e + 1]), and the others are
  /// not there. Scales per tensor are of a group then, unless all rows are one tensor.
  const std::int32_t* offsets = nullptr;
  bool one_tensor = false;
  /// Rows are quantized already, in the layout of quantize_activations: x is their codes, and these are their
  /// scales. Else nullptr.
  const void* scales = nullptr;
  const float* token_scales = nullptr;
  const std::int32_t* positions = nullptr;     ///< [slots] in the order of experts, or nullptr: the same
  const std::int32_t* expert_rows = nullptr;   ///< of tiles: ItemArgs
  const TensorScale* static_scales = nullptr;  ///< [experts], or nullptr: scales are dynamic
  float* amax = nullptr;                       ///< [rows], for dynamic scales per tensor
  bool amax_is_known = false;                  ///< of the only tensor: amax[0]
  /// Whether the next kernel may start before the previous one is done: what it reads early is older.
  bool start_next_early = false;
  /// Whether x was there before the kernel that comes before this one started the next: routing does so when
  /// it has waited. Then rows are read, and the largest numbers found, while it works.
  bool x_is_old = false;
  /// What the next kernel reads is brought to the L2 cache then as well.
  FirstWeights first_weights;

  std::uint16_t* rows = nullptr;  ///< [rows, stride]
  std::int64_t stride = 0;
  InputOrder order = {};
  std::int32_t tile_rows = 0;      ///< GemmInputs
  float* row_scales = nullptr;     ///< [rows], if has_row_scales
  float* record_scales = nullptr;  ///< GemmInputs, if has_record_scales
};

constexpr bool has_row_scales(const Operand& a) {
  return a.quantized() && (a.group.k == 0 || a.tensor_scale.stored());
}
constexpr bool has_record_scales(const Operand& a) {
  return a.quantized() && a.group.k != 0 && a.scale == formats::f32;
}
/// Whether the multiply can take an operand as above.
constexpr bool can_multiply(const Operand& a) {
  if (!a.quantized()) return a.value == formats::bf16 || a.value == formats::f16;
  if (a.value.bits > 8 || a.value == formats::e5m2) return false;
  if (a.group.k == 0) return a.scale == formats::f32;
  if (a.scale == formats::f32) return a.group.k == kRecordColumns;
  return kRecordColumns % a.group.k == 0 && a.group.k >= 4 &&
         (a.scale == formats::ue8m0 || (a.scale == formats::ue4m3 && a.value == formats::e2m1));
}
/// `for_bytes`: of the weights (PackedFormat), whose codes become f16 (takes_scales).
constexpr InputKind input_kind(const Operand& a, bool for_bytes = false) {
  if (has_record_scales(a)) return InputKind::bf16_record_scales;
  return (a.quantized() ? for_bytes : a.value == formats::f16) ? InputKind::f16 : InputKind::bf16;
}

/// The same where codes are multiplied as such, and otherwise input_kind.
constexpr InputKind byte_kind(const Operand& a) {
  if (are_e4m3_rows(a)) return InputKind::e4m3;
  if (!a.quantized() || a.scale != formats::f32) return input_kind(a);
  if (a.value == formats::e4m3) return InputKind::e4m3_record_scales;
  return a.value == formats::int8 && a.group.k == 0 ? InputKind::int8 : input_kind(a);
}

cudaError_t launch_inputs(const InputArgs& args, cudaStream_t stream);
/// Of one matrix's rows of codes only the scales of their records.
cudaError_t launch_record_scales(const InputArgs& args, cudaStream_t stream);

}  // namespace gatefold::cuda
