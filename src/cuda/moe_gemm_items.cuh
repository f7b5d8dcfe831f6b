#pragma once
/// \file
/// The items of a multiply, where a thread block finds them itself: it routes few tokens, and sorts few slots
/// by expert.

#include "cuda/moe_gemm_ring.cuh"
#include "cuda/topk.cuh"

namespace gatefold::cuda {

/// Routes tokens, a warp each; ids [slots]. `scratch`: kFewTokens * route_warp_words(experts) words. Ends
/// with a barrier; after it, copies may write to the scratch.
__device__ __noinline__ inline void route_few_tokens(GemmRouting args, int experts, int slots,
                                                     std::int32_t* scratch, std::int32_t* ids) {
  const int first = warp() * args.top_k;
  if (first < slots) {
    TokenExperts<4> chosen(args.rules, experts, args.logits + static_cast<std::int64_t>(warp()) * experts,
                           args.correction_bias, scratch + warp() * route_warp_words(experts));
    const int id = chosen.choose(args.top_k);
    if (lane() < args.top_k) ids[first + lane()] = id;
    if (blockIdx.x == 0) {
      const float weight = chosen.weight(args.top_k, id);
      if (lane() < args.top_k) {
        args.topk_ids[first + lane()] = id;
        args.topk_weights[first + lane()] = weight;
        __threadfence();  // before this block lets the next kernel start
      }
    }
    shared_memory_to_copies();
  }
  __syncthreads();
}

/// Sorts slots, one a thread, of expert `id` or of none: writes the items, by expert, and the slots, by
/// expert and then in order, and returns how many items there are. A barrier has to follow.
///
/// At most 64 slots: each compares its expert with those of all others.
template <int kTokens>
__device__ int list_few_items(int id, int slots, FewTables* tables) {
  // Bits are slots.
  const int slot = static_cast<int>(threadIdx.x);
  const auto mine = static_cast<unsigned>(id);  // none comes last
  auto* ids = reinterpret_cast<unsigned*>(tables->counts);
  auto* begins = reinterpret_cast<unsigned*>(tables->counts + 32);  // an item
  if (slot < 64) ids[slot] = mine;
  __syncthreads();
  std::uint64_t lower = 0, same = 0;
#pragma unroll 1
  for (int first = 0; first < min(slots, 64) && slot < 64; first += 32) {
    unsigned low = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(ids + first + i);
      low |= (two.x < mine) << i | (two.y < mine) << (i + 1);
      equal |= (two.x == mine) << i | (two.y == mine) << (i + 1);
    }
    lower |= static_cast<std::uint64_t>(low) << first;
    same |= static_cast<std::uint64_t>(equal) << first;
  }
  const std::uint64_t earlier = same & ((std::uint64_t{1} << (slot % 64)) - 1);
  const int before = __popcll(earlier);
  const bool begin = slot < 64 && id >= 0 && before % kTokens == 0;
  const unsigned begin_of_warp = __ballot_sync(kAllLanes, begin);
  if (slot == 0 || slot == 32) begins[slot / 32] = begin_of_warp;
  __syncthreads();
  const std::uint64_t all_begin = tables->counts[32], ahead = lower | earlier;
  const int position = __popcll(ahead);
  if (slot < 64 && id >= 0) tables->slots[position] = slot;
  if (begin)
    tables->items[__popcll(ahead & all_begin)] = {
        static_cast<std::int16_t>(id), static_cast<std::int16_t>(min(kTokens, __popcll(same) - before)),
        position};
  return __popcll(all_begin);
}

/// The slots of one token, which are items as they are; lanes of every warp come with the same ids.
__device__ __forceinline__ int list_slots(int id, FewTables* tables) {
  const unsigned there = __ballot_sync(kAllLanes, id >= 0);
  if (warp() == 0 && id >= 0)
    tables->items[__popc(there & ((1u << lane()) - 1))] = {static_cast<std::int16_t>(id), 1, lane()};
  return __popc(there);
}

