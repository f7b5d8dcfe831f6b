#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/routing.h"
#include "cuda/slots.h"
#include "cuda/topk.cuh"

namespace gatefold::cuda {
namespace {

/// Columns are cut into so many slices, whose sums are added in their order: logits have the same bits
/// whatever a block's tile is. A warp takes a slice by itself, 32 columns at a time, eight of a row a lane.
constexpr int kSlices = 16, kChunkColumns = 32, kLaneColumns = 8;

/// A tile of logits, and who computes it. 16-bit numbers of one type are multiplied as they are, others in
/// tf32, which has 11 bits: those of f32 as two. 16-bit hidden states need one, and so do routers that had 16
/// bits.
template <class HiddenNumber, class RouterNumber, int kTokens16, int kExperts8, int kBlocks, int kWarps,
          int kAhead>
struct RouterTile {
  using Hidden = HiddenNumber;
  using Router = RouterNumber;
  static constexpr int token_tiles = kTokens16, expert_tiles = kExperts8;
  static constexpr int tokens = 16 * kTokens16, experts = 8 * kExperts8;
  static constexpr int blocks = kBlocks, warps = kWarps;  ///< of a tile; of a block. They take slices in turn
  static constexpr int threads = 32 * warps;
  static constexpr int ahead = kAhead;  ///< chunks that a warp loads before it multiplies
  static constexpr int bytes = kSlices * tokens * experts * 4;
  static_assert(blocks == 1 || blocks * warps == kSlices);
};

/// d += a * b: m16n8k8, f32 sums; low bits of operands are ignored. a: rows lane / 4 and + 8 of column
/// lane % 4, and of + 4; b: those columns of expert lane / 4.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ std::uint32_t to_tf32(float x) {
  std::uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
/// What its tf32 lacks of a number.
__device__ __forceinline__ float rest_of(float x) {
  return x - __uint_as_float(to_tf32(x));
}

/// Reads the 128 bytes there to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/// Copies 16 bytes to shared memory, or zeros.
__device__ __forceinline__ void copy_16_bytes_or_zeros(void* shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void end_group_of_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// For all groups but the last kGroups.
template <int kGroups>
__device__ __forceinline__ void wait_for_groups_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

/// The columns of a row that a lane has of a chunk.
template <class T>
struct LaneColumns {
  static constexpr int words = kLaneColumns * sizeof(T) / 4;
  std::uint32_t word[words];

  /// `there`: columns that the row still has; the others are 0. `wide`: all of them, or none, and aligned.
  /// kConstant: no kernel before this one writes them.
  template <bool kConstant>
  __device__ __forceinline__ void load(const T* row, int there, bool wide) {
    if (wide && there > 0) {
#pragma unroll
      for (int i = 0; i < words; i += 4) {
        const uint4* from = reinterpret_cast<const uint4*>(row) + i / 4;
        *reinterpret_cast<uint4*>(word + i) = kConstant ? __ldg(from) : *from;
      }
      return;
    }
    alignas(16) T numbers[kLaneColumns] = {};
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i)
      if (i < there) numbers[i] = row[i];
#pragma unroll
    for (int i = 0; i < words; ++i) word[i] = reinterpret_cast<const std::uint32_t*>(numbers)[i];
  }
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, float>) return __uint_as_float(word[i]);
    const std::uint32_t pair = word[i / 2];
    if constexpr (std::is_same_v<T, __half>) return f32_of_f16(pair, i % 2);
    return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
  }
};

/// What a lane multiplies of a chunk.
template <class T>
struct LaneChunk {
  LaneColumns<typename T::Router> weights[T::expert_tiles];
  LaneColumns<typename T::Hidden> x[2 * T::token_tiles];
};

