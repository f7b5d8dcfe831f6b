#pragma once
/// \file
/// Tokens of experts to items (slots.h), by one thread block.

#include "cuda/slots.h"

namespace gatefold::cuda {

/// The sum over this lane and those before it, of so many neighbours.
__device__ __forceinline__ int sum_of_lanes_to(int value, int lanes = 32) {
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  for (int step = 1; step < lanes; step *= 2) {
    const int before = __shfl_up_sync(~0u, value, step, lanes);
    if (lane >= step) value += before;
  }
  return value;
}

/// Sums over the threads before this one, and over all.
__device__ __forceinline__ int exclusive_sum(int value, int* total) {
  __shared__ int warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sum = sum_of_lanes_to(value);
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  const int of_warp = lane < static_cast<int>(blockDim.x / 32) ? warps[lane] : 0;
  *total = __reduce_add_sync(~0u, of_warp);
  const int before = __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
  __syncthreads();
  return before + sum - value;
}

/// More experts than these keep their order.
inline constexpr int kMostSortedExperts = 1024;

/// What an expert has.
struct ExpertLoad {
  std::int32_t tokens, items;
};

/// Which experts come first: those with most tokens, and of those with as many (or very many) the lowest.
__device__ __forceinline__ std::uint32_t rank_of(int expert, int tokens) {
  static_assert(kMostSortedExperts == 1 << 10);
  return static_cast<std::uint32_t>(min(tokens, (1 << 22) - 1)) << 10 | (kMostSortedExperts - 1 - expert);
}
struct RankedItems {
  std::uint32_t rank;
  std::int32_t items;
};

/// Items first, first + step, .. of an expert, whose positions begin at `position`; its first item is number
/// `at` of all.
__device__ __forceinline__ void write_items(const ItemArgs& args, int expert, const ExpertLoad& load,
                                            int position, int at, int first, int step) {
  const int items = min(load.items, args.most_items - at);
  if (first >= items) return;
  if (load.items == 1) {  // as most have, without divisions
    args.items[at] = {static_cast<std::int16_t>(expert), static_cast<std::int16_t>(load.tokens), position, 0,
                      1};
    return;
  }
  const EvenCut steps((load.tokens + args.step - 1) / args.step, load.items);
  const EvenCut bands(load.items, (load.items + kMostBandItems - 1) / kMostBandItems);
  for (int i = first; i < items; i += step) {
    const auto cut = [&](int item) { return min(load.tokens, steps.begin(item) * args.step); };
    const int begin = cut(i), end = cut(i + 1);
    const int band = bands.part_of(i), begin_of_band = bands.begin(band);
    args.items[at + i] = {static_cast<std::int16_t>(expert), static_cast<std::int16_t>(end - begin),
                          position + begin, static_cast<std::int16_t>(i - begin_of_band),
                          static_cast<std::int16_t>(min(items, bands.begin(band + 1)) - begin_of_band)};
  }
}

/// `offset`: of the first position of an expert, and of the end of all. Experts with most tokens come first:
/// what is left to the end is then small. By block `part` of `parts`, which cuts those of some experts.
template <class Offset>
__device__ void cut_items(const ItemArgs& args, const Offset& offset, int part, int parts) {
  __shared__ RankedItems ranked[kMostSortedExperts];
  const int experts = args.experts, threads = static_cast<int>(blockDim.x);
  const bool sorted = experts <= kMostSortedExperts;
  if (!sorted && part != 0) return;
  const auto position = [&](int expert) { return max(offset(expert), 0); };
  const auto tokens_of = [&](int expert) {
    return max(min(offset(expert + 1), args.rows) - position(expert), 0);
  };
  const bool pads_rows = args.expert_rows != nullptr && part == 0;
  int count = 0, rows = 0;
  for (int begin = 0; begin < experts; begin += threads) {
    const int expert = begin + static_cast<int>(threadIdx.x);
    const bool there = expert < experts;
    ExpertLoad load{};
    if (there) {
      load.tokens = tokens_of(expert);
      load.items = (load.tokens + args.tokens - 1) / args.tokens;
    }
    if (there && sorted) ranked[expert] = {rank_of(expert, load.tokens), load.items};
    if (pads_rows) {
      int all = 0;
      const int row = rows + exclusive_sum((load.tokens + 7) / 8 * 8, &all);
      if (there) args.expert_rows[expert] = row - position(expert);
      rows += all;
    }
    if (!sorted) {
      int all = 0;
      const int at = count + exclusive_sum(load.items, &all);
      if (there) write_items(args, expert, load, position(expert), at, 0, 1);
      count += all;
    }
  }
  if (!sorted) {
    if (threadIdx.x == 0) *args.item_count = min(count, args.most_items);
    return;
  }
  __syncthreads();
  // A warp has several experts at a time, counts the items before each and all, and some lanes write those of
  // one.
  constexpr int at_once = 4, lanes = 32 / at_once;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int first = at_once * (part + warp * parts); first < experts;
       first += at_once * threads / 32 * parts) {
    std::uint32_t rank[at_once];
    int before[at_once] = {}, all = 0, at = 0;
#pragma unroll
    for (int i = 0; i < at_once; ++i) rank[i] = ranked[min(first + i, experts - 1)].rank;
    for (int other = lane; other < experts; other += 32) {
      const RankedItems its = ranked[other];
      all += its.items;
#pragma unroll
      for (int i = 0; i < at_once; ++i) before[i] += its.rank > rank[i] ? its.items : 0;
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      before[i] = __reduce_add_sync(~0u, before[i]);
      if (lane / lanes == i) at = before[i];
    }
    const int expert = first + lane / lanes;
    if (expert < experts)
      write_items(args, expert, {tokens_of(expert), ranked[expert].items}, position(expert), at, lane % lanes,
                  lanes);
    if (first > 0) continue;
    all = __reduce_add_sync(~0u, all);
    if (lane == 0) *args.item_count = min(all, args.most_items);
  }
}

}  // namespace gatefold::cuda
