#include <cooperative_groups.h>

#include <algorithm>

#include "cuda/elements.cuh"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/rounding.cuh"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;   // of a block at most
constexpr int kPerThread = 8;   // neighbours in k
constexpr int kMostBlocks = 8;  // of a row: a cluster
constexpr int kManyRows = 256;  // that keep all multiprocessors busy with few threads each

/// What threads read of a row of x.
template <class Input>
struct Row {
  using Piece = Elements<Input::format, kPerThread>;
  using Range = typename Piece::Range;
  const std::byte* x;
  int cols;
  bool wide;

  __device__ __forceinline__ Row(const InputArgs& args, int i) : cols(static_cast<int>(args.x.cols)) {
    const int from = args.divisor == 1 ? i : i / args.divisor;
    x = static_cast<const std::byte*>(args.x.data) + from * args.x.cols * (Input::format.bits / 8);
    wide = cols % kPerThread == 0 && reinterpret_cast<std::uintptr_t>(args.x.data) % 16 == 0;
  }
  /// Numbers k .. k + 7; those from K on are 0.
  __device__ __forceinline__ Piece load(int k) const {
    Piece piece;
    piece.template load<false>(x, k, cols, wide);
    return piece;
  }
  /// Of numbers k, k + step, .. and their neighbours.
  __device__ __forceinline__ Range range(int k, int step) const {
    Range range{0, true};
#pragma unroll 1
    for (; k < cols; k += step) range.include(load(k).range());
    return range;
  }
};

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
               .range(static_cast<int>(threadIdx.x) * kPerThread, static_cast<int>(blockDim.x) * kPerThread)
               .amax;
  amax = row_max(amax);
  if (threadIdx.x == 0 && i < args.x.rows) args.amax[i] = amax;
}

/// Where slot `slot`, of `expert` unless it has an id, goes; -1: it is not there.
__device__ __forceinline__ std::int32_t row_of(const InputArgs& args, std::int64_t slot, int expert) {
  if (args.ids != nullptr) expert = args.ids[slot];
  if (static_cast<std::uint32_t>(expert) >= static_cast<std::uint32_t>(args.experts) && args.ids != nullptr)
    return -1;
  return (args.positions == nullptr ? static_cast<std::int32_t>(slot) : args.positions[slot]) +
         (args.expert_rows == nullptr ? 0 : args.expert_rows[expert]);
}

/// How a warp stores its next 256 columns of a row.
static_assert(kMostTopK <= 32, "a lane has each copy's place");
struct Store {
  const InputArgs& args;
  const int lane;
  const std::int32_t place;      // of copy `lane`; -1: there is none
  std::uint32_t* const columns;  // shared, room for them

  __device__ __forceinline__ std::int32_t place_of(int copy) const { return __shfl_sync(~0u, place, copy); }