/// Adds the products of a chunk: of 16-bit numbers, 16 columns at a time.
template <class T>
__device__ __forceinline__ void multiply_pairs(const LaneChunk<T>& chunk,
                                               float (&d)[T::token_tiles][T::expert_tiles][4]) {
  constexpr Format format = std::is_same_v<typename T::Hidden, __half> ? formats::f16 : formats::bf16;
  const auto& [weights, x] = chunk;
#pragma unroll
  for (int i = 0; i < kLaneColumns / 2; i += 2)
#pragma unroll
    for (int m = 0; m < T::token_tiles; ++m) {
      const Pair a[4] = {x[2 * m].word[i], x[2 * m + 1].word[i], x[2 * m].word[i + 1],
                         x[2 * m + 1].word[i + 1]};
#pragma unroll
      for (int n = 0; n < T::expert_tiles; ++n)
        mma<format>(d[m][n], a, weights[n].word[i], weights[n].word[i + 1]);
    }
}

/// The same in tf32, 8 columns at a time.
template <class T>
__device__ __forceinline__ void multiply_chunk(const LaneChunk<T>& chunk,
                                               float (&d)[T::token_tiles][T::expert_tiles][4]) {
  if constexpr (!std::is_same_v<typename T::Router, float>) return multiply_pairs<T>(chunk, d);
  constexpr bool of_f32 = std::is_same_v<typename T::Hidden, float>;
  const auto& [weights, x] = chunk;
  bool exact[T::expert_tiles];
#pragma unroll
  for (int n = 0; n < T::expert_tiles; ++n) {
    float rests = 0;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) rests = fmaxf(rests, fabsf(rest_of(weights[n][i])));
    exact[n] = __all_sync(kAllLanes, rests == 0);
  }
#pragma unroll
  for (int i = 0; i < kLaneColumns; i += 2)
#pragma unroll
    for (int m = 0; m < T::token_tiles; ++m) {
      const float a[4] = {x[2 * m][i], x[2 * m + 1][i], x[2 * m][i + 1], x[2 * m + 1][i + 1]};
      std::uint32_t high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        high[j] = of_f32 ? to_tf32(a[j]) : __float_as_uint(a[j]);
        low[j] = to_tf32(rest_of(a[j]));
      }
#pragma unroll
      for (int n = 0; n < T::expert_tiles; ++n) {
        const float b0 = weights[n][i], b1 = weights[n][i + 1];
        if (!exact[n]) mma_tf32(d[m][n], high, to_tf32(rest_of(b0)), to_tf32(rest_of(b1)));
        if constexpr (of_f32) mma_tf32(d[m][n], low, to_tf32(b0), to_tf32(b1));
        mma_tf32(d[m][n], high, to_tf32(b0), to_tf32(b1));
      }
    }
}

template <class Router>
__host__ __device__ const Router* router_of(const RouterArgs& args) {
  if constexpr (std::is_same_v<Router, float>) return args.router;
  return static_cast<const Router*>(args.router16);
}
/// Whether rows are read 16 bytes at a time.
template <class Router>
__host__ __device__ bool reads_wide(const RouterArgs& args) {
  const auto addresses = reinterpret_cast<std::uintptr_t>(args.hidden) |
                         reinterpret_cast<std::uintptr_t>(router_of<Router>(args));
  return args.hidden_size % kLaneColumns == 0 && addresses % 16 == 0;
}

