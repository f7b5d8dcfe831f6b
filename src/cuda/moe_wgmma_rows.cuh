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

/// The sums of N tokens by the rows of a unit, and those of a record.
template <class T, int N>
struct RowSums {
  typename T::Sum sums[N / 2];
  float part[T::parts ? N / 2 : 1];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& sum : sums) sum = 0;
  }
  /// Begins to multiply a record.
  __device__ __forceinline__ void multiply(Descriptor rows, Descriptor columns) {
    begin_multiplies();
#pragma unroll
    for (int k = 0; k < kRecordColumns; k += 32) {
      if constexpr (!T::parts)
        RowsWgmma<N>::template run<true>(sums, add_bytes(rows, k), add_bytes(columns, k));
      else if (k == 0)
        RowsWgmma<N>::template run<false>(part, rows, columns);
      else
        RowsWgmma<N>::template run<true>(part, add_bytes(rows, k), add_bytes(columns, k));
    }
    commit_multiplies();
  }
  /// Adds the sums of a record, whose multiplies are done. x_scales: of this lane's columns.
  __device__ __forceinline__ void add_part(const RecordScales<T::P>& scales, const float* x_scales) {
    take_sums(part);
    const float of_rows[2] = {scales.scale(0, 0), scales.scale(0, 1)};
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      float scale = of_rows[i / 2 % 2];
      if constexpr (T::record_scales) scale *= x_scales[i / 4 * 8 + i % 2];
      sums[i] = fmaf(part[i], scale, sums[i]);
    }
  }
};

/// A tile of at most N tokens. Its first stage of weights is there.
template <class T, int N>
requires(T::bytes&& T::from_memory && !T::token_rows) __device__ __forceinline__ Tile
    multiply_tile(const GemmChain& chain, const Tile& next, const WarpgroupRing<T>& ring,
                  const RingBarriers<T>& barriers, Places& at, std::byte* memory, TileResult<T>& result) {
  using S = Stages<T>;
  const GemmArgs& args = multiply_of<T>(chain, next);
  static_assert(S::weights == S::inputs && T::steps == 1);  // a step has the same place in both rings
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kWarpgroupBytes = kWarpgroupRows * kRecordColumns;
  const std::uint32_t inputs = swizzled_rows(shared_address(memory)),
                      weights =
                          add_bytes(inputs, S::weights_at + __shfl_sync(~0u, warp / 4, 0) * kWarpgroupBytes);
  const std::byte* const extras = memory + S::weights_at + T::extras_at +
                                  warp / kGroupUnits * T::group_extra_bytes +
                                  warp % kGroupUnits * T::extra_stride;
  const auto release = [&](std::uint32_t full) {
    barriers.release_inputs(args, full + barriers.inputs_after);
    if (lane == 0) arrive(full + barriers.empty);
  };
  RowSums<T, N> to;
  to.clear();
  StagePlace place = at.inputs;
  std::uint32_t before = 0;  // the barrier of a stage whose multiplies may not be done
#pragma unroll 1
  for (int step = 0;; ++step) {
    const std::uint32_t full = barriers.weights_full + place.index * 8;
    wait_barrier(full, place.parity);
    wait_barrier(full + barriers.inputs_after, place.parity);
    // Of few tokens the compiler knows it to be the same in all lanes; sums leave no register for more.
    const int index = T::few && !T::record_scales ? place.index : reduced_in_warp(place.index);
    const Descriptor rows = descriptor(add_bytes(weights, index * T::weight_bytes)),
                     columns = descriptor(add_bytes(inputs, index * S::input_bytes));
    if constexpr (T::parts) {
      const RecordScales<T::P> scales(extras + place.index * T::weight_bytes, lane);
      const std::byte* x_scales = memory + place.index * S::input_bytes + S::scales_at;
      to.multiply(rows, columns);
      wait_for_multiplies<0>();
      to.add_part(scales, reinterpret_cast<const float*>(x_scales) + lane % 4 * 2);
      __syncwarp();
    } else {
      to.multiply(rows, columns);
      if (step > 0) {
        wait_for_multiplies<1>();
        release(before);
      }
    }
    before = full;
    if (step + 1 == args.steps) break;
    if constexpr (T::parts) release(full);
    place.advance(S::weights);
  }
  wait_for_multiplies<0>();
  const Tile tile = read_by_lane_0(ring.tiles[place.index]);  // again: it took no registers meanwhile
  __syncwarp();
  release(before);
  place.advance(S::weights);
  at = {place, place};
  take_sums(to.sums);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) result[0].sums[i] = to.sums[i];
  result[0].unit[0] = result[0].unit[1] = 1;
  return tile;
}

}  // namespace gatefold::cuda
