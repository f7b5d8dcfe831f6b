#pragma once
/// \file
/// The kernels around the multiplies: which tokens go together, and the sum over a token's slots.

#include <cuda_runtime_api.h>

#include "cuda/moe_gemm.h"
#include "gatefold/tensor.h"

namespace gatefold::cuda {

/// Cuts the tokens of every expert in use into items of at most `tokens`, experts in ascending order, and all
/// `all_tokens` tokens into items of one (the shared) expert.
struct ItemArgs {
  const std::int32_t* active_experts = nullptr;
  const std::int32_t* active_count = nullptr;
  const std::int32_t* expert_offsets = nullptr;
  Item* items = nullptr;
  std::int32_t* item_count = nullptr;
  std::int32_t tokens = kTileTokens;

  Item* shared_items = nullptr;  ///< nullptr: there is no shared expert
  std::int32_t* shared_item_count = nullptr;
  std::int32_t shared_tokens = kTileTokens, all_tokens = 0;
};
cudaError_t launch_items(const ItemArgs& args, cudaStream_t stream);

/// out[t] = sum over k of weights[t, k] * slots[position of (t, k)] + [sigmoid(hidden[t] . gate)] *
/// shared[t], in f32, in that order.
struct CombineArgs {
  std::int32_t tokens = 0, hidden = 0, top_k = 0;
  const float* slots = nullptr;            ///< [positions, hidden]
  const std::int32_t* position = nullptr;  ///< [tokens, top_k]; negative: not here
  const float* weights = nullptr;          ///< [tokens, top_k]
  const float* shared = nullptr;           ///< [tokens, hidden], or nullptr
  const float* shared_gate = nullptr;      ///< [hidden], or nullptr
  MatrixView x;                            ///< hidden states, for the gate
  MutableMatrixView out;
};
cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream);

}  // namespace gatefold::cuda