/// Blocks [i * T::blocks ..), j, a cluster: tile i of experts, tile j of tokens.
template <class T>
__global__ void __launch_bounds__(T::threads, T::blocks > 1 ? 3 : 1) multiply_router(const RouterArgs args) {
  using Hidden = typename T::Hidden;
  using Router = typename T::Router;
  extern __shared__ float slices[];  // of the first block: [slice, tokens, experts]
  const int first_expert = static_cast<int>(blockIdx.x) / T::blocks * T::experts;
  const int first_token = static_cast<int>(blockIdx.y) * T::tokens;
  const int row = lane() / 4, own = lane() % 4 * kLaneColumns;
  // Rows that are not there are the last one, again.
  const auto weights = [&](int n) {
    return router_of<Router>(args) +
           static_cast<std::int64_t>(min(first_expert + 8 * n + row, args.experts - 1)) * args.hidden_size;
  };
  const auto hidden = [&](int i) {
    return static_cast<const Hidden*>(args.hidden) +
           static_cast<std::int64_t>(min(first_token + 8 * i + row, args.tokens - 1)) * args.hidden_size;
  };
  const EvenCut cut((args.hidden_size + kChunkColumns - 1) / kChunkColumns, kSlices);
  const bool wide = reads_wide<Router>(args);
  const int rank = T::blocks == 1 ? 0 : rank_in_cluster(), first_slice = rank * T::warps + warp();
  if constexpr (T::blocks > 1) arrive_after_reads_in_cluster();  // this block is there
  if (T::blocks > 1 && blockIdx.y == 0)  // a warp has one slice: all of it at once, for all tokens
    for (int n = 0; n < T::expert_tiles; ++n)
      for (int chunk = cut.begin(first_slice) + lane() % 4; chunk < cut.begin(first_slice + 1); chunk += 4)
        prefetch_line(weights(n) + chunk * kChunkColumns);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if constexpr (T::blocks > 1) wait_for_reads_in_cluster();
#pragma unroll 1
  for (int slice = first_slice; slice < kSlices; slice += T::blocks * T::warps) {
    float d[T::token_tiles][T::expert_tiles][4] = {};
    const int end = cut.begin(slice + 1);
#pragma unroll 1
    for (int first = cut.begin(slice); first < end; first += T::ahead) {
      LaneChunk<T> chunks[T::ahead];
#pragma unroll
      for (int c = 0; c < T::ahead; ++c) {
        const int column = (first + c) * kChunkColumns + own;
        const int there = first + c < end ? args.hidden_size - column : 0;
#pragma unroll
        for (int n = 0; n < T::expert_tiles; ++n)
          chunks[c].weights[n].template load<true>(weights(n) + column, there, wide);
#pragma unroll
        for (int i = 0; i < 2 * T::token_tiles; ++i)
          chunks[c].x[i].template load<false>(hidden(i) + column, there, wide);
      }
#pragma unroll
      for (int c = 0; c < T::ahead; ++c) multiply_chunk<T>(chunks[c], d);
    }
    float* sums = (T::blocks == 1 ? slices : in_block_of_cluster(slices, 0)) +
                  slice * T::tokens * T::experts + lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < T::token_tiles; ++m)
#pragma unroll
      for (int n = 0; n < T::expert_tiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<float2*>(sums + (16 * m + 8 * half + row) * T::experts + 8 * n) = {
              d[m][n][2 * half], d[m][n][2 * half + 1]};
  }
  if constexpr (T::blocks > 1)
    sync_cluster();
  else
    __syncthreads();
  if (rank != 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < T::tokens * T::experts; i += T::threads) {
    const int token = first_token + i / T::experts, expert = first_expert + i % T::experts;
    if (token >= args.tokens || expert >= args.experts) continue;
    float sum = 0;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) sum += slices[slice * T::tokens * T::experts + i];
    if (args.bias != nullptr) sum += args.bias[expert];
    args.logits[static_cast<std::int64_t>(token) * args.experts + expert] = sum;
  }
}

/// A tile of many tokens' logits, of 16-bit numbers, of which a warp has 16 * kTokens16 tokens by 32 experts.
/// Rows come by way of shared memory, two chunks of columns at a time.
template <class Number, int kTokens16, int kStages>
struct SharedTile {
  using Hidden = Number;
  using Router = Number;
  static constexpr int token_tiles = kTokens16, expert_tiles = 4;  ///< of a warp
  static constexpr int tokens = 2 * 16 * kTokens16, experts = 2 * 32;
  static constexpr int blocks = 1, warps = 4, threads = 32 * warps;
  static constexpr int stages = kStages, stage_chunks = 2, row_bytes = stage_chunks * kChunkColumns * 2;
  static constexpr int stage_bytes = (tokens + experts) * row_bytes, bytes = stages * stage_bytes;
};

/// Of 16 bytes in a row of a stage. Every other row has its chunks the other way round: eight lanes read two
/// rows' parts of a chunk from all banks.
__device__ __forceinline__ int place_in_row(int row, int piece) {
  return (piece ^ row % 2 * 4) * 16;
}

