#include "cuda/routing.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>

#include "format/exponential.h"

namespace gatefold::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ int lane() {
  return static_cast<int>(threadIdx.x % 32);
}
__device__ __forceinline__ int warp() {
  return static_cast<int>(threadIdx.x / 32);
}
__device__ __forceinline__ int warps() {
  return static_cast<int>(blockDim.x / 32);
}
__device__ __forceinline__ int tokens_of(const RouteArgs& args) {
  return args.token_count != nullptr ? min(*args.token_count, args.tokens) : args.tokens;
}
__device__ __forceinline__ float nan() {
  return __uint_as_float(0x7fffffffu);
}

/// Unsigned integers in the order of floats, -0 like 0; never 0.
__device__ __forceinline__ std::uint32_t ordered(float x) {
  const std::uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}

/// The score of every expert of one token.
struct Scores {
  const float* logits;
  bool softmax;
  float largest = 0, sum = 0;

  /// For a whole warp.
  __device__ Scores(Score kind, const float* token_logits, int experts)
      : logits(token_logits), softmax(kind == Score::softmax) {
    if (!softmax) return;
    largest = __uint_as_float(0xff800000u);
    for (int e = lane(); e < experts; e += 32) largest = fmaxf(largest, logits[e]);
    for (int distance = 16; distance > 0; distance /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, distance));
    for (int e = lane(); e < experts; e += 32) {
      const float part = exponential(logits[e] - largest);
      if (!isnan(part)) sum += part;
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAll, sum, distance);
  }

  __device__ float operator[](int e) const {
    const float score =
        softmax ? exponential(logits[e] - largest) / sum : 1.0f / (1.0f + exponential(-logits[e]));
    return isnan(score) ? 0.0f : score;
  }
};

/// The value of one group of experts: its best, or the sum of its two best.
__device__ float group_value(GroupScore kind, const float* selection, int size) {
  float best = __uint_as_float(0xff800000u), second = best;
  for (int i = 0; i < size; ++i) {
    const float value = selection[i];
    if (isnan(value)) continue;
    second = fmaxf(second, fminf(value, best));
    best = fmaxf(best, value);
  }
  return kind == GroupScore::max || size == 1 ? best : best + second;
}

/// Leaves only the experts of the best groups selectable: at most 64 groups, two per lane.
__device__ void exclude_groups(const Routing& routing, int experts, float* selection) {
  const int size = experts / routing.groups;
  float values[2];
  for (int i = 0; i < 2; ++i) {
    const int group = lane() + 32 * i;
    values[i] =
        group < routing.groups ? group_value(routing.group_score, selection + group * size, size) : 0.0f;
  }
  int better[2] = {0, 0};
  for (int other = 0; other < routing.groups; ++other) {
    const float low = __shfl_sync(kAll, values[0], other % 32),
                high = __shfl_sync(kAll, values[1], other % 32);
    const float theirs = other < 32 ? low : high;
    for (int i = 0; i < 2; ++i)
      better[i] += theirs > values[i] || (theirs == values[i] && other < lane() + 32 * i);
  }
  const std::uint64_t kept = __ballot_sync(kAll, better[0] < routing.top_groups) |
                             static_cast<std::uint64_t>(__ballot_sync(kAll, better[1] < routing.top_groups))
                                 << 32;
  for (int e = lane(); e < experts; e += 32)
    if ((kept >> (e / size) & 1) == 0) selection[e] = nan();
  __syncwarp();
}

/// The best selectable expert among those of this lane, or -1.
__device__ int best_of_lane(const float* selection, int experts) {
  int best = -1;
  for (int e = lane(); e < experts; e += 32)
    if (!isnan(selection[e]) && (best < 0 || selection[e] > selection[best])) best = e;
  return best;
}

