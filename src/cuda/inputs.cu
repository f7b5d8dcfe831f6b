#include <cooperative_groups.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/round_row.cuh"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;   // of a block at most
constexpr int kMostBlocks = 8;  // of a row: a cluster
constexpr int kManyRows = 256;  // that keep all multiprocessors busy with few threads each

/// For the row's blocks, a cluster. All have to be there already.
__device__ __forceinline__ float max_over_cluster(float x) {
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const unsigned blocks = cluster.num_blocks();
  x = row_max(x);
  if (blocks == 1) return x;
  __shared__ float of_blocks[kMostBlocks];
  if (threadIdx.x < blocks) *cluster.map_shared_rank(of_blocks + cluster.block_rank(), threadIdx.x) = x;
  cluster.sync();
#pragma unroll 1
  for (unsigned block = 0; block < blocks; ++block) x = fmaxf(x, of_blocks[block]);
  return x;
}

/// The expert of row i, which all lanes of a warp find together; -1: the row is not there.
__device__ __forceinline__ int expert_of(const InputArgs& args, int i) {
  if (i >= args.x.rows) return -1;
  if (args.copies > 1) return 0;  // its slots belong to several
  int expert = 0;
  if (args.ids != nullptr) {
    expert = args.ids[i];
  } else if (args.offsets != nullptr) {
    int before = 0;
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x) % 32; e < args.experts; e += 32)
      before += args.offsets[e + 1] <= i;
    expert = __reduce_add_sync(~0u, before);
    if (expert < args.experts && i < args.offsets[expert]) return -1;
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

template <class Input>
__global__ void __launch_bounds__(kThreads) row_amax_kernel(const InputArgs args) {
  wait_and_let_start(args);
  const int i = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  float amax = 0;
  if (expert_of(args, i) >= 0)
    amax = Row<Input>(args, i)
               .range(static_cast<int>(threadIdx.x) * kPerLane, static_cast<int>(blockDim.x) * kPerLane)
               .amax;
  amax = row_max(amax);
  if (threadIdx.x == 0 && i < args.x.rows) args.amax[i] = amax;
}

/// By a thread of each block, which should not take long.
__device__ __forceinline__ void prefetch(const FirstWeights& first, int experts) {
  constexpr int most = 16;
#pragma unroll 1
  for (int n = 0, i = static_cast<int>(blockIdx.x); n < most && i < first.pieces * experts;
       ++n, i += static_cast<int>(gridDim.x))
    prefetch_bulk(
        first.weights + i / first.pieces * first.expert_stride + i % first.pieces * FirstWeights::kPieceBytes,
        FirstWeights::kPieceBytes);
}

/// Where slot `slot`, of `expert` unless it has an id, goes; -1: it is not there.
__device__ __forceinline__ std::int32_t row_of(const InputArgs& args, std::int64_t slot, int expert) {
  if (args.ids != nullptr) expert = args.ids[slot];
  if (static_cast<std::uint32_t>(expert) >= static_cast<std::uint32_t>(args.experts) && args.ids != nullptr)
    return -1;
  return (args.positions == nullptr ? static_cast<std::int32_t>(slot) : args.positions[slot]) +
         (args.expert_rows == nullptr ? 0 : args.expert_rows[expert]);
}

