#pragma once
/// \file
/// Routing on the device: logits (or ids and weights) to experts, and slots in the order of experts.
///
/// A slot is one (token, chosen expert) pair: slot t * top_k + i is the i-th choice of token t. A slot's
/// position is its place when slots are sorted by expert, tokens in order within an expert.

#include "cuda/device.h"
#include "cuda/limits.h"
#include "cuda/slots.h"
#include "gatefold/moe_spec.h"

namespace gatefold::cuda {

/// Device pointers: T tokens, S = T * top_k slots, E experts.
struct RoutedSlots {
  std::int32_t* topk_ids;        ///< [T, top_k] in descending order of selection; of given ids: not written
  float* topk_weights;           ///< [T, top_k]; the same
  std::int32_t* expert_offsets;  ///< [E + 1] first position of an expert; last: the number of positions
  std::int32_t* slot_position;   ///< [S] slot -> position; -1 for experts outside the range
  std::int32_t* sorted_slots;    ///< [S] position -> slot; written up to the number of positions
};

/// Give `logits` or `given_ids`. Everything is device memory; nothing outlives the work in the stream.
struct RouteArgs {
  int tokens = 0;
  int experts = 0;
  int top_k = 0;
  Routing routing;
  const float* logits = nullptr;           ///< [T, E]
  const float* correction_bias = nullptr;  ///< [E], or nullptr
  /// [T, top_k]; ids outside [first_expert, end_expert) get no position
  const std::int32_t* given_ids = nullptr;
  int first_expert = 0, end_expert = 0;       ///< the experts of this rank: only their slots get positions
  const std::int32_t* token_count = nullptr;  ///< [1], or nullptr: the tokens of this call, at most `tokens`
  RoutedSlots out{};
  std::int32_t* block_counts = nullptr;  ///< scratch: route_scratch_words
};

/// Words of scratch for up to so many tokens: 0 up to 1024.
std::size_t route_scratch_words(int tokens, int experts);

/// Scores, selection, ids and weights have the bits of route_token (src/moe/routing.cpp), for every logit,
/// NaN and Inf included. One launch for up to 32768 slots and three for more, and one before them for logits.
/// No host synchronization. Errors: more than kMostExperts or kMostTopK, top_k > experts, a bad range, and
/// what CUDA says of the launch.
Status route(const RouteArgs& args, Stream stream);

/// logits [T, E] = hidden [T, H] . router [E, H]^T + bias. Tensor cores multiply numbers of 16 bits of one
/// type as they are, others by parts of 11 bits: both operands have their 16 bits, or 22 of f32. Sums are
/// f32, in an order that depends on H alone. The CPU sums in another order, so that its logits may differ by
/// rounding.
struct RouterArgs {
  int tokens = 0, experts = 0, hidden_size = 0;
  const void* hidden = nullptr;  ///< f32, f16 or bf16
  DType dtype = DType::bf16;
  const float* router = nullptr;
  /// The same in the type of `hidden`, if that has 16 bits and all of the router's numbers; else nullptr.
  const void* router16 = nullptr;
  const float* bias = nullptr;  ///< [E], or nullptr
  float* logits = nullptr;
};
Status router_logits(const RouterArgs& args, Stream stream);

/// The launches behind them; `items`: what the offsets of the experts are cut into.
cudaError_t launch_route(const RouteArgs& args, const ItemArgs& items, cudaStream_t stream);
/// Only out.topk_ids and out.topk_weights, from logits: nothing is sorted, and the next kernel may start
/// early.
cudaError_t launch_choose(const RouteArgs& args, cudaStream_t stream);
cudaError_t launch_router_logits(const RouterArgs& args, cudaStream_t stream);

}  // namespace gatefold::cuda
