#include <cooperative_groups.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/rounding.cuh"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;   // of a row at most
constexpr int kPerThread = 8;   // neighbours in k
constexpr int kMostBlocks = 8;  // of a row: a cluster
constexpr int kManyRows = 256;  // that keep all multiprocessors busy with few threads each

struct Row {
  const InputArgs& args;
  std::int64_t row, from;  // of those that are rounded, of x

  __device__ Row(const InputArgs& a, std::int64_t i)
      : args(a), row(i), from(a.from_positions ? max(a.positions[i], 0) : i / a.divisor) {}

  /// Numbers k .. k + 7; those from K on are 0.
  __device__ __forceinline__ void load(std::int64_t k, float (&x)[kPerThread]) const {
    const std::int64_t at = from * args.x.cols + k;
    if (args.x.cols % kPerThread != 0 || reinterpret_cast<std::uintptr_t>(args.x.data) % 16 != 0) {
#pragma unroll 1
      for (int i = 0; i < kPerThread; ++i) {
        const float number = k + i < args.x.cols ? load(at + i) : 0.0f;
#pragma unroll
        for (int j = 0; j < kPerThread; ++j)  // without indices that are not constant
          if (i == j) x[j] = number;
      }
    } else if (k >= args.x.cols) {
      for (float& number : x) number = 0;
    } else if (args.x.dtype == DType::f32) {
      const auto* numbers = reinterpret_cast<const float4*>(static_cast<const float*>(args.x.data) + at);
      const float4 low = numbers[0], high = numbers[1];
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
      const uint4 codes =
          *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(args.x.data) + at);
      const std::uint32_t pairs[4] = {codes.x, codes.y, codes.z, codes.w};
      for (int i = 0; i < kPerThread; ++i) x[i] = decode_16bit(pairs[i / 2] >> (i % 2 * 16) & 0xffff);
    }
  }

 private:
  __device__ float load(std::int64_t at) const {
    if (args.x.dtype == DType::f32) return static_cast<const float*>(args.x.data)[at];
    return decode_16bit(static_cast<const std::uint16_t*>(args.x.data)[at]);
  }
  __device__ __forceinline__ float decode_16bit(std::uint32_t code) const {
    return args.x.dtype == DType::bf16 ? __uint_as_float(code << 16) : decode<formats::f16>(code);
  }
};

__device__ float max_over_block(float x) {
  __shared__ float warps[kThreads / 32];
  x = max_over(x, 32);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) x = fmaxf(x, warps[warp]);
  __syncthreads();
  return x;
}

/// For the row's blocks, a cluster. All have to be there already.
__device__ float max_over_cluster(float x) {
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const unsigned blocks = cluster.num_blocks();
  x = max_over_block(x);
  if (blocks == 1) return x;
  __shared__ float of_blocks[kMostBlocks];
  if (threadIdx.x < blocks) *cluster.map_shared_rank(of_blocks + cluster.block_rank(), threadIdx.x) = x;
  cluster.sync();
  for (unsigned block = 0; block < blocks; ++block) x = fmaxf(x, of_blocks[block]);
  return x;
}

/// The largest magnitude of numbers k, k + step, .. and their neighbours.
__device__ __forceinline__ float amax_of_pieces(const Row& row, std::int64_t k, std::int64_t step) {
  float amax = 0;
  for (; k < row.args.x.cols; k += step) {
    float more[kPerThread];
    row.load(k, more);
    amax = fmaxf(amax, amax_of(more));
  }
  return amax;
}

/// The expert of a row, which all threads of a block find together; -1: the row is not there.
__device__ int expert_of(const InputArgs& args, std::int64_t row) {
  int expert = 0;
  if (args.copies > 1) {
    return 0;  // its slots belong to several
  } else if (args.ids != nullptr) {
    expert = args.ids[row];
  } else if (args.offsets != nullptr) {
    for (int begin = 0; begin < args.experts; begin += static_cast<int>(blockDim.x)) {
      const int e = begin + static_cast<int>(threadIdx.x);
      expert += __syncthreads_count(e < args.experts && args.offsets[e + 1] <= row);
    }
    if (expert < args.experts && row < args.offsets[expert]) return -1;
  } else {
    return 0;
  }
  return static_cast<std::uint32_t>(expert) < static_cast<std::uint32_t>(args.experts) ? expert : -1;
}

__device__ __forceinline__ void wait_and_let_start(const InputArgs& args) {
  if (args.start_next_early) let_next_kernel_start();
  wait_for_previous_kernel();
  if (!args.start_next_early) let_next_kernel_start();
}

__global__ void __launch_bounds__(kThreads) row_amax_kernel(const InputArgs args) {
  wait_and_let_start(args);
  float amax = 0;
  if (expert_of(args, blockIdx.x) >= 0)
    amax = amax_of_pieces(Row(args, blockIdx.x), threadIdx.x * kPerThread, blockDim.x * kPerThread);
  amax = max_over_block(amax);
  if (threadIdx.x == 0) args.amax[blockIdx.x] = amax;
}

