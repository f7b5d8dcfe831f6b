#pragma once
/// \file
/// What is between both multiplies of a chain (moe_chain.h) whose second one reads codes: rows of f32 that
/// the first one has left are rounded as launch_inputs does it, by the warps that multiply.

#include "cuda/moe_wgmma_ring.cuh"
#include "cuda/round_row.cuh"

namespace gatefold::cuda {

/// What the second multiply of kernel T reads.
template <class T>
struct RoundedTo {
  static constexpr Operand operand =
      rounded_in_chain(T::input == InputKind::e4m3_fast ? InputKind::e4m3 : T::input);
};

template <class T>
__device__ __forceinline__ void sync_multiplying() {
  sync_threads<T::warps * 32>(1 + T::warps / 4);  // after those of warpgroups
}

/// Shared memory, where results of tiles are otherwise.
template <class T>
struct RoundingMemory {
  std::uint32_t columns[T::warps][32 * kPerLane / 4];
  float largest[T::warps];
  int piece;
};

/// Rows [begin, end) of an item, each by some of the warps that multiply.
template <class T>
__device__ __forceinline__ void round_piece(const GemmChain& chain, const CutItem& item, int begin, int end,
                                            RoundingMemory<T>& memory) {
  using Input = FormatTag<formats::f32>;
  constexpr int kWarpColumns = 32 * kPerLane,
                kPieces = columns_of_rounding_warp(RoundedTo<T>::operand) / kWarpColumns;
  const InputArgs& args = chain.rounding;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = chain.rounding_warps,
            rank = warp % warps, step = warps * kWarpColumns, k = rank * kWarpColumns + lane * kPerLane;
#pragma unroll 1
  for (int first = begin; first < end; first += T::warps / warps) {
    const int i = first + warp / warps;
    const Row<Input> row(args, item.first + min(i, end - 1));
    typename Row<Input>::Piece x[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) x[p] = row.load(k + p * step);
    typename Row<Input>::Range range{0, true};
    RowScales scales;
    if constexpr (!T::record_scales) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) range.include(x[p].range());
      float amax = group_max<32>(fmaxf(range.amax, row.range(k + kPieces * step, step).amax));
      if (warps > 1) {
        memory.largest[warp] = amax;
        sync_multiplying<T>();
        amax = group_max<32>(lane < warps ? memory.largest[warp - rank + lane] : 0.0f);
        sync_multiplying<T>();  // before the next ones
      }
      scales = RowScales::of_amax<RoundedTo<T>>(amax);
      if (rank == 0 && lane == 0 && i < end) args.row_scales[item.row + i] = scales.whole;
    }
    round_row<RoundedTo<T>, true>(
        row, x, range, scales, k, step,
        Store{args, lane, lane == 0 && i < end ? item.row + i : -1, memory.columns[warp]});
  }
}

/// By a block that has finished its tiles of the first multiply: pieces, until all are taken. Meanwhile the
/// weights of its next tile are copied. Nothing that it waits for is still to be taken.
template <class T>
__device__ __forceinline__ void round_rows(const GemmChain& chain, std::byte* ends) {
  auto& memory = *reinterpret_cast<RoundingMemory<T>*>(ends);
  const GemmArgs& args = chain.of[0];
  const int pieces = chain.rounding_pieces, all = *args.item_count * pieces;
  for (;;) {
    sync_multiplying<T>();  // what memory had has been read
    if (threadIdx.x == 0) memory.piece = atomicAdd(chain.next_piece, 1);
    sync_multiplying<T>();
    const int piece = memory.piece;
    if (piece >= all) return;
    const CutItem item = args.items[piece / pieces];
    const int begin = piece % pieces * chain.rounding_rows,
              end = min(item.count, begin + chain.rounding_rows);
    if (begin >= end) continue;
    if (threadIdx.x == 0) wait_for_first_multiply<T>(chain, item.row);
    sync_multiplying<T>();
    round_piece<T>(chain, item, begin, end, memory);
    __threadfence();
    sync_multiplying<T>();
    if (threadIdx.x == 0) atomicAdd(chain.finished + item.row / 8, 1);
  }
}

}  // namespace gatefold::cuda
