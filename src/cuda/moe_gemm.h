#pragma once
/// \file
/// The matrix multiply of an MoE layer over packed weights, for any number of tokens: each expert's rows by
/// the tokens that chose it, with what follows it (gate and up: bias and activation; down: bias).

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/packed.h"
#include "gatefold/moe_spec.h"

namespace gatefold::cuda {

/// Tokens of one expert that are multiplied together: positions [first, first + count).
struct Item {
  std::int32_t expert, first, count, unused;
};

/// 16-bit rows: codes of quantized activations are held as the bf16 of their value, which is exact.
struct GemmInputs {
  const std::uint16_t* rows = nullptr;   ///< [.., stride], 16-byte aligned; columns that K lacks are 0
  std::int64_t stride = 0;               ///< of rows; a multiple of kRecordColumns
  const float* row_scales = nullptr;     ///< [rows], or nullptr
  const float* record_scales = nullptr;  ///< [rows, stride / kRecordColumns], or nullptr
  const std::int32_t* slots = nullptr;   ///< position -> slot; row = slot / top_k. nullptr: row = position
  std::int32_t top_k = 1;
};

enum class GemmKind : std::uint8_t { gate_up, down };

struct GemmArgs {
  const std::byte* weights = nullptr;            ///< of expert 0 (packed.h)
  std::int64_t expert_stride = 0;                ///< bytes
  std::int32_t groups = 0, steps = 0, rows = 0;  ///< of units; of a group; of one matrix
  GemmInputs inputs;
  /// nullptr: all tokens of an expert are an item, of which active_experts and expert_offsets tell.
  const Item* items = nullptr;
  const std::int32_t *active_experts = nullptr, *expert_offsets = nullptr;
  const std::int32_t* item_count = nullptr;
  /// Whether the items were written by a kernel before the previous one, so that weights may be read early.
  bool items_are_old = false;
  GemmKind kind = GemmKind::gate_up;
  Activation activation;                            ///< gate_up
  const float *bias = nullptr, *up_bias = nullptr;  ///< [experts, rows], or nullptr
  void* out = nullptr;                              ///< [positions, out_stride]
  std::int64_t out_stride = 0;
  DType out_dtype = DType::f32;
};

/// What a multiply's inputs are.
enum class InputKind : std::uint8_t { bf16, f16, bf16_record_scales };

inline constexpr int kTileTokens = 8;

struct GemmKernel {
  const void* function = nullptr;  ///< nullptr: there is none
  int threads = 0, shared_bytes = 0;
  int tokens = 0;  ///< the most of an item
};
/// `wide`: packed_format. `few`: items have at most 8 tokens.
GemmKernel find_gemm(SchemeId scheme, bool wide, InputKind input, bool few);

cudaError_t launch_gemm(const GemmKernel& kernel, const GemmArgs& args, int blocks, cudaStream_t stream);

}  // namespace gatefold::cuda
