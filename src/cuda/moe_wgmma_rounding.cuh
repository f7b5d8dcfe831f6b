#pragma once
/// \file
/// What is between both multiplies of a chain (moe_chain.h) whose second one reads codes: rows that the
/// first one has left are rounded as launch_inputs does it, by the warps that multiply.

#include <type_traits>

#include "cuda/moe_wgmma_ends.cuh"
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

/// Rows of an item, from `begin` on; of item -1: there are no more.
struct RoundingPiece {
  int item, begin;
};

/// Shared memory, where results of tiles are otherwise.
template <class T>
struct RoundingMemory {
  std::uint32_t columns[T::warps][32 * kPerLane / 4];
  float largest[T::warps];
  RoundingPiece piece;
  Places at;  ///< of rings, which take no registers meanwhile
};

/// Rows [begin, end) of an item, each by some of the warps that multiply.
template <class T>
__device__ __forceinline__ void round_piece(const GemmChain& chain, const CutItem& item, int begin, int end,
                                            RoundingMemory<T>& memory) {
  using Input = std::conditional_t<leaves_narrow_rows<T>, Bf16, F32>;
  constexpr int kWarpColumns = 32 * kPerLane,
                kPieces = columns_of_rounding_warp(RoundedTo<T>::operand) / kWarpColumns;
  const InputArgs& args = chain.rounding;
  const int thread = thread_again(), warp = thread / 32, lane = thread % 32,
            warps = kept(chain.rounding_warps), rank = warp % warps, step = warps * kWarpColumns,
            k = rank * kWarpColumns + lane * kPerLane;
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
      if (args.static_scales != nullptr) {
        scales = RowScales::of_static(args.static_scales[item.expert]);
      } else if (T::of_tensors && args.amax_is_known) {
        scales = RowScales::of_amax<RoundedTo<T>>(*args.amax);
      } else {
        float amax = group_max<32>(fmaxf(range.amax, row.range(k + kPieces * step, step).amax));
        if (warps > 1) {
          memory.largest[warp] = amax;
          sync_multiplying<T>();
          amax = group_max<32>(lane < warps ? memory.largest[warp - rank + lane] : 0.0f);
          sync_multiplying<T>();  // before the next ones
        }
        scales = RowScales::of_amax<RoundedTo<T>>(amax);
      }
      if (rank == 0 && lane == 0 && i < end) args.row_scales[item.row + i] = scales.whole;
    }
    round_row<RoundedTo<T>, true>(
        row, x, range, scales, k, step,
        Store{args, lane, 1, lane == 0 && i < end ? item.row + i : -1, memory.columns[warp]});
  }
}

/// No item has more tokens: the first one is that of the expert with most, unless that has several.
__device__ __forceinline__ int most_tokens(const GemmArgs& args) {
  const CutItem& first = args.items[0];
  return args.experts <= kMostSortedExperts && first.band_items == 1 ? first.count : args.tile_tokens;
}

/// The next piece, as soon as the first multiply has left it. Nothing that it waits for is still to be taken.
template <class T>
__device__ __forceinline__ RoundingPiece take_piece(const GemmChain& chain) {
  const GemmArgs& args = chain.of[0];
  const int of_item = chain.pieces_of(most_tokens(args)), all = *args.item_count * of_item;
  for (;;) {
    const int piece = atomicAdd(chain.next_piece, 1), item = piece / of_item,
              begin = piece % of_item * chain.rounding_rows;
    if (piece >= all) return {-1, 0};
    if (begin >= args.items[item].count) continue;
    if (T::of_tensors && chain.finished_of_all != nullptr)
      wait_for_all_of_first_multiply<T>(chain);
    else
      wait_for_first_multiply<T>(chain, args.items[item].row);
    return {item, begin};
  }
}

/// By a block that has finished its tiles of the first multiply: pieces, until all are taken. Meanwhile the
/// weights of its next tile are copied.
template <class T>
__device__ __forceinline__ void round_rows(const GemmChain& chain, Places& at, std::byte* ends) {
  constexpr bool kKeeps = !T::from_memory;  // else they are known to be the same for all lanes
  auto& memory = *reinterpret_cast<RoundingMemory<T>*>(ends);
  sync_multiplying<T>();  // what memory had has been read
  if (kKeeps && threadIdx.x == 0) memory.at = at;
  for (;;) {
    sync_multiplying<T>();
    if (threadIdx.x == 0) memory.piece = take_piece<T>(chain);
    sync_multiplying<T>();
    const RoundingPiece piece = memory.piece;
    if (piece.item < 0) break;
    const CutItem item = chain.of[0].items[piece.item];
    round_piece<T>(chain, item, piece.begin, min(item.count, piece.begin + chain.rounding_rows), memory);
    __threadfence();
    sync_multiplying<T>();
    if (threadIdx.x == 0) atomicAdd(chain.finished + item.row / 8, 1);
  }
  if constexpr (kKeeps) {
    at = memory.at;
    sync_multiplying<T>();
  }
}

}  // namespace gatefold::cuda