__device__ __forceinline__ int sum_bytes(std::uint64_t bytes) {
  const auto low = static_cast<unsigned>(bytes), high = static_cast<unsigned>(bytes >> 32);
  return __dp4a(high, 0x01010101u, __dp4a(low, 0x01010101u, 0u));
}

/// The same of at most kFewSlots slots, by a stable counting sort: within a warp, lanes of one expert find
/// each other by a vote.
template <int kTokens>
__device__ int list_items(int id, int experts, FewTables* tables) {
  constexpr int threads = kFewSlots, warps = threads / 32;  // the others only come to the barriers
  __shared__ int warp_sums[warps];
  std::uint64_t* counts = tables->counts;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;

  for (int e = thread; e < experts; e += static_cast<int>(blockDim.x)) counts[e] = 0;
  const unsigned alike = __match_any_sync(~0u, id);
  const int before = __popc(alike & ((1u << lane) - 1));
  __syncthreads();
  if (id >= 0 && before == 0)
    reinterpret_cast<std::uint8_t*>(counts + id)[warp] = static_cast<std::uint8_t>(__popc(alike));
  __syncthreads();

  // Slots in the lower half, items in the upper one; a thread has the experts from `first` on.
  const int each = (experts + threads - 1) / threads;
  const int first = thread * each, end = min(first + each, experts);
  int own = 0;
  for (int e = first; e < end; ++e) {
    const int count = sum_bytes(counts[e]);
    own += (count + kTokens - 1) / kTokens << 16 | count;
  }
  int sum = own;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += below;
  }
  if (lane == 31 && warp < warps) warp_sums[warp] = sum;
  __syncthreads();
  int all = 0;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) sum += warp_sums[w];
    all += warp_sums[w];
  }
  sum -= own;
  for (int e = first, at = sum & 0xffff, item = sum >> 16; e < end; ++e) {
    const int next = at + sum_bytes(counts[e]);
    tables->offsets[e] = at;
    for (; at < next; at += kTokens)
      tables->items[item++] = {static_cast<std::int16_t>(e),
                               static_cast<std::int16_t>(min(kTokens, next - at)), at};
    at = next;
  }
  __syncthreads();
  if (id >= 0) {
    const std::uint64_t earlier = counts[id] & ((std::uint64_t{1} << (8 * warp)) - 1);
    tables->slots[tables->offsets[id] + sum_bytes(earlier) + before] = thread;
  }
  return all >> 16;
}

/// The items that this block's kernel multiplies; a barrier has to follow. `scratch`: the ring's memory.
template <class T>
__device__ __forceinline__ Items find_items(const GemmArgs& args, FewTables& tables, std::byte* scratch) {
  static_assert(T::warps >= kFewTokens && T::warps * 32 >= kFewSlots);
  static_assert(T::ring_bytes >= kFewTokens * route_warp_words(kFewExperts) * 4);
  // More tokens than kFewTokens are for other kernels.
  const bool routes = T::tokens == kFewTokens && args.routing.logits != nullptr;
  if (routes)
    route_few_tokens(args.routing, args.experts, args.slots, reinterpret_cast<std::int32_t*>(scratch),
                     tables.slots);
  if (routes || args.ids != nullptr) {
    const bool one_token = T::tokens == kFewTokens && args.one_token;
    const int slot = one_token ? lane() : static_cast<int>(threadIdx.x);
    int id = -1;
    if (slot < args.slots) id = routes ? tables.slots[slot] : __ldcg(args.ids + slot);
    if (static_cast<unsigned>(id) >= static_cast<unsigned>(args.experts)) id = -1;
    if (one_token) return {tables.items, nullptr, list_slots(id, &tables)};
    const int count = T::tokens == kFewTokens && args.slots <= 64
                          ? list_few_items<T::tokens>(id, args.slots, &tables)
                          : list_items<T::tokens>(id, args.experts, &tables);
    return {tables.items, tables.slots, count};
  }
  if (args.items != nullptr) return {nullptr, args.sorted_slots, *args.item_count};
  return {nullptr, nullptr, args.whole_items * args.parts};
}

}  // namespace gatefold::cuda
