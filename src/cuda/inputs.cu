#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/round_row.cuh"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;        // of a block at most
constexpr int kMostBlocks = 8;       // of a row
constexpr int kManyRows = 256;       // that keep all multiprocessors busy with few threads each
constexpr int kManyOfTensor = 2048;  // rows: the largest number of a tensor is found before they are rounded

/// Whether a row's scale is that of its largest number, which its blocks, a cluster, find together.
constexpr bool scales_by_cluster(const Operand& a) {
  return has_row_scales(a) && a.group.n != 0;
}
/// For those blocks. All have to be there already.
__device__ __forceinline__ float max_over_cluster(float x) {
  const unsigned blocks = __clusterSizeInBlocks();
  x = row_max(x);
  if (blocks == 1) return x;
  __shared__ float of_blocks[kMostBlocks];
  if (threadIdx.x < blocks)
    *in_block_of_cluster(of_blocks + rank_in_cluster(), static_cast<int>(threadIdx.x)) = x;
  sync_cluster();
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
  // Where routing does not say which rows are there, they are read while it works.
  const bool early = args.x_is_old && (args.copies > 1 || args.ids == nullptr);
  if (early)
    let_next_kernel_start();
  else
    wait_and_let_start(args);
  const int i = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  float amax = 0;
  if (expert_of(args, i) >= 0)
    amax = Row<Input>(args, i)
               .range(static_cast<int>(threadIdx.x) * kPerLane, static_cast<int>(blockDim.x) * kPerLane)
               .amax;
  amax = row_max(amax);
  if (threadIdx.x == 0 && i < args.x.rows) args.amax[i] = amax;
  if (early) wait_for_previous_kernel();
}

/// The rows [first, end) that have one scale with those of an expert.
struct TensorRows {
  int first = 0, end;

  __device__ __forceinline__ TensorRows(const InputArgs& args, int expert)
      : end(static_cast<int>(args.x.rows)) {
    if (args.offsets == nullptr || args.one_tensor) return;
    first = max(args.offsets[expert], 0);
    end = min(end, args.offsets[expert + 1]);
  }
  /// The largest of their numbers so far, for all threads of a row: by so many of them.
  __device__ __forceinline__ float max_of(const float* amax) const {
    constexpr int at_once = 8;  // loads that do not wait for each other
    const int step = static_cast<int>(blockDim.x);
    float largest = 0;
#pragma unroll 1
    for (int i = first + static_cast<int>(threadIdx.x); i < end; i += at_once * step)
#pragma unroll
      for (int j = 0; j < at_once; ++j)
        if (i + j * step < end) largest = fmaxf(largest, amax[i + j * step]);
    return row_max(largest);
  }
};