/// Where slot `slot`, of `expert` unless it has an id, goes; -1: it is not there.
__device__ __forceinline__ std::int32_t row_of(const InputArgs& args, std::int64_t slot, int expert) {
  if (args.ids != nullptr) expert = args.ids[slot];
  if (static_cast<std::uint32_t>(expert) >= static_cast<std::uint32_t>(args.experts) && args.ids != nullptr)
    return -1;
  return (args.positions == nullptr ? static_cast<std::int32_t>(slot) : args.positions[slot]) +
         (args.expert_rows == nullptr ? 0 : args.expert_rows[expert]);
}

/// Where a row goes, and a warp's next 256 columns of it in the order of tiles.
struct Places {
  std::int32_t rows[kMostTopK];
  alignas(16) std::uint32_t columns[kThreads / 32][32 * kPerThread / 2];
};

/// Columns k .. k + 7 of a row, by each lane of a warp.
__device__ __forceinline__ void store(const InputArgs& args, Places& places, std::int64_t k,
                                      const std::uint32_t (&words)[kPerThread / 2]) {
  uint4 piece = {words[0], words[1], words[2], words[3]};
  if (!args.order.tiled) {
    if (k < args.stride) *reinterpret_cast<uint4*>(args.rows + places.rows[0] * args.stride + k) = piece;
    return;
  }
  const PackedFormat p{.folded = args.order.folded};
  const int lane = threadIdx.x % 32;
  std::uint32_t* own = places.columns[threadIdx.x / 32];
  for (int pair = 0; pair < kPerThread / 2; ++pair)
    own[p.position(lane * kPerThread) / 2 + 4 * pair] = words[pair];
  __syncwarp();
  piece = reinterpret_cast<const uint4*>(own)[lane];
  __syncwarp();
  if (k >= args.stride) return;
  for (int i = 0; i < args.copies; ++i)
    if (const std::int32_t row = places.rows[i]; row >= 0)
      *reinterpret_cast<uint4*>(args.rows + tile_position(args.tile_rows, row, static_cast<int>(k))) = piece;
}

/// The same of codes.
__device__ __forceinline__ void store_bytes(const InputArgs& args, Places& places, std::int64_t k,
                                            const std::uint32_t (&words)[2]) {
  const PackedFormat p{.folded = args.order.folded};
  const int lane = threadIdx.x % 32, column = lane * kPerThread % kRecordColumns;
  std::uint32_t* own = places.columns[threadIdx.x / 32];
  const int block = p.block_of(column), quarter = p.quarter_of(column);
  for (int half = 0; half < 2; ++half)
    own[lane / 16 * 32 +
        (args.order.of_rows ? quarter * 8 + block * 2 + half : block * 8 + half * 4 + quarter)] =
        __byte_perm(words[0], words[1], args.order.bytes >> (16 * half));
  __syncwarp();
  const uint4 piece = reinterpret_cast<const uint4*>(own)[lane % 16];
  __syncwarp();
  k += lane % 16 * 16 - lane * kPerThread;  // 16 columns of each of half of the lanes; copies in turn
  if (k >= args.stride) return;
  for (int i = lane / 16; i < args.copies; i += 2)
    if (const std::int64_t row = places.rows[i]; row >= 0)
      *reinterpret_cast<uint4*>(reinterpret_cast<std::byte*>(args.rows) +
                                (k / kRecordColumns * args.tile_rows + row) * kRecordColumns +
                                (lane % 8 ^ row % 8) * 16) = piece;
}

