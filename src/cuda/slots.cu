#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/items.cuh"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"

namespace gatefold::cuda {
namespace {

constexpr int kItemThreads = 512, kItemBlocks = 8;

__global__ void __launch_bounds__(kItemThreads) items_kernel(const ItemArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto offset = [&](int expert) { return args.expert_offsets[expert]; };
  if (args.experts <= kMostSortedExperts)
    cut_items(args, offset, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  else if (blockIdx.x == 0)
    cut_items_in_order(args, offset);
}

constexpr int kCombineThreads = 128;

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

__device__ float shared_weight(const float* gate, const MatrixView& x, int token) {
  if (gate == nullptr) return 1.0f;
  const auto hidden = static_cast<int>(x.cols);
  float dot = 0;
  for (int h = threadIdx.x; h < hidden; h += kCombineThreads)
    dot = fmaf(load(x, static_cast<std::int64_t>(token) * hidden + h), gate[h], dot);
  return 1.0f / (1.0f + expf(-block_sum(dot)));
}

/// Block b: some tokens, or, if there is a gate, one.
__global__ void __launch_bounds__(kCombineThreads) join_kernel(const JoinArgs args, int tokens_of_block) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int slots = args.top_k + 1, thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x) * tokens_of_block;
  const float share = shared_weight(args.shared_gate, args.x, first);
  const int token = first + thread / slots, i = thread % slots;
  if (thread >= tokens_of_block * slots || token >= args.tokens) return;
  std::int32_t id = args.experts;
  float weight = share;
  if (i < args.top_k) {
    const std::int64_t slot = static_cast<std::int64_t>(token) * args.top_k + i;
    id = args.ids[slot];
    if (id >= args.experts) id = -1;
    weight = args.weights[slot];
  }
  const std::int64_t to = static_cast<std::int64_t>(token) * slots + i;
  args.all_ids[to] = id;
  args.all_weights[to] = weight;
}

constexpr int kOrderThreads = 256;
constexpr std::int64_t kMostOrdered = 48 << 10;  // bytes of a row that becomes shared memory

/// Block (t, i): slots i, i + gridDim.y, .. of token t. `kEach`: numbers that a thread writes at once.
template <class Number, int kEach>
__global__ void __launch_bounds__(kOrderThreads) order_kernel(const OrderArgs args) {
  struct alignas(sizeof(Number) * kEach) Numbers {
    Number n[kEach];
  };
  struct alignas(4 * kEach) Columns {
    std::int32_t n[kEach];
  };
  extern __shared__ std::uint32_t shared_row[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const std::int64_t hidden = args.x.cols, token = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x), count = static_cast<int>(hidden / kEach);
  const auto* x = static_cast<const Number*>(args.x.data) + token * hidden;
  if (hidden * static_cast<std::int64_t>(sizeof(Number)) <= kMostOrdered) {
    auto* const row = reinterpret_cast<Number*>(shared_row);
    for (int j = thread; j < static_cast<int>(hidden); j += kOrderThreads) row[j] = x[j];
    __syncthreads();
    x = row;
  }
  for (int i = static_cast<int>(blockIdx.y); i < args.top_k; i += static_cast<int>(gridDim.y)) {
    const std::int64_t slot = token * args.top_k + i;
    const std::int32_t expert = args.ids[slot];
    if (static_cast<unsigned>(expert) >= static_cast<unsigned>(args.experts)) continue;
    const auto* order = reinterpret_cast<const Columns*>(args.orders + expert * hidden);
    auto* const to = reinterpret_cast<Numbers*>(static_cast<Number*>(args.rows) + slot * hidden);
#pragma unroll 2
    for (int j = thread; j < count; j += kOrderThreads) {
      const Columns columns = order[j];
      Numbers numbers;
#pragma unroll
      for (int n = 0; n < kEach; ++n) numbers.n[n] = x[columns.n[n]];
      to[j] = numbers;
    }
  }
}

/// 16 bytes of a slot, which is read once. What lies beyond `there` numbers is 0.
template <class Slot>
struct Piece {
  static constexpr int count = 16 / sizeof(Slot);
  uint4 words{};

