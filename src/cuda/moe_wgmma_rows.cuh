#pragma once
/// \file
/// What warpgroups of moe_wgmma.cuh multiply in 8 bits where weights have 8 bits: both operands as they lie
/// in shared memory, 64 rows by all tokens of an item in one multiply. Nothing is decoded.
///
/// Sums of e4m3 products lose bits as they grow (wgmma_bytes.cuh): those of a record are kept by themselves,
/// and are added to the others in f32, times the scales of their columns. Two warpgroups multiply while a
/// third one adds. int8 products are exact, and are multiplied without a pause.

#include "cuda/moe_wgmma.cuh"
#include "cuda/moe_wgmma_bytes_ring.cuh"
#include "cuda/wgmma_bytes.cuh"

namespace gatefold::cuda {

/// The sums of N tokens by the rows of a unit, and those of a record: of half of the tokens, where registers
/// do not hold all.
template <class T, int N>
struct RowSums {
  static constexpr int pieces = T::parts && N > 128 ? 2 : 1, piece = N / pieces;
  using Product = std::conditional_t<T::M == formats::int8, std::int32_t, float>;
  std::conditional_t<T::parts, float, Product> sums[N / 2];
  Product part[T::parts ? piece / 2 : 1];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& sum : sums) sum = 0;
  }
  /// Begins to multiply a record by a piece of the tokens.
  __device__ __forceinline__ void multiply(std::uint32_t rows, std::uint32_t columns) {
    begin_multiplies();
#pragma unroll
    for (int k = 0; k < kRecordColumns; k += 32) {
      if constexpr (!T::parts)
        RowsWgmma<N>::template run<true>(sums, add_bytes(rows, k), add_bytes(columns, k));
      else if (k == 0)
        RowsWgmma<piece>::template run<false>(part, rows, columns);
      else
        RowsWgmma<piece>::template run<true>(part, add_bytes(rows, k), add_bytes(columns, k));
    }
    commit_multiplies();
  }
  /// Adds these sums to those of the tokens from `first` on. x_scales: of this lane's columns.
  __device__ __forceinline__ void add_part(int first, const RecordScales<T::P>& scales,
                                           const float* x_scales) {
    take_sums(part);
    const float of_rows[2] = {scales.scale(0, 0), scales.scale(0, 1)};
#pragma unroll
    for (int i = 0; i < piece / 2; ++i) {
      float scale = of_rows[i / 2 % 2];
      if constexpr (T::record_scales) scale *= x_scales[first + i / 4 * 8 + i % 2];
      float& sum = sums[first / 2 + i];
      sum = fmaf(static_cast<float>(part[i]), scale, sum);
    }
  }
};

/// A tile of at most N tokens. Its first stage of weights is there.
template <class T, int N>
__device__ __forceinline__ void multiply_tile_of_rows(const GemmArgs& args, const WarpgroupRing<T>& ring,
                                                      const RingBarriers<T>& barriers, Places& at,
                                                      std::byte* memory) {
  using S = Stages<T>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kWarpgroupBytes = 4 * kUnitRows * kRecordColumns;
  const std::uint32_t weights =
      swizzled_rows(__shfl_sync(~0u, shared_address(memory) + S::weights_at + warp / 4 * kWarpgroupBytes, 0));
  const std::uint32_t inputs = swizzled_rows(__shfl_sync(~0u, shared_address(memory), 0));
  const std::byte* const extras = memory + S::weights_at + T::extras_at +
                                  warp / kGroupUnits * T::group_extra_bytes +
                                  warp % kGroupUnits * T::extra_stride;
  const auto release = [&](const Places& places) {
    if (lane != 0) return;
    arrive(barriers.inputs_full + places.inputs.index * 8 + barriers.empty);
    arrive(barriers.weights_full + places.weights.index * 8 + barriers.empty);
  };
  RowSums<T, N> to;
  to.clear();
  Places before;  // whose multiplies may not be done
#pragma unroll 1
  for (int step = 0;; ++step) {
    wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
    wait_barrier(barriers.inputs_full + at.inputs.index * 8, at.inputs.parity);
    const std::uint32_t rows = add_bytes(weights, at.weights.index * T::weight_bytes),
                        columns = add_bytes(inputs, at.inputs.index * S::input_bytes);
    if constexpr (T::parts) {
      const RecordScales<T::P> scales(extras + at.weights.index * T::weight_bytes, lane);
      const std::byte* x_scales = memory + at.inputs.index * S::input_bytes + S::scales_at;
#pragma unroll
      for (int first = 0; first < N; first += to.piece) {
        to.multiply(rows, add_bytes(columns, first * kRecordColumns));
        wait_for_multiplies<0>();
        to.add_part(first, scales, reinterpret_cast<const float*>(x_scales) + lane % 4 * 2);
      }
      __syncwarp();
    } else {
      to.multiply(rows, columns);
      if (step > 0) {
        wait_for_multiplies<1>();
        release(before);
      }
    }
    if (step + 1 == args.steps) break;
    if constexpr (T::parts) release(at);
    before = at;
    at.inputs.advance(S::inputs);
    at.weights.advance(S::weights);
  }
  wait_for_multiplies<0>();
  const Tile tile = read_by_lane_0(ring.tiles[at.weights.index]);  // again: it took no registers meanwhile
  __syncwarp();
  release(at);
  at.inputs.advance(S::inputs);
  at.weights.advance(S::weights);
  take_sums(to.sums);
  struct {
    float sums[N / 2];
  } finished[1];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) finished[0].sums[i] = static_cast<float>(to.sums[i]);
  finish_tile<T, N>(args, tile, finished);
}

/// With as few tokens as will do.
template <class T, int N>
__device__ __forceinline__ void multiply_tile_of_fewest_rows(const GemmArgs& args,
                                                             const WarpgroupRing<T>& ring,
                                                             const RingBarriers<T>& barriers, int count,
                                                             Places& at, std::byte* memory) {
  if constexpr (N < T::tokens) {
    if (count > N) {
      multiply_tile_of_fewest_rows<T, N + T::token_step>(args, ring, barriers, count, at, memory);
      return;
    }
  }
  multiply_tile_of_rows<T, N>(args, ring, barriers, at, memory);
}

/// Reads what the end of a tile will, whose loads then go no further than the L1 cache.
template <class T>
__device__ __forceinline__ void read_ahead(const GemmArgs& args, const Tile& tile) {
  const int lane = threadIdx.x % 32;
  const auto read = [](const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); };
  if (args.inputs.row_scales != nullptr && lane * 32 < tile.count)
    read(args.inputs.row_scales + tile.row + lane * 32);
  const int unit = tile.first_group * kGroupUnits + static_cast<int>(threadIdx.x) / 32;
  if (T::P.row_scale && lane == 0 && unit < args.groups * kGroupUnits)
    read(reinterpret_cast<const float*>(args.weights + tile.expert * args.expert_stride) + unit * kUnitRows);
}

template <class T>
requires(T::bytes&& T::from_memory) __device__ __forceinline__
    void multiply_tiles(const GemmArgs& args, const WarpgroupRing<T>& ring, std::byte* memory) {
  const RingBarriers<T> barriers(ring);
  for (Places at;;) {
    wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
    const Tile tile = read_by_lane_0(ring.tiles[at.weights.index]);
    if (tile.count == 0) return;
    read_ahead<T>(args, tile);
    multiply_tile_of_fewest_rows<T, T::least_tokens>(args, ring, barriers, tile.count, at, memory);
  }
}

}  // namespace gatefold::cuda
