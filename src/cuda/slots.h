#pragma once
/// \file
/// The kernels around the multiplies: which tokens go together, and the sum over a token's slots.

#include <cuda_runtime_api.h>

#include "cuda/moe_gemm.h"
#include "gatefold/tensor.h"

namespace gatefold::cuda {

/// A whole cut into parts that differ by at most one: the first ones have one more.
struct EvenCut {
  std::int32_t each, more;

  GATEFOLD_HD constexpr EvenCut(std::int32_t whole, std::int32_t parts)
      : each(whole / parts), more(whole % parts) {}
  GATEFOLD_HD constexpr std::int32_t begin(std::int32_t part) const {
    return part * each + (part < more ? part : more);
  }
  /// Which part has number `at` of the whole.
  GATEFOLD_HD constexpr std::int32_t part_of(std::int32_t at) const {
    const std::int32_t in_larger = more * (each + 1);
    return at < in_larger ? at / (each + 1) : more + (at - in_larger) / each;
  }
};

/// Cuts the tokens of every expert into as few items of at most `tokens` as will do, which are multiples of
/// `step`, but for the rest, and differ by no more than that; experts with most tokens first.
struct ItemArgs {
  std::int32_t experts = 0;
  /// [experts + 1]; what is outside of [0, rows] is cut off. Routing (routing.h) knows them.
  const std::int32_t* expert_offsets = nullptr;
  std::int32_t rows = 0;
  std::int32_t most_items = 0;  ///< that there is room for
  CutItem* items = nullptr;     ///< of routing, nullptr: none are cut
  std::int32_t* item_count = nullptr;
  /// [experts] Of tiles: the row of position p is p and this.
  std::int32_t* expert_rows = nullptr;
  /// So many numbers that become 0, or nullptr.
  std::int32_t* progress = nullptr;
  std::int32_t progress_size = 0;
  std::int32_t tokens = kTileTokens, step = kTileTokens;  ///< tokens: a multiple of step; step: of 8
  std::int32_t band_items = 1;                            ///< the most of a band
};
cudaError_t launch_items(const ItemArgs& args, cudaStream_t stream);

/// Ids and weights of each token, and after them those of the shared expert, which is number `experts`: 1, or
/// sigmoid(x[t] . shared_gate). Ids that no expert has become -1.
struct JoinArgs {
  std::int32_t tokens = 0, top_k = 0, experts = 0;
  const std::int32_t* ids = nullptr;   ///< [tokens, top_k]
  const float* weights = nullptr;      ///< [tokens, top_k]
  const float* shared_gate = nullptr;  ///< [hidden], or nullptr
  MatrixView x;                        ///< hidden states, for the gate
  std::int32_t* all_ids = nullptr;     ///< [tokens, top_k + 1]
  float* all_weights = nullptr;        ///< [tokens, top_k + 1]
};
cudaError_t launch_join(const JoinArgs& args, cudaStream_t stream);

/// Rows of slots, whose experts take their inputs in orders of their own: rows[s, j] = x[s / top_k,
/// orders[ids[s], j]]. Those of ids that no expert has are not written.
struct OrderArgs {
  std::int32_t top_k = 0, experts = 0;
  const std::int32_t* ids = nullptr;     ///< [tokens, top_k]
  const std::int32_t* orders = nullptr;  ///< [experts, hidden]
  MatrixView x;                          ///< [tokens, hidden]
  void* rows = nullptr;                  ///< [tokens, top_k, hidden] of the type of x, 16-byte aligned
};
cudaError_t launch_order(const OrderArgs& args, cudaStream_t stream);

/// out[t] = sum over k of weights[t, k] * slots[t, k] + [sigmoid(hidden[t] . gate)] *
/// shared[t], in f32, in that order. Slots may be sums of two parts: [2, ..], added one after the other.
struct CombineArgs {
  std::int32_t tokens = 0, hidden = 0, top_k = 0, experts = 0;
  const void* slots = nullptr;              ///< [tokens, top_k, hidden], or, with positions, [.., hidden]
  DType slots_dtype = DType::f32;           ///< f32, f16 or bf16
  std::int32_t parts = 1;                   ///< 1 or 2
  const std::int32_t* positions = nullptr;  ///< [tokens, top_k] where slots are, or nullptr
  const std::int32_t* ids = nullptr;   ///< [tokens, top_k]; slots of ids that no expert has are not there
  const float* weights = nullptr;      ///< [tokens, top_k]
  const float* shared = nullptr;       ///< [tokens, hidden], or nullptr
  const float* shared_gate = nullptr;  ///< [hidden], or nullptr
  MatrixView x;                        ///< hidden states, for the gate
  MutableMatrixView out;
};
cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream);

/// out [rows, n] = sum over parts [parts, rows, n], in their order, + bias [n] (or nullptr).
struct SumArgs {
  std::int32_t parts = 1;
  const float* sums = nullptr;
  const float* bias = nullptr;
  MutableMatrixView out;
};
cudaError_t launch_sum(const SumArgs& args, cudaStream_t stream);

}  // namespace gatefold::cuda