/// Ids and weights of one token, by one warp; `selection` [E] is its own. NaN in it: not selectable (any
/// more).
__device__ void route_token(const RouteArgs& args, int token, float* selection) {
  const Routing& routing = args.routing;
  const Scores scores(routing.score, args.logits + static_cast<std::int64_t>(token) * args.experts,
                      args.experts);
  for (int e = lane(); e < args.experts; e += 32)
    selection[e] = scores[e] + (args.correction_bias != nullptr ? args.correction_bias[e] : 0.0f);
  __syncwarp();
  if (routing.groups > 1) exclude_groups(routing, args.experts, selection);

  int id = -1;  // of slot `lane`
  int best = best_of_lane(selection, args.experts);
  for (int slot = 0; slot < args.top_k; ++slot) {
    const std::uint32_t key = best >= 0 ? ordered(selection[best]) : 0;
    const std::uint32_t highest = __reduce_max_sync(kAll, key);
    int chosen = __reduce_min_sync(kAll, highest != 0 && key == highest ? best : INT_MAX);
    // Only a NaN bias leaves too few: any expert not chosen yet will do.
    if (highest == 0)
      for (chosen = 0; __any_sync(kAll, id == chosen);) ++chosen;
    if (lane() == slot) id = chosen;
    if (best == chosen) {
      selection[chosen] = nan();
      best = best_of_lane(selection, args.experts);
    }
  }

  float weight = lane() < args.top_k ? scores[id] : 0.0f;
  float sum = 0;
  for (int slot = 0; slot < args.top_k; ++slot) sum += __shfl_sync(kAll, weight, slot);
  const float norm = routing.renormalize ? sum + routing.epsilon : 1.0f;
  weight = weight / (norm > 0 ? norm : 1.0f) * routing.scaling_factor;
  if (lane() < args.top_k) {
    args.out.topk_ids[token * args.top_k + lane()] = id;
    args.out.topk_weights[token * args.top_k + lane()] = weight;
  }
}

/// Tokens first, first + step, ... of this warp.
__device__ void route_tokens(const RouteArgs& args, int first, int step, float* selection) {
  const int tokens = tokens_of(args);
  for (int token = first; token < tokens; token += step) {
    if (args.logits != nullptr) {
      route_token(args, token, selection);
      __syncwarp();
    } else if (lane() < args.top_k) {
      const int slot = token * args.top_k + lane();
      args.out.topk_ids[slot] = args.given_ids[slot];
      args.out.topk_weights[slot] = args.given_weights[slot];
    }
  }
}

/// Stable counting sort of the slots by expert, by one block. Each warp has a run of consecutive slots;
/// within 32 of them, lanes of one expert find each other by a vote. `counts` [warps, E], `offsets` [E].
__device__ void sort_slots(const RouteArgs& args, std::int32_t* counts, std::int32_t* offsets) {
  const RoutedSlots& out = args.out;
  const int experts = args.experts, slots = tokens_of(args) * args.top_k;
  const int run = (slots + warps() * 32 - 1) / (warps() * 32) * 32;
  std::int32_t* mine = counts + warp() * experts;
  const auto for_each_slot = [&](auto&& visit) {
    for (int begin = warp() * run; begin < min(slots, (warp() + 1) * run); begin += 32) {
      const int slot = begin + lane();
      const int id = slot < slots ? out.topk_ids[slot] : -1;
      const int expert = id >= args.first_expert && id < args.end_expert ? id : -1;
      const unsigned alike = __match_any_sync(kAll, expert);
      const int before = __popc(alike & ((1u << lane()) - 1));
      if (slot < slots) visit(slot, expert, before);
      __syncwarp();
      if (expert >= 0 && before == 0) mine[expert] += __popc(alike);
      __syncwarp();
    }
  };

  for (int i = static_cast<int>(threadIdx.x); i < warps() * experts; i += static_cast<int>(blockDim.x))
    counts[i] = 0;
  __syncthreads();
  for_each_slot([](int, int, int) {});
  __syncthreads();

  // Counts become the slots of the same expert in earlier warps; offsets the slots of an expert.
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
    int sum = 0;
    for (int w = 0; w < warps(); ++w) {
      const int count = counts[w * experts + e];
      counts[w * experts + e] = sum;
      sum += count;
    }
    offsets[e] = sum;
  }
  __syncthreads();

  // Exclusive sums of slots and of active experts: within chunks of 32 experts, then over the chunks before.
  __shared__ int chunk_slots[kMostExperts / 32], chunk_active[kMostExperts / 32];
  const int chunks = (experts + 31) / 32;
  for (int chunk = warp(); chunk < chunks; chunk += warps()) {
    const int e = chunk * 32 + lane();
    const int count = e < experts ? offsets[e] : 0;
    const int sum = __reduce_add_sync(kAll, count);
    const int active = __popc(__ballot_sync(kAll, count > 0));
    if (lane() == 0) chunk_slots[chunk] = sum, chunk_active[chunk] = active;
  }
  __syncthreads();
  const int total = __reduce_add_sync(kAll, lane() < chunks ? chunk_slots[lane()] : 0);
  const int total_active = __reduce_add_sync(kAll, lane() < chunks ? chunk_active[lane()] : 0);
  for (int chunk = warp(); chunk < chunks; chunk += warps()) {
    const int e = chunk * 32 + lane();
    const int count = e < experts ? offsets[e] : 0;
    int sum = count;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int below = __shfl_up_sync(kAll, sum, distance);
      if (lane() >= distance) sum += below;
    }
    const unsigned active = __ballot_sync(kAll, count > 0);
    const int offset = sum - count + __reduce_add_sync(kAll, lane() < chunk ? chunk_slots[lane()] : 0);
    const int rank = __popc(active & ((1u << lane()) - 1)) +
                     __reduce_add_sync(kAll, lane() < chunk ? chunk_active[lane()] : 0);
    if (e < experts) {
      offsets[e] = offset;
      out.expert_offsets[e] = offset;
      if (count > 0) out.active_experts[rank] = e;
      if (e >= total_active) out.active_experts[e] = -1;
    }
  }
  if (threadIdx.x == 0) out.expert_offsets[experts] = total, *out.active_count = total_active;
  __syncthreads();

  for_each_slot([&](int slot, int expert, int before) {
    const int position = expert >= 0 ? offsets[expert] + mine[expert] + before : -1;
    out.slot_position[slot] = position;
    if (position >= 0) out.sorted_slots[position] = slot;
  });
}