  /// `wide`: all are there, and aligned.
  __device__ __forceinline__ void load(const Slot* x, int there, bool wide) {
    if (wide) {
      words = __ldcs(reinterpret_cast<const uint4*>(x));
      return;
    }
    alignas(16) Slot numbers[count] = {};
    for (int i = 0; i < count; ++i)
      if (i < there) numbers[i] = x[i];
    words = *reinterpret_cast<const uint4*>(numbers);
  }
  __device__ __forceinline__ float operator[](int i) const {
    const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
    if constexpr (std::is_same_v<Slot, float>) return __uint_as_float(all[i]);
    const std::uint32_t half = all[i / 2] >> (i % 2 * 16);
    if constexpr (std::is_same_v<Slot, __half>)
      return __half2float(__ushort_as_half(static_cast<std::uint16_t>(half)));
    return __uint_as_float(half << 16);
  }
};

/// `there` of these numbers, at number `at` of out.
template <int kCount>
__device__ __forceinline__ void store_sums(const MutableMatrixView& out, std::int64_t at,
                                           const float (&sums)[kCount], int there) {
  if (out.dtype != DType::f32 && there >= kCount &&
      (reinterpret_cast<std::uintptr_t>(out.data) + 2 * at) % (2 * kCount) == 0) {
    alignas(16) std::uint32_t pairs[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i)
      pairs[i] = narrow_pair(sums[2 * i], sums[2 * i + 1], out.dtype == DType::bf16);
    auto* to = static_cast<std::uint16_t*>(out.data) + at;
    if constexpr (kCount == 8)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(pairs);
    else
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < there; ++i) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (i == j) sum = sums[j];
    store(out, at + i, sum);
  }
}

/// Block (i, t): a piece of token t. A lane knows where the slot of its number lies; of those that are there,
/// loads of some, or of parts of them, are begun before the first is used.
template <class Slot, int kParts>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const CombineArgs args) {
  constexpr int each = Piece<Slot>::count, ahead = 32 / each / kParts;
  const bool wide = args.hidden % each == 0 && reinterpret_cast<std::uintptr_t>(args.slots) % 16 == 0;
  const std::int64_t part = static_cast<std::int64_t>(args.tokens) * args.top_k * args.hidden;
  bool waited = false;
  const auto wait = [&] {
    if (!waited) wait_for_previous_kernel(), let_next_kernel_start();
    waited = true;
  };
#pragma unroll 1
  for (int token = blockIdx.y; token < args.tokens; token += gridDim.y) {
    const float share = args.shared == nullptr ? 0.0f : shared_weight(args.shared_gate, args.x, token);
    const int h = (blockIdx.x * kCombineThreads + threadIdx.x) * each;
    const int count = min(each, args.hidden - h), lane = static_cast<int>(threadIdx.x) % 32;
    std::int32_t row = token * args.top_k + min(lane, args.top_k - 1);
    const float weight = args.weights[row];
    unsigned there = __ballot_sync(
        ~0u, lane < args.top_k && static_cast<unsigned>(args.ids[row]) < static_cast<unsigned>(args.experts));
    if (args.positions != nullptr) row = args.positions[row];
    float sums[each] = {};
    while (there != 0) {
      const Slot* rows[ahead];
      float weights[ahead];
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        const int slot = there == 0 ? 0 : __ffs(there) - 1;
        weights[k] = there == 0 ? 0.0f : __shfl_sync(~0u, weight, slot);
        rows[k] = there == 0 ? nullptr
                             : static_cast<const Slot*>(args.slots) +
                                   static_cast<std::int64_t>(__shfl_sync(~0u, row, slot)) * args.hidden + h;
        there &= there - 1;
      }
      wait();  // The slots are new. Where they lie is older than the kernel before, which waited, too.
      Piece<Slot> x[ahead][kParts];
#pragma unroll
      for (int k = 0; k < ahead; ++k)
#pragma unroll
        for (int p = 0; p < kParts; ++p)
          if (rows[k] != nullptr && count > 0) x[k][p].load(rows[k] + p * part, count, wide);
#pragma unroll
      for (int k = 0; k < ahead; ++k)
#pragma unroll
        for (int p = 0; p < kParts; ++p)
#pragma unroll
          for (int i = 0; i < each; ++i) sums[i] = fmaf(weights[k], x[k][p][i], sums[i]);
    }
    wait();
    if (count <= 0) continue;
    const std::int64_t at = static_cast<std::int64_t>(token) * args.hidden + h;
    if (args.shared != nullptr)
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (i < count) sums[i] = fmaf(share, args.shared[at + i], sums[i]);
    store_sums(args.out, at, sums, count);
  }
}