/// blockDim.x threads of each block of a cluster have a row, of which each takes so many pieces at a time,
/// all of them read before the row's scale is known. `kBytes`: codes.
template <class Activation, class Input, bool kBytes, int kPieces>
__global__ void __launch_bounds__(kThreads) inputs_kernel(const InputArgs args) {
  constexpr Operand a = Activation::operand;
  constexpr bool with_row_scales = has_row_scales(a), with_record_scales = has_record_scales(a),
                 with_groups = a.quantized() && a.group.k != 0, whole = a.quantized() && a.group.k == 0;
  using Range = typename Row<Input>::Range;
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  const unsigned blocks = cluster.num_blocks(), block = cluster.block_rank();
  const bool with_static = a.may_be_static() && args.static_scales != nullptr;
  if constexpr (with_row_scales)
    if (blocks > 1 && !with_static) cluster.sync();  // see max_over_cluster
  if (!args.x_is_old)
    wait_and_let_start(args);
  else if (threadIdx.x == 0 && threadIdx.y == 0)
    prefetch(args.first_weights, args.experts);

  const unsigned team = blocks == 1 ? blockIdx.x : blockIdx.x / blocks;
  const int i = static_cast<int>(team * blockDim.y + threadIdx.y), rows = static_cast<int>(args.x.rows);
  const Row<Input> row(args, min(i, rows - 1));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int piece = static_cast<int>(blockDim.x) * kPerLane, step = static_cast<int>(blocks) * piece;
  int k = static_cast<int>(block) * piece + thread * kPerLane;
  typename Row<Input>::Piece x[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) x[p] = row.load(k + p * step);
  Range range{0, true};  // of x
  if constexpr (whole || with_row_scales)
#pragma unroll
    for (int p = 0; p < kPieces; ++p) range.include(x[p].range());
  RowScales scales;
  if constexpr (with_row_scales && a.group.n != 0)
    if (!with_static) {
      const float amax = fmaxf(range.amax, row.range(k + kPieces * step, step).amax);
      scales = RowScales::of_amax<Activation>(max_over_cluster(amax));
    }
  if (args.x_is_old) wait_and_let_start(args);

  const int expert = expert_of(args, i);
  __shared__ alignas(16) std::uint32_t columns[kThreads / 32][32 * kPerLane / 2];
  const Store store{args, lane,
                    expert >= 0 && lane < args.copies ? row_of(args, i * args.copies + lane, expert) : -1,
                    columns[(threadIdx.y * blockDim.x + threadIdx.x) / 32]};

  if constexpr (with_row_scales) {
    if (with_static) {
      scales = RowScales::of_static(args.static_scales[max(expert, 0)]);
    } else if constexpr (a.group.n == 0) {
      float amax = 0;
      int first = 0, end = rows;
      if (args.offsets != nullptr && !args.one_tensor && expert >= 0) {
        first = max(args.offsets[expert], 0);
        end = min(end, args.offsets[expert + 1]);
      }
#pragma unroll 1
      for (int other = first + thread; other < end; other += static_cast<int>(blockDim.x))
        amax = fmaxf(amax, args.amax[other]);
      scales = RowScales::of_amax<Activation>(row_max(amax));
    }
  }
  if (expert < 0) return;
  if (with_row_scales && block == 0 && thread < args.copies && store.place >= 0)
    args.row_scales[store.place] = scales.whole;

  round_row<Activation, kBytes>(row, x, range, scales, k, step, store);
}

template <Format F>
struct Plain {
  static constexpr Operand operand = operands::plain(F);
};

template <class Activation, class Input>
cudaError_t launch_rows(InputArgs args, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(args.x.rows);
  const auto numbers = static_cast<unsigned>(args.stride);
  // Where there are many rows, few threads have a row, and a block has several.
  constexpr int many_pieces = 4;
  const bool many = rows >= kManyRows;
  const unsigned of_thread = kPerLane * (many ? many_pieces : 1);
  const unsigned needed = ((numbers + of_thread - 1) / of_thread + 31) / 32 * 32;
  const unsigned threads = std::min<unsigned>(kThreads, needed);
  const unsigned of_block = many ? kThreads / threads : 1;
  const unsigned pieces = (numbers + threads * of_thread - 1) / (threads * of_thread);
  const unsigned cluster = std::min<unsigned>(pieces, kMostBlocks);
  const auto launch = [&](auto* kernel, unsigned blocks) {
    const dim3 block(threads, of_block);
    return launch_dependent(kernel,
                            {.blocks = (rows + of_block - 1) / of_block * blocks,
                             .threads = block,
                             .stream = stream,
                             .cluster = blocks},
                            args);
  };
  if constexpr (Activation::operand.quantized() && Activation::operand.group.n == 0)
    if (args.static_scales == nullptr) {
      if (const auto error = launch(row_amax_kernel<Input>, 1); error != cudaSuccess) return error;
      args.x_is_old = false;  // the kernel before is now that one
    }
  constexpr bool bytes = are_bytes(byte_kind(Activation::operand));
  if constexpr (bytes)  // many rows hardly ever become 16-bit numbers
    if (args.order.bytes == 0) return launch(inputs_kernel<Activation, Input, false, 1>, cluster);
  return launch(many ? inputs_kernel<Activation, Input, bytes, many_pieces>
                     : inputs_kernel<Activation, Input, bytes, 1>,
                cluster);
}

template <class Activation>
cudaError_t launch_rows(const InputArgs& args, cudaStream_t stream) {
  if (args.x.dtype == DType::bf16) return launch_rows<Activation, FormatTag<formats::bf16>>(args, stream);
  if (args.x.dtype == DType::f16) return launch_rows<Activation, FormatTag<formats::f16>>(args, stream);
  return launch_rows<Activation, FormatTag<formats::f32>>(args, stream);
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