/// Block i, j: tile i of experts, tile j of tokens. Slices come one after the other, with the sums that
/// multiply_router has of each.
template <class T>
__global__ void __launch_bounds__(T::threads) multiply_router_shared(const RouterArgs args) {
  using Number = typename T::Hidden;
  extern __shared__ __align__(16) std::byte stages[];  // [stage, tokens then experts, row_bytes]
  constexpr int pieces = T::row_bytes / 16, rows_at_once = T::threads / pieces;
  const int first_expert = static_cast<int>(blockIdx.x) * T::experts,
            first_token = static_cast<int>(blockIdx.y) * T::tokens;
  const int piece = static_cast<int>(threadIdx.x) % pieces,
            first_row = static_cast<int>(threadIdx.x) / pieces;
  const int chunks = (args.hidden_size + kChunkColumns - 1) / kChunkColumns,
            all_stages = (chunks + T::stage_chunks - 1) / T::stage_chunks;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto load = [&](int stage) {
    std::byte* to = stages + stage % T::stages * T::stage_bytes;
    const int column = stage * T::stage_chunks * kChunkColumns + piece * kLaneColumns;
    const bool there = column < args.hidden_size;
#pragma unroll
    for (int row = 0; row < T::tokens + T::experts; row += rows_at_once) {
      const bool of_tokens = row < T::tokens;
      const int i = row + first_row;
      // Rows that are not there are the last one, again.
      const auto* from =
          static_cast<const Number*>(of_tokens ? args.hidden : args.router16) +
          static_cast<std::int64_t>(of_tokens ? min(first_token + i, args.tokens - 1)
                                              : min(first_expert + i - T::tokens, args.experts - 1)) *
              args.hidden_size;
      copy_16_bytes_or_zeros(to + i * T::row_bytes + place_in_row(i, piece), from + (there ? column : 0),
                             there);
    }
  };
#pragma unroll
  for (int stage = 0; stage < T::stages - 1; ++stage) {
    if (stage < all_stages) load(stage);
    end_group_of_copies();
  }
  const int row = lane() / 4, own = lane() % 4;
  const int warp_token = warp() / 2 * 16 * T::token_tiles, warp_expert = warp() % 2 * 32;
  const EvenCut cut(chunks, kSlices);
  float d[T::token_tiles][T::expert_tiles][4] = {}, sums[T::token_tiles][T::expert_tiles][4] = {};
  int slice = 0;
#pragma unroll 1
  for (int stage = 0; stage < all_stages; ++stage) {
    wait_for_groups_but<T::stages - 2>();
    __syncthreads();
    if (stage + T::stages - 1 < all_stages) load(stage + T::stages - 1);
    end_group_of_copies();
    const std::byte* rows = stages + stage % T::stages * T::stage_bytes;
#pragma unroll
    for (int c = 0; c < T::stage_chunks; ++c) {
      LaneChunk<T> chunk;
      const auto read = [&](auto& columns, int i) {
        *reinterpret_cast<uint4*>(columns.word) =
            *reinterpret_cast<const uint4*>(rows + i * T::row_bytes + place_in_row(row, 4 * c + own));
      };
#pragma unroll
      for (int i = 0; i < 2 * T::token_tiles; ++i) read(chunk.x[i], warp_token + 8 * i + row);
#pragma unroll
      for (int n = 0; n < T::expert_tiles; ++n) read(chunk.weights[n], T::tokens + warp_expert + 8 * n + row);
      multiply_pairs<T>(chunk, d);
      if (stage * T::stage_chunks + c + 1 != cut.begin(slice + 1)) continue;
#pragma unroll
      for (int m = 0; m < T::token_tiles; ++m)
#pragma unroll
        for (int n = 0; n < T::expert_tiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][n][i] += d[m][n][i], d[m][n][i] = 0;
      ++slice;
    }
  }
#pragma unroll
  for (int m = 0; m < T::token_tiles; ++m)
#pragma unroll
    for (int n = 0; n < T::expert_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = first_token + warp_token + 16 * m + i / 2 * 8 + row,
                  expert = first_expert + warp_expert + 8 * n + own * 2 + i % 2;
        if (token >= args.tokens || expert >= args.experts) continue;
        float sum = sums[m][n][i];
        if (args.bias != nullptr) sum += args.bias[expert];
        args.logits[static_cast<std::int64_t>(token) * args.experts + expert] = sum;
      }
}

