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
/// what is left to the end is then small.
template <class Offset>
__device__ void cut_items(const ItemArgs& args, const Offset& offset) {
  __shared__ RankedItems ranked[kMostSortedExperts];
  __shared__ std::int32_t first_items[kMostSortedExperts];
  const int experts = args.experts, threads = static_cast<int>(blockDim.x);
  const bool sorted = experts <= kMostSortedExperts;
  const auto position = [&](int expert) { return max(offset(expert), 0); };
  const auto load_of = [&](int expert) {
    const int tokens = expert < experts ? max(min(offset(expert + 1), args.rows) - position(expert), 0) : 0;
    return ExpertLoad{tokens, (tokens + args.tokens - 1) / args.tokens};
  };
  int count = 0, rows = 0;
  for (int begin = 0; begin < experts; begin += threads) {
    const int expert = begin + static_cast<int>(threadIdx.x);
    const bool there = expert < experts;
    const ExpertLoad load = load_of(expert);
    int all_items = 0, all_rows = 0;
    const int at = count + exclusive_sum(load.items, &all_items);
    const int row = rows + exclusive_sum((load.tokens + 7) / 8 * 8, &all_rows);
    if (there && args.expert_rows != nullptr) args.expert_rows[expert] = row - position(expert);
    if (there && sorted) ranked[expert] = {rank_of(expert, load.tokens), load.items};
    if (there && !sorted) write_items(args, expert, load, position(expert), at, 0, 1);
    count += all_items;
    rows += all_rows;
  }
  if (threadIdx.x == 0) *args.item_count = min(count, args.most_items);
  if (!sorted) return;
  __syncthreads();
  // A warp counts the items before those of several experts at a time.
  constexpr int at_once = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int first = at_once * warp; first < experts; first += at_once * (threads / 32)) {
    std::uint32_t rank[at_once];
    int at[at_once] = {};
#pragma unroll
    for (int i = 0; i < at_once; ++i) rank[i] = ranked[min(first + i, experts - 1)].rank;
    for (int other = lane; other < experts; other += 32) {
      const RankedItems its = ranked[other];
#pragma unroll
      for (int i = 0; i < at_once; ++i) at[i] += its.rank > rank[i] ? its.items : 0;
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      at[i] = __reduce_add_sync(~0u, at[i]);
      if (lane == i && first + i < experts) first_items[first + i] = at[i];
    }
  }
  __syncthreads();
  // As many write them as there are, about: few warps do what takes many instructions.
  int share = 1;
  while (share < 32 && share * experts < count) share *= 2;
  for (int i = static_cast<int>(threadIdx.x); i < share * experts; i += threads) {
    const int expert = i / share;
    write_items(args, expert, load_of(expert), position(expert), first_items[expert], i % share, share);
  }
}

}  // namespace gatefold::cuda
