#pragma once
/// \file
/// Tokens of experts to items (slots.h), by one thread block.

#include "cuda/slots.h"

namespace gatefold::cuda {

/// Sums over the threads before this one, and over all.
__device__ __forceinline__ int exclusive_sum(int value, int* total) {
  __shared__ int warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
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
  __shared__ ExpertLoad loads[kMostSortedExperts];
  const int experts = args.experts, threads = static_cast<int>(blockDim.x);
  const bool sorted = experts <= kMostSortedExperts;
  const auto position = [&](int expert) { return max(offset(expert), 0); };
  int count = 0, rows = 0;
  for (int begin = 0; begin < experts; begin += threads) {
    const int expert = begin + static_cast<int>(threadIdx.x);
    const bool there = expert < experts;
    const int first = there ? position(expert) : 0;
    ExpertLoad load = {there ? max(min(offset(expert + 1), args.rows) - first, 0) : 0, 0};
    load.items = (load.tokens + args.tokens - 1) / args.tokens;
    int all_items = 0, all_rows = 0;
    const int at = count + exclusive_sum(load.items, &all_items);
    const int row = rows + exclusive_sum((load.tokens + 7) / 8 * 8, &all_rows);
    if (there && args.expert_rows != nullptr) args.expert_rows[expert] = row - first;
    if (there && sorted) loads[expert] = load;
    if (!sorted) write_items(args, expert, load, first, at, 0, 1);
    count += all_items;
    rows += all_rows;
  }
  if (threadIdx.x == 0) *args.item_count = min(count, args.most_items);
  if (!sorted) return;
  __syncthreads();
  // So many neighbouring lanes count the items before those of an expert, and write its own.
  int share = 32;
  while (share > 1 && share * experts > threads) share /= 2;
  const int own = static_cast<int>(threadIdx.x) % share;
  for (int begin = 0; begin < experts; begin += threads / share) {
    const int expert = begin + static_cast<int>(threadIdx.x) / share;
    const ExpertLoad load = expert < experts ? loads[expert] : ExpertLoad{0, 0};
    int at = 0;
    for (int other = own; other < experts; other += share) {
      const ExpertLoad its = loads[other];
      if (its.tokens > load.tokens || (its.tokens == load.tokens && other < expert)) at += its.items;
    }
    for (int lanes = 1; lanes < share; lanes *= 2) at += __shfl_xor_sync(~0u, at, lanes);
    if (expert < experts) write_items(args, expert, load, position(expert), at, own, share);
  }
}

}  // namespace gatefold::cuda