/// Of each tensor, which has a block: instead of its first row's.
__global__ void __launch_bounds__(1024) tensor_amax_kernel(const InputArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const TensorRows rows(args, static_cast<int>(blockIdx.x));
  const float amax = rows.max_of(args.amax);
  if (threadIdx.x == 0 && rows.first < rows.end) args.amax[rows.first] = amax;
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

/// blockDim.x threads of each of gridDim.y blocks have a row, of which each takes so many pieces at a time,
/// all of them read before the row's scale is known. `kBytes`: codes; `kOfCopies`: copies have static scales
/// of their own (apart from other kernels, as it takes twice the registers).
template <class Activation, class Input, bool kBytes, int kPieces, bool kOfCopies>
__global__ void __launch_bounds__(kThreads) inputs_kernel(const InputArgs args) {
  constexpr Operand a = Activation::operand;
  constexpr bool with_row_scales = has_row_scales(a), with_record_scales = has_record_scales(a),
                 with_groups = a.quantized() && a.group.k != 0, whole = a.quantized() && a.group.k == 0;
  using Range = typename Row<Input>::Range;
  const unsigned blocks = gridDim.y, block = blockIdx.y;  // of the row
  const bool with_static = a.may_be_static() && args.static_scales != nullptr;
  if constexpr (scales_by_cluster(a) && !kOfCopies)
    if (blocks > 1 && !with_static) sync_cluster();  // see max_over_cluster
  if (!args.x_is_old)
    wait_and_let_start(args);
  else if (threadIdx.x == 0 && threadIdx.y == 0)
    prefetch(args.first_weights, args.experts);

  const int i = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y), rows = static_cast<int>(args.x.rows);
  const Row<Input> row(args, min(i, rows - 1));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int piece = static_cast<int>(blockDim.x) * kPerLane, step = static_cast<int>(blocks) * piece;
  int k = static_cast<int>(block) * piece + thread * kPerLane;
  typename Row<Input>::Piece x[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) x[p] = row.load(k + p * step);

  RowScales scales;
  int expert = -1;
  std::int32_t place = -1;  // of copy `lane`
  // Loads that wait for each other, as early as what they read may be there.
  const auto find_places = [&] {
    expert = expert_of(args, i);
    if (expert >= 0 && lane < args.copies) place = row_of(args, i * args.copies + lane, expert);
    if (with_static && expert >= 0)
      scales = RowScales::of_static(
          args.static_scales[kOfCopies && place >= 0 ? args.ids[i * args.copies + lane] : expert]);
  };
  if (!args.x_is_old) find_places();
  Range range{0, true};  // of x
  if constexpr (whole || with_row_scales)
#pragma unroll
    for (int p = 0; p < kPieces; ++p) range.include(x[p].range());
  if constexpr (scales_by_cluster(a) && !kOfCopies)
    if (!with_static) {
      const float amax = fmaxf(range.amax, row.range(k + kPieces * step, step).amax);
      scales = RowScales::of_amax<Activation>(max_over_cluster(amax));
    }
  if (args.x_is_old) {
    wait_and_let_start(args);
    find_places();
  }
  if constexpr (with_row_scales && a.group.n == 0 && !kOfCopies)
    if (!with_static) {
      TensorRows tensor(args, max(expert, 0));
      if (args.amax_is_known || rows >= kManyOfTensor) tensor.end = min(tensor.end, tensor.first + 1);
      scales = RowScales::of_amax<Activation>(tensor.max_of(args.amax));
    }
  if (expert < 0) return;

  if (with_row_scales && block == 0 && thread < args.copies && place >= 0)
    args.row_scales[place] = scales.whole;
  __shared__ alignas(16) std::uint32_t columns[kThreads / 32][32 * kPerLane / 2];
  std::uint32_t* const own_columns = columns[(threadIdx.y * blockDim.x + threadIdx.x) / 32];
  const auto round = [&](const RowScales& by, int copies, std::int32_t to) {
    round_row<Activation, kBytes>(row, x, range, by, k, step, Store{args, lane, copies, to, own_columns});
  };
  if constexpr (kOfCopies) {
    // They belong to experts, whose scales may differ: then the row is rounded for each.
    const int first = __ffs(__ballot_sync(~0u, place >= 0)) - 1;  // that is there
    if (first < 0) return;
    const RowScales of_first = scales.of_lane(first);
    if (!__all_sync(~0u, place < 0 || scales == of_first)) {
#pragma unroll 1
      for (int copy = first; copy < args.copies; ++copy)
        if (const std::int32_t to = __shfl_sync(~0u, place, copy); to >= 0)
          round(scales.of_lane(copy), 1, lane == 0 ? to : -1);
      return;
    }
    scales = of_first;
  }
  round(scales, args.copies, place);
}

/// What threads read of a row of codes.
template <class Activation>
struct CodeRow {
  static constexpr Operand operand = Activation::operand;
  static constexpr int bits = operand.value.bits, words = kPerLane * bits / 32;
  static constexpr int group = operand.group.k == 0 ? kRecordColumns : operand.group.k;
  static_assert(group % kPerLane == 0);
  const std::byte *codes, *scales;
  int cols;
  bool wide;

  struct Piece {
    std::uint32_t codes[2] = {};
    float scale = 1;  ///< of the group, where groups have one
  };