/// Blocks of a cluster have a row, of which each thread takes so many pieces at a time, all of them read
/// before the row's scale is known. `kBytes`: codes.
template <class Activation, bool kBytes, int kPieces>
__global__ void __launch_bounds__(kThreads) inputs_kernel(const InputArgs args) {
  constexpr Operand a = Activation::operand;
  constexpr bool with_row_scales = has_row_scales(a), with_record_scales = has_record_scales(a);
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks()), block = static_cast<int>(cluster.block_rank());
  const bool with_static = a.may_be_static() && args.static_scales != nullptr;
  if constexpr (with_row_scales)
    if (blocks > 1 && !with_static) cluster.sync();  // see max_over_cluster
  wait_and_let_start(args);

  const Row row(args, blockIdx.x / blocks);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  // Known in advance where rows are only copied: deepseek-v3 with 4096 tokens loses 3 % of a layer otherwise.
  const int piece = (a.quantized() ? static_cast<int>(blockDim.x) : kThreads) * kPerThread;
  const std::int64_t step = static_cast<std::int64_t>(blocks) * piece;
  std::int64_t k = block * piece + static_cast<std::int64_t>(thread) * kPerThread;
  float x[kPieces][kPerThread];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) row.load(k + p * step, x[p]);

  const int expert = expert_of(args, row.row);
  if (expert < 0) return;
  __shared__ Places places;
  if (thread < args.copies) places.rows[thread] = row_of(args, row.row * args.copies + thread, expert);
  __syncthreads();

  RowScales scales;
  if constexpr (with_row_scales) {
    if (with_static) {
      scales = RowScales::of_static(args.static_scales[expert]);
    } else if constexpr (a.group.n == 0) {
      float amax = 0;
      std::int64_t first = 0, end = args.x.rows;
      if (args.offsets != nullptr) {
        first = max(args.offsets[expert], 0);
        end = min(end, static_cast<std::int64_t>(args.offsets[expert + 1]));
      }
      for (std::int64_t i = first + thread; i < end; i += blockDim.x) amax = fmaxf(amax, args.amax[i]);
      scales = RowScales::of_amax<Activation>(max_over_block(amax));
    } else {
      float amax = 0;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) amax = fmaxf(amax, amax_of(x[p]));
      amax = fmaxf(amax, amax_of_pieces(row, k + kPieces * step, step));
      scales = RowScales::of_amax<Activation>(max_over_cluster(amax));
    }
    if (block == 0 && thread < args.copies && places.rows[thread] >= 0)
      args.row_scales[places.rows[thread]] = scales.whole;
  }

  const auto round = [&](const float(&numbers)[kPerThread]) {
    constexpr int group = a.group.k == 0 ? kRecordColumns : a.group.k;
    const auto factors = GroupFactors::of<Activation>(
        scales, a.group.k == 0 ? 0.0f : max_over(amax_of(numbers), group / kPerThread));
    std::uint32_t words[kBytes ? 2 : kPerThread / 2];
    if constexpr (kBytes) {
      encode_codes<Activation>(numbers, factors, words);
      store_bytes(args, places, k, words);
    } else {
      encode_inputs<Activation>(numbers, factors, words);
      store(args, places, k, words);
    }
    if (with_record_scales && k < args.stride && k % kRecordColumns == 0)
      for (int i = 0; i < args.copies; ++i)
        if (const std::int64_t to = places.rows[i]; to >= 0)
          args.record_scales[args.tile_rows == 0 ? (to * args.stride + k) / kRecordColumns
                                                 : k / kRecordColumns * args.tile_rows + to] = factors.record;
  };
  const auto there = [&] { return k - lane * kPerThread < args.stride; };  // the same for a warp
#pragma unroll
  for (int p = 0; p < kPieces; ++p, k += step) {
    if (!there()) return;
    round(x[p]);
  }
  for (; there(); k += step) {
    row.load(k, x[0]);
    round(x[0]);
  }
}

template <Format F>
struct Plain {
  static constexpr Operand operand = operands::plain(F);
};

template <class Activation>
cudaError_t launch_rows(const InputArgs& args, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(args.x.rows);
  const auto numbers = static_cast<unsigned>(args.stride);
  constexpr bool quantized = Activation::operand.quantized();
  // Where there are many rows, few threads have a row, and short rows are rounded by as many as they need.
  constexpr int many_pieces = quantized ? 4 : 1;
  const bool many = quantized && rows >= kManyRows;
  const unsigned of_thread = kPerThread * (many ? many_pieces : 1);
  const unsigned needed = quantized ? ((numbers + of_thread - 1) / of_thread + 31) / 32 * 32 : kThreads;
  const unsigned threads = std::min<unsigned>(kThreads, needed);
  if (quantized && Activation::operand.group.n == 0 && args.static_scales == nullptr)
    if (const auto error =
            launch_dependent(row_amax_kernel, {.blocks = rows, .threads = threads, .stream = stream}, args);
        error != cudaSuccess)
      return error;
  const unsigned pieces = (numbers + threads * of_thread - 1) / (threads * of_thread);
  const unsigned cluster = std::min<unsigned>(pieces, kMostBlocks);
  const auto launch = [&](auto* kernel) {
    return launch_dependent(
        kernel, {.blocks = rows * cluster, .threads = threads, .stream = stream, .cluster = cluster}, args);
  };
  if constexpr (are_bytes(byte_kind(Activation::operand)))
    if (args.order.bytes != 0)
      return launch(many ? inputs_kernel<Activation, true, many_pieces> : inputs_kernel<Activation, true, 1>);
  return launch(many ? inputs_kernel<Activation, false, many_pieces> : inputs_kernel<Activation, false, 1>);
}

}  // namespace

cudaError_t launch_inputs(const InputArgs& args, cudaStream_t stream) {
  if (args.activation == Plain<formats::bf16>::operand)
    return launch_rows<Plain<formats::bf16>>(args, stream);
  if (args.activation == Plain<formats::f16>::operand) return launch_rows<Plain<formats::f16>>(args, stream);
  cudaError_t error = cudaErrorInvalidValue;
  for_each_scheme([&]<class S>() {
    constexpr Operand a = S::scheme.activation;
    if constexpr (a.quantized() && can_multiply(a) && first_with_activation(a) == S::id)
      if (args.activation == a) error = launch_rows<ActivationOf<S::id>>(args, stream);
  });
  return error;
}

}  // namespace gatefold::cuda
