#include <cuda_bf16.h>

#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/slots.h"

namespace gatefold::cuda {
namespace {

/// Sums over the threads before this one.
template <int kThreads>
__device__ int exclusive_sum(int value, int* total) {
  __shared__ int warps[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    before += w < warp ? warps[w] : 0;
    all += warps[w];
  }
  __syncthreads();
  *total = all;
  return before + sum - value;
}

constexpr int kItemThreads = 256;

__global__ void __launch_bounds__(kItemThreads) items_kernel(const ItemArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const bool all_of_them = args.active_experts == nullptr;
  const int active = all_of_them ? args.experts : *args.active_count;
  int count = 0, rows = 0;
  for (int begin = 0; begin < active; begin += kItemThreads) {
    const int i = begin + threadIdx.x;
    const int expert = i >= active ? 0 : all_of_them ? i : args.active_experts[i];
    const int first = max(args.expert_offsets[expert], 0),
              last = max(min(args.expert_offsets[expert + 1], args.rows), first);
    const int tokens = i < active ? last - first : 0, items = (tokens + args.tokens - 1) / args.tokens;
    const int steps = (tokens + args.step - 1) / args.step;
    int all_items = 0, all_rows = 0;
    const int at = count + exclusive_sum<kItemThreads>(items, &all_items);
    const int row = rows + exclusive_sum<kItemThreads>((tokens + 7) / 8 * 8, &all_rows);
    if (args.expert_rows != nullptr && i < active) args.expert_rows[expert] = row - first;
    for (int item = 0, begin_at = 0; item < items && at + item < args.most_items; ++item) {
      const int end_at = min(tokens, steps * (item + 1) / items * args.step);
      args.items[at + item] = {static_cast<std::int16_t>(expert),
                               static_cast<std::int16_t>(end_at - begin_at), first + begin_at};
      begin_at = end_at;
    }
    count += all_items;
    rows += all_rows;
  }
  if (threadIdx.x == 0) *args.item_count = min(count, args.most_items);
}

constexpr int kCombineThreads = 128;
constexpr int kPerThread = 4;

__device__ float load(const MatrixView& x, std::int64_t at) {
  if (x.dtype == DType::f32) return static_cast<const float*>(x.data)[at];
  const std::uint16_t code = static_cast<const std::uint16_t*>(x.data)[at];
  return x.dtype == DType::bf16 ? decode<formats::bf16>(code) : decode<formats::f16>(code);
}
__device__ void store(const MutableMatrixView& out, std::int64_t at, float value) {
  if (out.dtype == DType::f32)
    static_cast<float*>(out.data)[at] = value;
  else
    static_cast<std::uint16_t*>(out.data)[at] = static_cast<std::uint16_t>(
        out.dtype == DType::bf16 ? encode<formats::bf16>(value) : encode<formats::f16>(value));
}

/// The sum over the block, the same for all threads.
__device__ float block_sum(float value) {
  __shared__ float warps[kCombineThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (const float warp : warps) sum += warp;
  __syncthreads();
  return sum;
}

__device__ float shared_weight(const CombineArgs& args, int token) {
  if (args.shared_gate == nullptr) return 1.0f;
  float dot = 0;
  for (int h = threadIdx.x; h < args.hidden; h += kCombineThreads)
    dot = fmaf(load(args.x, static_cast<std::int64_t>(token) * args.hidden + h), args.shared_gate[h], dot);
  return 1.0f / (1.0f + expf(-block_sum(dot)));
}

/// kPerThread numbers of a slot; those from `count` on are 0.
__device__ __forceinline__ float4 load_slot(const __nv_bfloat16* x, int count) {
  uint2 pairs{};
  if (count == kPerThread && reinterpret_cast<std::uintptr_t>(x) % 8 == 0) {
    pairs = *reinterpret_cast<const uint2*>(x);
  } else {
    const auto* codes = reinterpret_cast<const std::uint16_t*>(x);
    for (int i = 0; i < count; ++i) (i < 2 ? pairs.x : pairs.y) |= codes[i] << (i % 2 * 16);
  }
  return {__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
          __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u)};
}
__device__ __forceinline__ float4 load_slot(const float* x, int count) {
  if (count == kPerThread && reinterpret_cast<std::uintptr_t>(x) % 16 == 0)
    return *reinterpret_cast<const float4*>(x);
  return {count > 0 ? x[0] : 0.0f, count > 1 ? x[1] : 0.0f, count > 2 ? x[2] : 0.0f, count > 3 ? x[3] : 0.0f};
}

/// Block (i, t): a piece of token t. All loads of eight slots are begun before the first is used.
template <class Slot>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const CombineArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  constexpr int ahead = 8;
  for (int token = blockIdx.y; token < args.tokens; token += gridDim.y) {
    const float share = args.shared == nullptr ? 0.0f : shared_weight(args, token);
    const int h = (blockIdx.x * kCombineThreads + threadIdx.x) * kPerThread;
    const int count = min(kPerThread, args.hidden - h);
    if (count <= 0) continue;
    float sums[kPerThread] = {};
    for (int first = 0; first < args.top_k; first += ahead) {
      float4 x[ahead];
      float weights[ahead];
      bool there[ahead];
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        const std::int64_t slot =
            static_cast<std::int64_t>(token) * args.top_k + min(first + k, args.top_k - 1);
        const std::int64_t row = args.positions == nullptr ? slot : max(args.positions[slot], 0);
        x[k] = load_slot(static_cast<const Slot*>(args.slots) + row * args.hidden + h, count);
        weights[k] = args.weights[slot];
        there[k] = first + k < args.top_k &&
                   static_cast<unsigned>(args.ids[slot]) < static_cast<unsigned>(args.experts);
      }
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        if (!there[k]) continue;
        sums[0] = fmaf(weights[k], x[k].x, sums[0]);
        sums[1] = fmaf(weights[k], x[k].y, sums[1]);
        sums[2] = fmaf(weights[k], x[k].z, sums[2]);
        sums[3] = fmaf(weights[k], x[k].w, sums[3]);
      }
    }
    const std::int64_t at = static_cast<std::int64_t>(token) * args.hidden + h;
    for (int i = 0; i < count; ++i) {
      if (args.shared != nullptr) sums[i] = fmaf(share, args.shared[at + i], sums[i]);
      store(args.out, at + i, sums[i]);
    }
  }
}