  __device__ __forceinline__ CodeRow(const InputArgs& args, int i) : cols(static_cast<int>(args.x.cols)) {
    const int groups = operand.group.k == 0 ? 1 : (cols + group - 1) / group;
    codes = static_cast<const std::byte*>(args.x.data) + i * (args.x.cols * bits / 8);
    scales = static_cast<const std::byte*>(args.scales) + std::int64_t{i} * groups * (operand.scale.bits / 8);
    wide = cols % kPerLane == 0 && reinterpret_cast<std::uintptr_t>(args.x.data) % (words * 4) == 0;
  }
  /// Codes k .. k + 7; those from K on are 0.
  __device__ __forceinline__ Piece load(int k) const {
    Piece piece;
    if (k >= cols) return piece;
    if (operand.group.k != 0) piece.scale = scale(k / group);
    const std::byte* from = codes + k * bits / 8;
    if (wide) {
#pragma unroll
      for (int i = 0; i < words; ++i) piece.codes[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
      return piece;
    }
    const int bytes = min(kPerLane, cols - k) * bits / 8;
#pragma unroll
    for (int i = 0; i < words * 4; ++i)
      if (i < bytes) piece.codes[i / 4] |= static_cast<std::uint32_t>(from[i]) << (i % 4 * 8);
    return piece;
  }
  /// Of a group, or of the row.
  __device__ __forceinline__ float scale(int i) const {
    if constexpr (operand.scale == formats::f32)
      return reinterpret_cast<const float*>(scales)[i];
    else
      return decode<operand.scale>(static_cast<std::uint32_t>(scales[i]));
  }
};

/// Rows that are quantized already, blockDim.x threads each, of which each reads so many pieces at a time.
template <class Activation, bool kBytes>
__global__ void __launch_bounds__(kThreads) codes_kernel(const InputArgs args) {
  constexpr Operand a = Activation::operand;
  constexpr int kPieces = 4;
  if (!args.x_is_old)
    wait_and_let_start(args);
  else if (threadIdx.x == 0 && threadIdx.y == 0)
    prefetch(args.first_weights, args.experts);

  const int i = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const CodeRow<Activation> row(args, min(i, static_cast<int>(args.x.rows) - 1));
  typename CodeRow<Activation>::Piece x[kPieces];
  int k = thread * kPerLane;
  const int step = static_cast<int>(blockDim.x) * kPerLane;
  const auto load = [&] {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) x[p] = row.load(k + p * step);
  };
  load();
  if (args.x_is_old) wait_and_let_start(args);

  const int expert = expert_of(args, i);
  if (expert < 0) return;  // whole warps
  __shared__ alignas(16) std::uint32_t columns[kThreads / 32][32 * kPerLane / 2];
  const Store store{args, lane, args.copies,
                    lane < args.copies ? row_of(args, i * args.copies + lane, expert) : -1,
                    columns[(threadIdx.y * blockDim.x + threadIdx.x) / 32]};
  if constexpr (has_row_scales(a))
    if (thread < args.copies && store.place >= 0)
      args.row_scales[store.place] = a.tensor_scale.stored() ? args.token_scales[i] : row.scale(0);

  for (; k - lane * kPerLane < args.stride; k += kPieces * step, load()) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int at = k + p * step;
      if (at - lane * kPerLane >= args.stride) break;
      if constexpr (kBytes) {
        store.bytes(at, x[p].codes);
      } else {
        const float fold = has_record_scales(a) ? 1 : x[p].scale;
        std::uint32_t words[kPerLane / 2];
#pragma unroll
        for (int pair = 0; pair < kPerLane / 2; ++pair) {
          const std::uint32_t both =
              x[p].codes[pair * 2 * a.value.bits / 32] >> (pair * 2 * a.value.bits % 32);
          words[pair] =
              narrow_pair(decode<a.value>(both) * fold, decode<a.value>(both >> a.value.bits) * fold, true);
        }
        store_values<Activation>(store, at, words);
      }
      if constexpr (has_record_scales(a)) store.record_scale(at, x[p].scale);
    }
  }
}

constexpr int kRecordsOfThread = 8;

/// A thread has some neighbours of a row: lines that a warp reads are read again by its next loads.
__global__ void __launch_bounds__(kThreads) record_scales_kernel(const InputArgs args) {
  wait_and_let_start(args);
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x),
            records = static_cast<int>(args.stride / kRecordColumns),
            first = static_cast<int>(blockIdx.y) * kRecordsOfThread;
  if (i >= args.x.rows) return;
  const float* from = static_cast<const float*>(args.scales) + std::int64_t{i} * records;
#pragma unroll
  for (int n = 0; n < kRecordsOfThread; ++n)
    if (const int record = first + n; record < records)
      args.record_scales[std::int64_t{record} * args.tile_rows + i] = from[record];
}

struct PlainBf16 {
  static constexpr Operand operand = operands::plain(formats::bf16);
};
struct PlainF16 {
  static constexpr Operand operand = operands::plain(formats::f16);
};

/// How rows are shared out. Where there are many, few threads have a row, and a block has several.
struct RowTeams {
  static constexpr int many_pieces = 4;
  bool many;
  unsigned rows, threads, of_block, pieces;

