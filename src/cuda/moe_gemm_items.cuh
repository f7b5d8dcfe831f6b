#pragma once
/// \file
/// The items of a multiply, where a thread block finds them itself: few slots, sorted by expert.

#include "cuda/moe_gemm_ring.cuh"

namespace gatefold::cuda {

__device__ __forceinline__ int sum_bytes(std::uint64_t bytes) {
  const auto low = static_cast<unsigned>(bytes), high = static_cast<unsigned>(bytes >> 32);
  return __dp4a(high, 0x01010101u, __dp4a(low, 0x01010101u, 0u));
}

/// A stable counting sort of at most kFewSlots slots, one a thread: within a warp, lanes of one expert find
/// each other by a vote. Writes the items and, for each position, its slot; returns how many items there are.
/// Ends with a barrier.
template <class T>
__device__ int list_items(const GemmArgs& args, FewTables& tables) {
  constexpr int threads = kFewSlots, warps = threads / 32;  // the others only come to the barriers
  static_assert(T::warps >= warps);
  __shared__ int warp_sums[warps];
  std::uint64_t* counts = tables.counts;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  const int given = thread < args.slots ? args.ids[thread] : -1;
  for (int e = thread; e < args.experts; e += T::threads) counts[e] = 0;
  const int id = static_cast<unsigned>(given) < static_cast<unsigned>(args.experts) ? given : -1;
  const unsigned alike = __match_any_sync(~0u, id);
  const int before = __popc(alike & ((1u << lane) - 1));
  __syncthreads();
  if (id >= 0 && before == 0)
    reinterpret_cast<std::uint8_t*>(counts + id)[warp] = static_cast<std::uint8_t>(__popc(alike));
  __syncthreads();

  // Slots in the lower half, items in the upper one; a thread has the experts from `first` on.
  const int each = (args.experts + threads - 1) / threads;
  const int first = thread * each, end = min(first + each, args.experts);
  int own = 0;
  for (int e = first; e < end; ++e) {
    const int count = sum_bytes(counts[e]);
    own += (count + T::tokens - 1) / T::tokens << 16 | count;
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
    tables.offsets[e] = at;
    for (; at < next; at += T::tokens)
      tables.items[item++] = {static_cast<std::int16_t>(e),
                              static_cast<std::int16_t>(min(T::tokens, next - at)), at};
    at = next;
  }
  __syncthreads();
  if (id >= 0) {
    const std::uint64_t earlier = counts[id] & ((std::uint64_t{1} << (8 * warp)) - 1);
    tables.slots[tables.offsets[id] + sum_bytes(earlier) + before] = thread;
  }
  __syncthreads();
  return all >> 16;
}

/// The items that this block's kernel multiplies.
template <class T>
__device__ Items find_items(const GemmArgs& args, FewTables& tables) {
  if (args.ids != nullptr) {
    const int count = list_items<T>(args, tables);
    return {tables.items, tables.slots, count};
  }
  if (args.items != nullptr) return {args.items, args.sorted_slots, *args.item_count};
  return {nullptr, nullptr, (args.slots + T::tokens - 1) / T::tokens};
}

}  // namespace gatefold::cuda