  /// Columns k .. k + 7, by each lane.
  __device__ __forceinline__ void numbers(int k, const std::uint32_t (&words)[kPerThread / 2]) const {
    uint4 piece = {words[0], words[1], words[2], words[3]};
    if (!args.order.tiled) {
      const std::int64_t row = place_of(0);
      if (k < args.stride) *reinterpret_cast<uint4*>(args.rows + row * args.stride + k) = piece;
      return;
    }
    const PackedFormat p{.folded = args.order.folded};
    for (int pair = 0; pair < kPerThread / 2; ++pair)
      columns[p.position(lane * kPerThread) / 2 + 4 * pair] = words[pair];
    __syncwarp();
    piece = reinterpret_cast<const uint4*>(columns)[lane];
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < args.copies; ++i)
      if (const std::int32_t row = place_of(i); row >= 0 && k < args.stride)
        *reinterpret_cast<uint4*>(args.rows + tile_position(args.tile_rows, row, k)) = piece;
  }

  /// The same of codes.
  __device__ __forceinline__ void bytes(int k, const std::uint32_t (&words)[2]) const {
    const PackedFormat p{.folded = args.order.folded};
    const int column = lane * kPerThread % kRecordColumns;
    const int block = p.block_of(column), quarter = p.quarter_of(column);
    for (int half = 0; half < 2; ++half)
      columns[lane / 16 * 32 +
              (args.order.of_rows ? quarter * 8 + block * 2 + half : block * 8 + half * 4 + quarter)] =
          __byte_perm(words[0], words[1], args.order.bytes >> (16 * half));
    __syncwarp();
    const uint4 piece = reinterpret_cast<const uint4*>(columns)[lane % 16];
    __syncwarp();
    k += lane % 16 * 16 - lane * kPerThread;  // 16 columns of each of half of the lanes; copies in turn
    const std::int64_t rows_before = static_cast<std::int64_t>(k / kRecordColumns) * args.tile_rows;
    uint4* record = reinterpret_cast<uint4*>(args.rows) + rows_before * 8;
#pragma unroll 1
    for (int first = 0; first < args.copies; first += 2)
      if (const std::int32_t row = place_of(first + lane / 16); row >= 0 && k < args.stride)
        record[(row * 8u + row % 8u) ^ lane % 8u] = piece;
  }

  /// That of the record that begins at k.
  __device__ __forceinline__ void record_scale(int k, float scale) const {
#pragma unroll 1
    for (int i = 0; i < args.copies; ++i)
      if (const std::int64_t to = place_of(i); to >= 0 && k < args.stride && k % kRecordColumns == 0)
        args.record_scales[args.tile_rows == 0 ? (to * args.stride + k) / kRecordColumns
                                               : k / kRecordColumns * args.tile_rows + to] = scale;
  }
};

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
  if (!args.x_is_old) wait_and_let_start(args);

  const unsigned team = blocks == 1 ? blockIdx.x : blockIdx.x / blocks;
  const int i = static_cast<int>(team * blockDim.y + threadIdx.y), rows = static_cast<int>(args.x.rows);
  const Row<Input> row(args, min(i, rows - 1));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int piece = static_cast<int>(blockDim.x) * kPerThread, step = static_cast<int>(blocks) * piece;
  int k = static_cast<int>(block) * piece + thread * kPerThread;
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
  __shared__ alignas(16) std::uint32_t columns[kThreads / 32][32 * kPerThread / 2];
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

  const auto round = [&](const typename Row<Input>::Piece& numbers, Range of_numbers, bool fits) {
    constexpr int group = with_groups ? a.group.k : kRecordColumns;
    if constexpr (with_groups) of_numbers = numbers.range();
    const auto factors = GroupFactors::of<Activation>(
        scales, with_groups ? group_max<group / kPerThread>(of_numbers.amax) : 0.0f);
    std::uint32_t words[kBytes ? 2 : kPerThread / 2];
    if constexpr (kBytes) {
      encode_elements<Activation::operand.value>(numbers, factors.divisor, of_numbers, fits, words);
      store.bytes(k, words);
    } else {
      encode_inputs<Activation>(numbers, factors, of_numbers, fits, words);
      store.numbers(k, words);
    }
    if constexpr (with_record_scales) store.record_scale(k, factors.record);
  };
  const auto there = [&] { return k - lane * kPerThread < args.stride; };  // the same for a warp
  // Where some do not fit, pieces are read again: no code is needed twice.
  if (!whole || __all_sync(~0u, range.finite && FastDivider(scales.whole).fits(range.amax)))
#pragma unroll
    for (int p = 0; p < kPieces; ++p, k += step) {
      if (!there()) return;
      round(x[p], range, whole);
    }
#pragma unroll 1
  for (; there(); k += step) {
    const auto numbers = row.load(k);
    round(numbers, numbers.range(), false);
  }
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
  const unsigned of_thread = kPerThread * (many ? many_pieces : 1);
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