  explicit RowTeams(const InputArgs& args)
      : many(args.x.rows >= kManyRows), rows(static_cast<unsigned>(args.x.rows)) {
    const auto numbers = static_cast<unsigned>(args.stride);
    const unsigned of_thread = kPerLane * (many ? many_pieces : 1);
    threads = std::min<unsigned>(kThreads, ((numbers + of_thread - 1) / of_thread + 31) / 32 * 32);
    of_block = many ? kThreads / threads : 1;
    pieces = (numbers + threads * of_thread - 1) / (threads * of_thread);
  }
  /// `blocks`: of a row.
  cudaError_t operator()(void (*kernel)(InputArgs), const InputArgs& args, unsigned blocks,
                         cudaStream_t stream) const {
    const bool together = scales_by_cluster(args.activation) && args.static_scales == nullptr;
    return launch_dependent(kernel,
                            {.blocks = dim3((rows + of_block - 1) / of_block, blocks),
                             .threads = dim3(threads, of_block),
                             .stream = stream,
                             .cluster = together ? dim3(1, blocks) : dim3(1)},
                            args);
  }
};

template <class Activation, class Input>
cudaError_t launch_rows(const InputArgs& args, cudaStream_t stream) {
  const RowTeams all(args);
  constexpr int many_pieces = RowTeams::many_pieces;
  const unsigned blocks = std::min<unsigned>(all.pieces, kMostBlocks);
  const auto launch = [&](auto* kernel, unsigned of_row) { return all(kernel, args, of_row, stream); };
  if constexpr (Activation::operand.quantized() && Activation::operand.group.n == 0)
    if (args.static_scales == nullptr && !args.amax_is_known) {
      if (const auto error = launch(row_amax_kernel<Input>, 1); error != cudaSuccess) return error;
      if (args.x.rows >= kManyOfTensor) {
        const bool groups = args.offsets != nullptr && !args.one_tensor;
        const Launch tensors{
            .blocks = groups ? static_cast<unsigned>(args.experts) : 1, .threads = 1024, .stream = stream};
        if (const auto error = launch_dependent(&tensor_amax_kernel, tensors, args); error != cudaSuccess)
          return error;
      }
    }
  constexpr bool bytes = are_bytes(byte_kind(Activation::operand));
  if constexpr (bytes && Activation::operand.may_be_static())
    if (args.static_scales != nullptr && args.copies > 1)
      return launch(inputs_kernel<Activation, Input, bytes, many_pieces, true>, blocks);
  if constexpr (bytes)  // many rows hardly ever become 16-bit numbers
    if (args.order.bytes == 0) return launch(inputs_kernel<Activation, Input, false, 1, false>, blocks);
  return launch(all.many ? inputs_kernel<Activation, Input, bytes, many_pieces, false>
                         : inputs_kernel<Activation, Input, bytes, 1, false>,
                blocks);
}

template <class Activation>
cudaError_t launch_rows(const InputArgs& args, cudaStream_t stream) {
  if constexpr (Activation::operand.quantized())
    if (args.scales != nullptr) {
      constexpr bool bytes = are_bytes(byte_kind(Activation::operand));
      return RowTeams(args)(
          args.order.bytes != 0 ? codes_kernel<Activation, bytes> : codes_kernel<Activation, false>, args, 1,
          stream);
    }
  if (args.x.dtype == DType::bf16) return launch_rows<Activation, Bf16>(args, stream);
  if (args.x.dtype == DType::f16) return launch_rows<Activation, F16>(args, stream);
  return launch_rows<Activation, F32>(args, stream);
}

}  // namespace

cudaError_t launch_inputs(const InputArgs& args, cudaStream_t stream) {
  if (args.activation == PlainBf16::operand) return launch_rows<PlainBf16>(args, stream);
  if (args.activation == PlainF16::operand) return launch_rows<PlainF16>(args, stream);
  cudaError_t error = cudaErrorInvalidValue;
  for_each_scheme([&]<class S>() {
    constexpr Operand a = S::scheme.activation;
    if constexpr (a.quantized() && can_multiply(a) && first_with_activation(a) == S::id)
      if (args.activation == a) error = launch_rows<ActivationOf<S::id>>(args, stream);
  });
  return error;
}

cudaError_t launch_record_scales(const InputArgs& args, cudaStream_t stream) {
  const auto parts = [](std::int64_t all, int each) {
    return static_cast<unsigned>((all + each - 1) / each);
  };
  return launch_dependent(
      &record_scales_kernel,
      {.blocks = dim3(parts(args.x.rows, kThreads), parts(args.stride / kRecordColumns, kRecordsOfThread)),
       .threads = kThreads,
       .stream = stream},
      args);
}

}  // namespace gatefold::cuda