template <class T>
constexpr auto kernel_of() {
  if constexpr (requires { T::stages; })
    return multiply_router_shared<T>;
  else
    return multiply_router<T>;
}

template <class T>
cudaError_t launch_tiles(const RouterArgs& args, cudaStream_t stream) {
  auto* kernel = kernel_of<T>();
  cudaError_t error = cudaSuccess;
  if constexpr (T::bytes > 48 << 10)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::bytes);
  constexpr int most = 65535 * T::tokens;  // of a grid
  for (std::int64_t first = 0; first < args.tokens && error == cudaSuccess; first += most) {
    RouterArgs part = args;
    part.tokens = static_cast<std::int32_t>(std::min<std::int64_t>(most, args.tokens - first));
    part.hidden = static_cast<const typename T::Hidden*>(args.hidden) + first * args.hidden_size;
    part.logits += first * args.experts;
    const dim3 blocks(static_cast<unsigned>((args.experts + T::experts - 1) / T::experts * T::blocks),
                      static_cast<unsigned>((part.tokens + T::tokens - 1) / T::tokens));
    error = launch_dependent(kernel,
                             {.blocks = blocks,
                              .threads = T::threads,
                              .stream = stream,
                              .shared_bytes = T::bytes,
                              .cluster = T::blocks},
                             part);
  }
  return error;
}

template <class T>
std::int64_t tiles_of(const RouterArgs& args) {
  return static_cast<std::int64_t>((args.tokens + T::tokens - 1) / T::tokens) *
         ((args.experts + T::experts - 1) / T::experts);
}

/// The largest tiles of which there are enough for all multiprocessors.
template <class Hidden, class Router>
cudaError_t launch_of(const RouterArgs& args, cudaStream_t stream) {
  using Few = RouterTile<Hidden, Router, 1, 1, 4, 4, 4>;
  using Some = RouterTile<Hidden, Router, 2, 2, 4, 4, 2>;
  using Many = RouterTile<Hidden, Router, 2, 2, 1, 16, 1>;
  if constexpr (std::is_same_v<Router, float>) {
    using All = RouterTile<Hidden, Router, 4, 2, 1, 8, 1>;
    if (tiles_of<All>(args) >= 256) return launch_tiles<All>(args, stream);
  } else if (reads_wide<Router>(args) && args.experts > 32) {  // of fewer, most of a tile would not be there
    using Shared128 = SharedTile<Router, 4, 4>;
    using Shared64 = SharedTile<Router, 2, 6>;
    if (tiles_of<Shared128>(args) >= 256) return launch_tiles<Shared128>(args, stream);
    if (tiles_of<Shared64>(args) >= 128) return launch_tiles<Shared64>(args, stream);
  }
  if (tiles_of<Many>(args) >= 96) return launch_tiles<Many>(args, stream);
  if (args.tokens > Few::tokens && tiles_of<Some>(args) >= 32) return launch_tiles<Some>(args, stream);
  return launch_tiles<Few>(args, stream);
}

}  // namespace

cudaError_t launch_router_logits(const RouterArgs& args, cudaStream_t stream) {
  const auto launch = [&]<class Hidden>(Hidden) {
    return args.router16 != nullptr ? launch_of<Hidden, Hidden>(args, stream)
                                    : launch_of<Hidden, float>(args, stream);
  };
  return args.dtype == DType::bf16  ? launch(__nv_bfloat16())
         : args.dtype == DType::f16 ? launch(__half())
                                    : launch_of<float, float>(args, stream);
}

}  // namespace gatefold::cuda