/// Block (i, r): a piece of row r.
__global__ void __launch_bounds__(kCombineThreads) sum_kernel(const SumArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto n = static_cast<int>(args.out.cols);
  const int column = (blockIdx.x * kCombineThreads + threadIdx.x) * kPerThread;
  const int count = min(kPerThread, n - column);
  if (count <= 0) return;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.y) * n + column, whole = args.out.rows * n;
  float sums[kPerThread] = {};
  for (int part = 0; part < args.parts; ++part) {
    const float4 x = load_slot(args.sums + part * whole + at, count);
    sums[0] += x.x;
    sums[1] += x.y;
    sums[2] += x.z;
    sums[3] += x.w;
  }
  for (int i = 0; i < count; ++i)
    store(args.out, at + i, sums[i] + (args.bias == nullptr ? 0.0f : args.bias[column + i]));
}

}  // namespace

cudaError_t launch_items(const ItemArgs& args, cudaStream_t stream) {
  return launch_dependent(items_kernel, {.blocks = 1, .threads = kItemThreads, .stream = stream}, args);
}

cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream) {
  constexpr int piece = kCombineThreads * kPerThread;
  const dim3 blocks((args.hidden + piece - 1) / piece, args.tokens < 65535 ? args.tokens : 65535);
  const Launch launch{.blocks = blocks, .threads = kCombineThreads, .stream = stream};
  return args.slots_dtype == DType::bf16 ? launch_dependent(combine_kernel<__nv_bfloat16>, launch, args)
                                         : launch_dependent(combine_kernel<float>, launch, args);
}

cudaError_t launch_sum(const SumArgs& args, cudaStream_t stream) {
  constexpr std::int64_t piece = kCombineThreads * kPerThread;
  const dim3 blocks(static_cast<unsigned>((args.out.cols + piece - 1) / piece),
                    static_cast<unsigned>(args.out.rows));
  return launch_dependent(sum_kernel, {.blocks = blocks, .threads = kCombineThreads, .stream = stream}, args);
}

}  // namespace gatefold::cuda
