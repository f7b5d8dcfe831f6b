#pragma once
/// \file
/// The experts of one token, by one warp: route_token of src/moe/routing.cpp, bit for bit. Expert e belongs
/// to lane e % 32. Numbers are kept in shared memory, so that the code is short and the same for any number
/// of experts: the multiply's kernels have a copy each.

#include <cstdint>

#include "cuda/limits.h"
#include "format/exponential.h"
#include "gatefold/moe_spec.h"

namespace gatefold::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane() {
  return static_cast<int>(threadIdx.x % 32);
}
__device__ __forceinline__ int warp() {
  return static_cast<int>(threadIdx.x / 32);
}
__device__ __forceinline__ int warps() {
  return static_cast<int>(blockDim.x / 32);
}

/// Unsigned integers in the order of floats that are not NaN; -0 is 0. They are never 0 themselves.
__device__ __forceinline__ std::uint32_t ordered(float x) {
  const std::uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float from_ordered(std::uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}

/// Words of shared memory for a warp, 16-byte aligned.
__host__ __device__ constexpr int route_warp_words(int experts) {
  return (2 * kMostTopK + 2 * (experts + 8) + experts + 3) / 4 * 4;
}

/// `kGroups`: of experts, that are looked at together. A kernel of its own, whose code is read from memory in
/// each layer, is faster with one.
template <int kGroups>
class TokenExperts {
 public:
  /// From the logits [E] of a token. `bias` [E], or nullptr. `scratch`: route_warp_words(E), of this warp.
  __device__ __forceinline__ TokenExperts(const Routing& routing, int experts, const float* logits,
                                          const float* bias, void* scratch)
      : routing_(routing),
        experts_(experts),
        best_of_lanes_(static_cast<std::uint64_t*>(scratch)),
        keys_(best_of_lanes_ + kMostTopK),
        scores_(reinterpret_cast<float*>(keys_ + experts + 8)) {
    float largest = minus_infinity();
    for_each_expert<8>(
        [&](int e) {
          return float2{logits[e], bias != nullptr ? bias[e] : 0.0f};
        },
        [&](int e, float2 x) {
          largest = fmaxf(largest, x.x);
          scores_[e] = x.x;
          keys_[e] = __float_as_uint(x.y);
        });
    routing_.score == Score::softmax ? softmax(largest) : each_by_itself();
    for_each_expert<4>(
        [&](int e) { return scores_[e] + __uint_as_float(static_cast<std::uint32_t>(keys_[e])); },
        [&](int e, float selection) { keys_[e] = key(isnan(selection) ? 0 : ordered(selection), e); });
    if (routing_.groups > 1) exclude_groups();
  }

  /// The best top_k, ties to the lowest: lane i gets the i-th, the others -1. Once.
  ///
  /// Only experts that may be among them are ranked: those as good as the least of the top_k best lanes,
  /// where a lane is as good as its best expert.
  __device__ __forceinline__ int choose(int top_k) {
    static_assert(kMostTopK == 32, "a lane each");
    std::uint64_t best = 0;
    for_each_expert<4>([&](int e) { return keys_[e]; },
                       [&](int, std::uint64_t key) { best = max(best, key); });
    best_of_lanes_[lane()] = best;
    __syncwarp();
    const int rank = count_better<4>(best, best_of_lanes_, 32);
    const unsigned last = __ballot_sync(kAllLanes, rank == min(top_k, experts_) - 1);
    const std::uint64_t least = __shfl_sync(kAllLanes, best, __ffs(static_cast<int>(last)) - 1);

    // They take the place of those before them.
    constexpr int ahead = 4;
    int count = 0;
#pragma unroll 1
    for (int first = lane(); first - lane() < experts_; first += 32 * ahead) {
      std::uint64_t keys[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i) keys[i] = first + 32 * i < experts_ ? keys_[first + 32 * i] : 0;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const unsigned found = __ballot_sync(kAllLanes, keys[i] >= least);
        if (keys[i] >= least) keys_[count + __popc(found & ((1u << lane()) - 1))] = keys[i];
        count += __popc(found);
      }
    }
    __syncwarp();
    if (lane() < 8) keys_[count + lane()] = 0;  // not better than any
    __syncwarp();
    std::uint64_t* chosen = best_of_lanes_;
    for (int c = lane(); c < count; c += 32) {
      const int place = count_better<1>(keys_[c], keys_, count);
      if (place < top_k) chosen[place] = keys_[c];
    }
    __syncwarp();
    return lane() < top_k ? static_cast<int>(~static_cast<std::uint32_t>(chosen[lane()])) : -1;
  }

  /// The weight of this lane's choice. All lanes have to be done with it before the next token.
  __device__ __forceinline__ float weight(int top_k, int id) const {
    const float score = id < 0 ? 0.0f : scores_[id];
    float sum = 0;
    for (int slot = 0; slot < top_k; slot += 8)  // lanes from top_k on have 0
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += __shfl_sync(kAllLanes, score, slot + i);
    const float norm = routing_.renormalize ? sum + routing_.epsilon : 1.0f;
    return score / (norm > 0 ? norm : 1.0f) * routing_.scaling_factor;
  }

 private:
  static __device__ __forceinline__ float minus_infinity() {
    return __uint_as_float(0xff800000u);
  }

  /// use(e, load(e)) for this lane's experts in ascending order, `kAhead` loads at a time.
  template <int kAhead, class Load, class Use>
  __device__ __forceinline__ void for_each_expert(Load&& load, Use&& use) const {
#pragma unroll 1
    for (int first = lane(); first < experts_; first += 32 * kAhead) {
      decltype(load(0)) loaded[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + 32 * i < experts_) loaded[i] = load(first + 32 * i);
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + 32 * i < experts_) use(first + 32 * i, loaded[i]);
    }
  }

  /// The order of selection is that of keys: an ordered number, and the expert's complement. All differ.
  /// Experts that are not selectable have 0 and come last, the lowest first: only a NaN bias leaves too few
  /// others.
  static __device__ __forceinline__ std::uint64_t key(std::uint32_t selection, int e) {
    return static_cast<std::uint64_t>(selection) << 32 | ~static_cast<std::uint32_t>(e);
  }
  /// How many of keys[0, count) are greater; up to 7 more are read, and have to be 0.
  template <int kUnroll>
  static __device__ __forceinline__ int count_better(std::uint64_t key, const std::uint64_t* keys,
                                                     int count) {
    int better = 0;
#pragma unroll kUnroll
    for (int i = 0; i < count; i += 8)
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const auto two = reinterpret_cast<const ulonglong2*>(keys + i)[pair];
        better += (two.x > key) + (two.y > key);
      }
    return better;
  }

  __device__ __forceinline__ void softmax(float largest) {
    largest = from_ordered(__reduce_max_sync(kAllLanes, ordered(largest)));
    float sum = 0;
    for_each_expert<4>([&](int e) { return exponential(scores_[e] - largest); },
                       [&](int e, float x) {
                         if (!isnan(x)) sum += x;
                         scores_[e] = x;
                       });
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    for_each_expert<4>([&](int e) { return scores_[e] / sum; },
                       [&](int e, float x) { scores_[e] = isnan(x) ? 0.0f : x; });
  }
  __device__ __forceinline__ void each_by_itself() {
    const bool softplus = routing_.score == Score::sqrt_softplus;
    for_each_expert<4>([&](int e) { return softplus ? sqrt_softplus(scores_[e]) : sigmoid(scores_[e]); },
                       [&](int e, float x) { scores_[e] = isfinite(x) ? x : 0.0f; });
  }

  /// Of a group: its best expert, or the sum of its two best; for all lanes.
  __device__ __forceinline__ float group_value(int group, int size) const {
    std::uint32_t best = ordered(minus_infinity()), second = best;  // NaN as well
    for (int i = lane(); i < size; i += 32) {
      const auto x = static_cast<std::uint32_t>(keys_[group * size + i] >> 32);
      second = max(second, min(x, best));
      best = max(best, x);
    }
    const std::uint32_t highest = __reduce_max_sync(kAllLanes, best);
    const int first = __ffs(static_cast<int>(__ballot_sync(kAllLanes, best == highest))) - 1;
    const std::uint32_t next = __reduce_max_sync(kAllLanes, lane() == first ? second : best);
    const float value = from_ordered(highest);
    return routing_.group_score == GroupScore::max || size == 1 ? value : value + from_ordered(next);
  }

  /// Leaves only the experts of the best groups selectable, of up to 64; lane i has groups i and i + 32.
  __device__ __forceinline__ void exclude_groups() {
    const int groups = routing_.groups, size = experts_ / groups;
    __syncwarp();
    float values[2] = {};
#pragma unroll kGroups
    for (int group = 0; group < groups; ++group) {
      const float value = group_value(group, size);
      if (group == lane()) values[0] = value;
      if (group == lane() + 32) values[1] = value;
    }
    int better[2] = {};
#pragma unroll kGroups
    for (int other = 0; other < groups; ++other) {
      const float theirs = __shfl_sync(kAllLanes, other < 32 ? values[0] : values[1], other % 32);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        better[i] += theirs > values[i] || (theirs == values[i] && other < lane() + 32 * i);
    }
    const unsigned kept[2] = {__ballot_sync(kAllLanes, better[0] < routing_.top_groups),
                              __ballot_sync(kAllLanes, better[1] < routing_.top_groups)};
    for (int group = 0; group < groups; ++group)
      if ((kept[group / 32] >> group % 32 & 1) == 0)
        for (int i = group * size + lane(); i < (group + 1) * size; i += 32) keys_[i] = key(0, i);
    __syncwarp();
  }

  const Routing& routing_;
  int experts_;
  std::uint64_t *best_of_lanes_, *keys_;  // [32], and after them the chosen; [E + 8]
  float* scores_;                         // [E]
};

}  // namespace gatefold::cuda