/// Block (i, r): a piece of row r.
__global__ void __launch_bounds__(kCombineThreads) sum_kernel(const SumArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto n = static_cast<int>(args.out.cols);
  constexpr int each = Piece<float>::count;
  const int column = (blockIdx.x * kCombineThreads + threadIdx.x) * each;
  const int count = min(each, n - column);
  if (count <= 0) return;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.y) * n + column, whole = args.out.rows * n;
  const bool wide = n % each == 0 && reinterpret_cast<std::uintptr_t>(args.sums) % 16 == 0;
  float sums[each] = {};
  for (int part = 0; part < args.parts; ++part) {
    Piece<float> x;
    x.load(args.sums + part * whole + at, count, wide);
#pragma unroll
    for (int i = 0; i < each; ++i) sums[i] += x[i];
  }
  if (args.bias != nullptr)
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (i < count) sums[i] += args.bias[column + i];
  store_sums(args.out, at, sums, count);
}

}  // namespace

cudaError_t launch_items(const ItemArgs& args, cudaStream_t stream) {
  return launch_dependent(items_kernel, {.blocks = kItemBlocks, .threads = kItemThreads, .stream = stream},
                          args);
}

cudaError_t launch_join(const JoinArgs& args, cudaStream_t stream) {
  const int each = args.shared_gate == nullptr ? kCombineThreads / (args.top_k + 1) : 1;
  return launch_dependent(join_kernel,
                          {.blocks = static_cast<unsigned>((args.tokens + each - 1) / each),
                           .threads = kCombineThreads,
                           .stream = stream},
                          args, each);
}

cudaError_t launch_order(const OrderArgs& args, cudaStream_t stream) {
  const std::int64_t bytes = args.x.cols * bits(args.x.dtype) / 8;
  // Of few tokens, each slot has a block.
  const unsigned of_token = args.x.rows < 256 ? static_cast<unsigned>(args.top_k) : 1;
  const auto launch = [&](auto* kernel) {
    return launch_dependent(kernel,
                            {.blocks = dim3(static_cast<unsigned>(args.x.rows), of_token),
                             .threads = kOrderThreads,
                             .stream = stream,
                             .shared_bytes = static_cast<std::size_t>(bytes <= kMostOrdered ? bytes : 0)},
                            args);
  };
  const bool wide = args.x.cols % 4 == 0;
  if (args.x.dtype == DType::f32)
    return launch(wide ? order_kernel<std::uint32_t, 4> : order_kernel<std::uint32_t, 1>);
  return launch(wide ? order_kernel<std::uint16_t, 4> : order_kernel<std::uint16_t, 1>);
}

template <class Slot>
unsigned pieces_of(std::int64_t numbers) {
  constexpr int piece = kCombineThreads * Piece<Slot>::count;
  return static_cast<unsigned>((numbers + piece - 1) / piece);
}

cudaError_t launch_combine(const CombineArgs& args, cudaStream_t stream) {
  const auto launch = [&]<class Slot>(Slot) {
    const dim3 blocks(pieces_of<Slot>(args.hidden), args.tokens < 65535 ? args.tokens : 65535);
    return launch_dependent(args.parts == 2 ? combine_kernel<Slot, 2> : combine_kernel<Slot, 1>,
                            {.blocks = blocks, .threads = kCombineThreads, .stream = stream}, args);
  };
  return args.slots_dtype == DType::bf16  ? launch(__nv_bfloat16())
         : args.slots_dtype == DType::f16 ? launch(__half())
                                          : launch(float());
}

cudaError_t launch_sum(const SumArgs& args, cudaStream_t stream) {
  const dim3 blocks(pieces_of<float>(args.out.cols), static_cast<unsigned>(args.out.rows));
  return launch_dependent(sum_kernel, {.blocks = blocks, .threads = kCombineThreads, .stream = stream}, args);
}

}  // namespace gatefold::cuda
