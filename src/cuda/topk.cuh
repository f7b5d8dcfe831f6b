#pragma once
/// \file
/// The experts of one token, by one warp: route_token of src/moe/routing.cpp, bit for bit. Expert e belongs
/// to lane e % 32, which keeps it in register e / 32.

#include <climits>
#include <cstdint>

#include "cuda/routing.h"
#include "format/exponential.h"

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

template <int kPerLane>
class TokenExperts {
 public:
  /// Reads the logits of a token.
  __device__ __forceinline__ TokenExperts(const RouteArgs& args, int token)
      : args_(args), routing_(args.routing), experts_(args.experts) {
    const float* logits = args.logits + static_cast<std::int64_t>(token) * experts_;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores_[i] = expert(i) < experts_ ? logits[expert(i)] : nan();
    routing_.score == Score::softmax ? softmax() : sigmoid();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (isnan(scores_[i])) scores_[i] = 0;
      const bool there = expert(i) < experts_;
      const float bias = there && args.correction_bias != nullptr ? args.correction_bias[expert(i)] : 0.0f;
      selection_[i] = there ? scores_[i] + bias : nan();
    }
  }

  /// Leaves only the experts of the best groups selectable. `scratch` [E] is this warp's.
  __device__ __forceinline__ void exclude_groups(float* scratch) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (expert(i) < experts_) scratch[expert(i)] = selection_[i];
    __syncwarp();
    routing_.groups <= 32 ? exclude_groups<1>(scratch) : exclude_groups<2>(scratch);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (expert(i) < experts_) selection_[i] = scratch[expert(i)];
    __syncwarp();
  }

  /// The best top_k, ties to the lowest; lane i gets the i-th, and its weight.
  __device__ __forceinline__ void choose(int top_k, int& id, float& weight) {
    std::uint32_t keys[kPerLane];  // 0: not selectable (any more)
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = isnan(selection_[i]) ? 0 : ordered(selection_[i]);
    id = -1;
    weight = 0;
    float sum = 0;
    for (int slot = 0; slot < top_k; ++slot) {
      std::uint32_t best = 0;
      int where = INT_MAX;
#pragma unroll
      for (int i = kPerLane - 1; i >= 0; --i)
        if (keys[i] >= best) best = keys[i], where = expert(i);
      const std::uint32_t highest = __reduce_max_sync(kAllLanes, best);
      int chosen = __reduce_min_sync(kAllLanes, best == highest ? where : INT_MAX);
      if (highest == 0) chosen = lowest_but(id);
      float score = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (expert(i) == chosen) score = scores_[i], keys[i] = 0;
      score = __shfl_sync(kAllLanes, score, chosen % 32);
      sum += score;
      if (lane() == slot) id = chosen, weight = score;
    }
    const float norm = routing_.renormalize ? sum + routing_.epsilon : 1.0f;
    weight = weight / (norm > 0 ? norm : 1.0f) * routing_.scaling_factor;
  }

 private:
  static __device__ __forceinline__ int expert(int i) {
    return i * 32 + lane();
  }
  static __device__ __forceinline__ float nan() {
    return __uint_as_float(0x7fffffffu);
  }
  static __device__ __forceinline__ float minus_infinity() {
    return __uint_as_float(0xff800000u);
  }

  __device__ __forceinline__ void softmax() {
    float largest = minus_infinity();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) largest = fmaxf(largest, scores_[i]);
    largest = from_ordered(__reduce_max_sync(kAllLanes, ordered(largest)));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores_[i] = exponential(scores_[i] - largest);
      if (!isnan(scores_[i])) sum += scores_[i];
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores_[i] /= sum;
  }
  __device__ __forceinline__ void sigmoid() {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores_[i] = 1.0f / (1.0f + exponential(-scores_[i]));
  }

  /// Only a NaN bias leaves too few experts: then any that is not chosen yet will do.
  static __device__ __forceinline__ int lowest_but(int chosen_before) {
    int e = 0;
    while (__any_sync(kAllLanes, chosen_before == e)) ++e;
    return e;
  }

  /// A lane's part in one group: 2^lanes_log2 lanes share a group, and all groups are dealt out at once; more
  /// than 32 in two passes.
  struct GroupShare {
    int lanes_log2, size;  ///< experts of a group
    int first, count;      ///< groups of this pass
    int group;             ///< this lane's
    float value = 0;
    int better = 0;  ///< groups

    __device__ __forceinline__ GroupShare(const RouteArgs& args, int pass)
        : lanes_log2(args.group_lanes_log2), size(args.group_size), first(32 * pass) {
      count = min(32 >> lanes_log2, args.routing.groups - first);
      group = first + (lane() >> lanes_log2);
    }
    template <class Visit>
    __device__ __forceinline__ void for_each(Visit&& visit) const {
      const int lanes = 1 << lanes_log2, end = group < first + count ? size : 0;
#pragma unroll 4
      for (int i = lane() & (lanes - 1); i < end; i += lanes) visit(group * size + i);
    }
    /// The best of the group, or the sum of its two best.
    __device__ __forceinline__ void find_value(const Routing& routing, const float* selection) {
      float best = minus_infinity(), second = best;
      for_each([&](int e) {
        const float x = selection[e];
        const float number = isnan(x) ? minus_infinity() : x;
        second = fmaxf(second, fminf(number, best));
        best = fmaxf(best, number);
      });
      for (int distance = 1; distance < 1 << lanes_log2; distance *= 2) {
        const float other_best = __shfl_xor_sync(kAllLanes, best, distance);
        const float other_second = __shfl_xor_sync(kAllLanes, second, distance);
        second = fmaxf(fmaxf(second, other_second), fminf(best, other_best));
        best = fmaxf(best, other_best);
      }
      value = routing.group_score == GroupScore::max || size == 1 ? best : best + second;
    }
    __device__ __forceinline__ void compare(int other, float theirs) {
      better += theirs > value || (theirs == value && other < group);
    }
  };

  /// NaN for the experts of all groups but the best.
  template <int kPasses>
  __device__ __forceinline__ void exclude_groups(float* selection) const {
    GroupShare shares[] = {{args_, 0}, {args_, kPasses - 1}};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) shares[pass].find_value(routing_, selection);
#pragma unroll
    for (int from = 0; from < kPasses; ++from)
#pragma unroll 8
      for (int at = 0; at < shares[from].count; ++at) {
        const float theirs = __shfl_sync(kAllLanes, shares[from].value, at << shares[from].lanes_log2);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) shares[pass].compare(shares[from].first + at, theirs);
      }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      if (shares[pass].better >= routing_.top_groups)
        shares[pass].for_each([&](int e) { selection[e] = nan(); });
  }

  const RouteArgs& args_;
  const Routing& routing_;
  int experts_;
  float scores_[kPerLane], selection_[kPerLane];
};

}  // namespace gatefold::cuda
