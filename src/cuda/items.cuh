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

/// Items first, first + step, .. of an expert, whose positions begin at `position`, and its rows of tiles at
/// `row`; its first item is number `at` of all.
__device__ __forceinline__ void write_items(const ItemArgs& args, int expert, const ExpertLoad& load,
                                            int position, int row, int at, int first, int step) {
  const int items = min(load.items, args.most_items - at);
  if (first >= items) return;
  if (load.items == 1) {  // as most have, without divisions
    args.items[at] = {
        {static_cast<std::int16_t>(expert), static_cast<std::int16_t>(load.tokens), position}, row, 0, 1};
    return;
  }
  const EvenCut steps((load.tokens + args.step - 1) / args.step, load.items);
  const EvenCut bands(load.items, (load.items + args.band_items - 1) / args.band_items);
#pragma unroll 1
  for (int i = first; i < items; i += step) {
    const auto cut = [&](int item) { return min(load.tokens, steps.begin(item) * args.step); };
    const int begin = cut(i), end = cut(i + 1);
    const int band = bands.part_of(i), begin_of_band = bands.begin(band);
    args.items[at + i] = {
        {static_cast<std::int16_t>(expert), static_cast<std::int16_t>(end - begin), position + begin},
        row + begin,
        static_cast<std::int16_t>(i - begin_of_band),
        static_cast<std::int16_t>(min(items, bands.begin(band + 1)) - begin_of_band)};
  }
}

/// What the offsets of experts (of the first position of each, and of the end of all) say.
template <class Offset>
struct ExpertLoads {
  const ItemArgs& args;
  const Offset& offset;

  __device__ int position(int expert) const { return max(offset(expert), 0); }
  __device__ ExpertLoad of(int expert) const {
    const int tokens = max(min(offset(expert + 1), args.rows) - position(expert), 0);
    return {tokens, (tokens + args.tokens - 1) / args.tokens};
  }
};

/// By block `part` of `parts`.
__device__ __forceinline__ void clear_progress(const ItemArgs& args, int part, int parts) {
#pragma unroll 1
  for (int i = part * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x); i < args.progress_size;
       i += parts * static_cast<int>(blockDim.x))
    args.progress[i] = 0;
}

/// Experts with most tokens come first: what is left to the end is then small. By block `part` of `parts`,
/// which cuts those of some experts, of at most kMostSortedExperts.
template <class Offset>
__device__ void cut_items(const ItemArgs& args, const Offset& offset, int part, int parts) {
  __shared__ RankedItems ranked[kMostSortedExperts];
  __shared__ std::int32_t first_rows[kMostSortedExperts];  // of tiles
  const ExpertLoads<Offset> loads{args, offset};
  const int experts = args.experts, threads = static_cast<int>(blockDim.x);
  clear_progress(args, part, parts);
  int rows = 0;
#pragma unroll 1
  for (int begin = 0; begin < experts; begin += threads) {
    const int expert = begin + static_cast<int>(threadIdx.x);
    const bool there = expert < experts;
    const ExpertLoad load = there ? loads.of(expert) : ExpertLoad{};
    if (there) ranked[expert] = {rank_of(expert, load.tokens), load.items};
    int all = 0;
    const int row = rows + exclusive_sum((load.tokens + 7) / 8 * 8, &all);
    if (there) first_rows[expert] = row;
    if (there && part == 0) args.expert_rows[expert] = row - loads.position(expert);
    rows += all;
  }
  __syncthreads();
  // A warp has several experts at a time, counts the items before each and all, and some lanes write those of
  // one.
  constexpr int at_once = 4, lanes = 32 / at_once;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int first = at_once * (part + warp * parts); first < experts;
       first += at_once * threads / 32 * parts) {
    std::uint32_t rank[at_once];
    int before[at_once] = {}, all = 0, at = 0;
#pragma unroll
    for (int i = 0; i < at_once; ++i) rank[i] = ranked[min(first + i, experts - 1)].rank;
#pragma unroll 1
    for (int other = lane; other < experts; other += 32) {
      const RankedItems its = ranked[other];
      all += its.items;
#pragma unroll
      for (int i = 0; i < at_once; ++i) before[i] += its.rank > rank[i] ? its.items : 0;
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int sum = __reduce_add_sync(~0u, before[i]);
      if (lane / lanes == i) at = sum;
    }
    const int expert = first + lane / lanes;
    if (expert < experts)
      write_items(args, expert, loads.of(expert), loads.position(expert), first_rows[expert], at,
                  lane % lanes, lanes);
    if (first > 0) continue;
    all = __reduce_add_sync(~0u, all);
    if (lane == 0) *args.item_count = min(all, args.most_items);
  }
}

/// The same, but experts keep their order; of any number of them, by one block.
template <class Offset>
__device__ void cut_items_in_order(const ItemArgs& args, const Offset& offset) {
  const ExpertLoads<Offset> loads{args, offset};
  int count = 0, rows = 0;
  clear_progress(args, 0, 1);
#pragma unroll 1
  for (int begin = 0; begin < args.experts; begin += static_cast<int>(blockDim.x)) {
    const int expert = begin + static_cast<int>(threadIdx.x);
    const bool there = expert < args.experts;
    const ExpertLoad load = there ? loads.of(expert) : ExpertLoad{};
    int all_items = 0, all_rows = 0;
    const int at = count + exclusive_sum(load.items, &all_items);
    const int row = rows + exclusive_sum((load.tokens + 7) / 8 * 8, &all_rows);
    if (there) {
      args.expert_rows[expert] = row - loads.position(expert);
      write_items(args, expert, load, loads.position(expert), row, at, 0, 1);
    }
    count += all_items;
    rows += all_rows;
  }
  if (threadIdx.x == 0) *args.item_count = min(count, args.most_items);
}

}  // namespace gatefold::cuda