extern __shared__ std::int32_t shared_words[];

__global__ void __launch_bounds__(256) route_many(const RouteArgs args) {
  const int first = static_cast<int>(blockIdx.x) * warps() + warp();
  route_tokens(args, first, static_cast<int>(gridDim.x) * warps(),
               reinterpret_cast<float*>(shared_words) + warp() * args.experts);
}

__global__ void __launch_bounds__(1024) sort_many(const RouteArgs args) {
  sort_slots(args, shared_words + args.experts, shared_words);
}

__global__ void __launch_bounds__(1024) route_and_sort(const RouteArgs args) {
  route_tokens(args, warp(), warps(), reinterpret_cast<float*>(shared_words) + warp() * args.experts);
  __syncthreads();
  sort_slots(args, shared_words + args.experts, shared_words);
}

/// A kernel with `words` of shared memory per expert.
template <class Kernel>
cudaError_t launch(Kernel kernel, int blocks, int threads, int words, const RouteArgs& args,
                   cudaStream_t stream) {
  const std::size_t bytes = static_cast<std::size_t>(words) * args.experts * sizeof(std::int32_t);
  if (bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<blocks, threads, bytes, stream>>>(args);
  return cudaGetLastError();
}

/// One warp: expert blockIdx.x * 8 + warp, tokens blockIdx.y * kTokens and on.
constexpr int kTokens = 8;

template <class Hidden>
__global__ void __launch_bounds__(256) multiply_router(const RouterArgs args) {
  const int expert = static_cast<int>(blockIdx.x) * warps() + warp();
  if (expert >= args.experts) return;
  const int first = static_cast<int>(blockIdx.y) * kTokens;
  const int count = min(kTokens, args.tokens - first);
  const auto* hidden =
      static_cast<const Hidden*>(args.hidden) + static_cast<std::int64_t>(first) * args.hidden_size;
  const float* router = args.router + static_cast<std::int64_t>(expert) * args.hidden_size;
  float sums[kTokens] = {};
  for (int h = lane(); h < args.hidden_size; h += 32) {
    const float weight = router[h];
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
      if (t < count)
        sums[t] = fmaf(static_cast<float>(hidden[static_cast<std::int64_t>(t) * args.hidden_size + h]),
                       weight, sums[t]);
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    for (int distance = 16; distance > 0; distance /= 2) sums[t] += __shfl_xor_sync(kAll, sums[t], distance);
    if (lane() == 0 && t < count)
      args.logits[static_cast<std::int64_t>(first + t) * args.experts + expert] =
          sums[t] + (args.bias != nullptr ? args.bias[expert] : 0.0f);
  }
}

}  // namespace

cudaError_t launch_route(const RouteArgs& args, cudaStream_t stream) {
  constexpr int most =
      32;  // warps; route_tokens and sort_slots need a word per warp and expert, and one more
  if (args.tokens <= 64) {
    const int warps = std::clamp(args.tokens, 8, most);
    return launch(route_and_sort, 1, warps * 32, warps + 1, args, stream);
  }
  const cudaError_t error = launch(route_many, (args.tokens + 7) / 8, 256, 8, args, stream);
  return error != cudaSuccess ? error : launch(sort_many, 1, most * 32, most + 1, args, stream);
}

cudaError_t launch_router_logits(const RouterArgs& args, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((args.experts + 7) / 8),
                    static_cast<unsigned>((args.tokens + kTokens - 1) / kTokens));
  if (args.dtype == DType::f32)
    multiply_router<float><<<blocks, 256, 0, stream>>>(args);
  else if (args.dtype == DType::f16)
    multiply_router<__half><<<blocks, 256, 0, stream>>>(args);
  else
    multiply_router<__nv_bfloat16><<<blocks, 256, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace gatefold::cuda
