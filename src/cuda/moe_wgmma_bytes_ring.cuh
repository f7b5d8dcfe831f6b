#pragma once
/// \file
/// What a kernel of moe_wgmma.cuh is made for that multiplies bytes (moe_wgmma_bytes.cuh,
/// moe_wgmma_rows.cuh), and how activations come to shared memory: codes, 128 of a row in 128 bytes.

#include "cuda/inputs.h"
#include "cuda/moe_gemm_table.cuh"
#include "cuda/moe_wgmma_ring.cuh"

namespace gatefold::cuda {

/// How many tokens items may have: at most kFewTokensOfBytes; more; or, by fewer rows, still more. Sums leave
/// registers for four, three or two warpgroups; or, where they decode, for four, or for two whose warps have
/// two units or one. Where tokens are rows, `many` are two warpgroups, by all rows, and `most` are three, by
/// half of them. `some`: as `few`, by a few more tokens, where there are no other scales than those that are
/// decoded; registers do not hold what a chain rounds as well.
enum class TileSize { few, some, many, most };

/// Where tokens are rows of multiplies: those of a warpgroup and of a warp, and rows of weights that are
/// multiplied together and share scales.
inline constexpr int kWarpgroupTokens = 64, kWarpTokens = kWarpgroupTokens / 4, kPieceRows = 128,
                     kPieceGroups = kPieceRows / (kGroupUnits * kUnitRows);

template <class SchemeTag, InputKind kInput, TileSize kSize>
struct ByteTraits {
  using Plain = GemmTraits<SchemeTag, kInput, 1>;
  static constexpr PackedFormat P = Plain::P;
  static constexpr Format M = kInput == InputKind::int8 ? formats::int8 : formats::e4m3;
  static constexpr InputKind input = kInput;
  static constexpr bool bytes = true, few = kSize <= TileSize::some, some = kSize == TileSize::some;
  static constexpr bool record_scales = Plain::record_scales;
  /// Whether activations may have one scale for all rows, whose largest number ends of tiles then find. (By
  /// `most`, whose loops the compiler makes otherwise beside that, layers of other schemes take 1 to 4 %
  /// longer.)
  static constexpr bool of_tensors =
      kSize != TileSize::most &&
      any_activation(SchemeTag::id, [](const Operand& a) { return are_e4m3_rows(a) && a.group.n == 0; });
  /// Weights are multiplied as they lie in shared memory (moe_wgmma_rows.cuh), not decoded into registers.
  static constexpr bool from_memory = P.value == M;
  /// So inputs may be codes where they lie (GemmInputs::box_rows), if the weights' columns keep their order.
  static constexpr bool reads_codes = from_memory;
  /// Whether all products are added to the same sums, which the end of a step brings into units of the next
  /// record's scale; or sums of a record are kept by themselves until they are added to the others, in f32.
  static constexpr bool fast = kInput == InputKind::e4m3_fast || P.for_bytes;
  static constexpr bool changes_units = fast && Plain::scaled_groups;
  static constexpr bool parts = !changes_units && (Plain::scaled_groups || (M == formats::e4m3 && !fast));
  /// Where nothing is done to operands or to sums, multiplies are so fast that reading tokens from the L2
  /// cache may take as long.
  static constexpr bool may_share = !few && from_memory && !record_scales, counts = !may_share;
  using Sum = std::conditional_t<M == formats::int8 && !parts, std::int32_t, float>;  ///< of a tile
  /// Operands that it can take.
  static constexpr bool possible = fits_bytes(P, M) && (P.for_bytes || P.group == kRecordColumns) &&
                                   !P.zeros && (!some || P.for_bytes) &&
                                   (kInput != InputKind::e4m3_fast || !(parts || P.for_bytes)) &&
                                   (!changes_units || kSize == TileSize::most) &&
                                   (from_memory ? P.record_bytes() == P.value_bytes() : !record_scales);
  static constexpr int record_bytes = Plain::record_bytes, step_bytes = Plain::step_bytes;
  static constexpr int step_extra_bytes = Plain::step_extra_bytes, extra_stride = Plain::extra_stride;

  static constexpr bool most = kSize == TileSize::most;
  /// Tokens are the rows of multiplies, and so many rows of weights their columns (moe_wgmma_tokens.cuh).
  static constexpr bool token_rows =
      !few && from_memory && record_scales && SchemeTag::scheme.weight.group.n % kPieceRows == 0;

  /// The most of an item: so many have room beside sums of a record.
  static constexpr int tokens =
      some          ? kFewTokensOfTile
      : few         ? (from_memory || !parts ? kFewTokensOfBytes : kFewTokensWithParts)
      : from_memory ? (parts ? (most ? 192 : 128) : (most ? kMostTokensOfTile : kManyTokensOfTile))
      : P.for_bytes ? (most ? kMostTokensOfTile : 128)
      : most        ? (parts ? 192 : kMostTokensOfTile)
                    : kTokensOfTwoUnits;
  static constexpr TokenLoops loops =
      (few          ? (from_memory ? TokenLoops{{32, 48, 64}} : TokenLoops{{8, 16, 24, 32, 48, 64, 80}})
       : token_rows ? TokenLoops{{64, 128, 192}}
       : most       ? (from_memory && parts ? TokenLoops{{64, 96, 112, 120, 128, 136, 144, 160, 176, 192}}
                       : parts              ? TokenLoops{{64, 96, 128, 160, 192}}
                                            : TokenLoops{{64, 96, 112, 128, 144, 160, 176, 192, 224, 256}})
                    : TokenLoops{{64, 80, 96, 112, 128, 144, 160}})
          .up_to(tokens);
  static constexpr int token_step = token_rows ? kWarpgroupTokens : most ? kTokenStepOfTile : 16;
  /// Units of a warp, where it has some; warps that multiply.
  static constexpr int units = from_memory || few || most ? 1 : 2;
  static constexpr int warps = few ? 16 : token_rows ? tokens / kWarpTokens : from_memory && !most ? 12 : 8;
  static constexpr int threads = (warps + 4) * 32;
  /// Pieces of rows, where tokens are rows; groups of a tile.
  static constexpr int pieces = token_rows ? (most ? 1 : 2) : 0;
  /// Channels of a tile are a record of each token, whose scale an end can find.
  static constexpr bool rounds_channels = pieces * kPieceRows == 2 * kRecordColumns;
  static constexpr int groups = token_rows ? pieces * kPieceGroups : warps * units / kGroupUnits;
  /// Of the threads that multiply, and of those that fill the rings: together, what all are launched with.
  static constexpr int registers = warps == 16   ? 104
                                   : warps == 12 ? 152
                                                 : 232,
                       fill_registers = warps == 16   ? 64
                                        : warps == 12 ? 56
                                                      : 40;
  static_assert(registers * warps + fill_registers * 4 <= 65536 / threads / 8 * 8 * threads / 32);

  /// Of a stage of weights: copies of less than 4 KB are slow.
  static constexpr int steps = step_bytes < 4096 ? 2 : 1;
  static constexpr int input_steps = few && !from_memory ? steps : 1;  ///< of a stage of activations
  static constexpr int group_bytes = steps * step_bytes, group_extra_bytes = steps * step_extra_bytes;
  /// Swizzled rows begin at multiples of 1024 bytes.
  static constexpr int extras_at = groups * group_bytes,
                       used_bytes = groups * (group_bytes + group_extra_bytes),
                       weight_bytes = from_memory ? (used_bytes + 1023) / 1024 * 1024 : used_bytes;
  static constexpr int end_tokens = 32;  ///< whose results are in shared memory together
  /// f32 of a warpgroup, for the end of a tile: of tokens, and of rows.
  static constexpr int scaled_tokens = record_scales ? 0 : tokens,
                       end_rows = token_rows ? pieces * kPieceRows : kWarpgroupRows * units,
                       end_scales = scaled_tokens + (P.row_scale ? end_rows : 0);
  static constexpr int all_bytes = P.for_bytes ? 228352 : 230400;  ///< and 2048 of tables
  static constexpr int ring_bytes = all_bytes - warps / 4 * end_tokens * kEndBytes,
                       shared_bytes = all_bytes + 1024;
  static constexpr int extra_groups = token_rows ? kPieceGroups : 1;  ///< as in WarpgroupTraits
  static constexpr int most_stages = 8;                               ///< of a ring
};

/// Known in advance, and about as many steps of both rings.
template <class T>
requires(T::bytes) struct Stages<T> {
  static constexpr int ends_at = T::ring_bytes;  ///< of results (moe_wgmma_finish.cuh)
  static constexpr int scales_at = T::tokens * kRecordColumns;
  static constexpr int input_bytes = T::input_steps * scales_at + (T::record_scales ? 1024 : 0);
  static constexpr int end_scales_at = T::ring_bytes - T::warps / 4 * T::end_scales * 4;
  static constexpr int most = end_scales_at / (input_bytes + T::weight_bytes * T::input_steps / T::steps);
  static constexpr int inputs = most < T::most_stages ? most : T::most_stages;
  static constexpr int weights_at = inputs * input_bytes;
  static constexpr int rest = (end_scales_at - weights_at) / T::weight_bytes;
  static constexpr int weights = T::from_memory ? inputs : rest < T::most_stages ? rest : T::most_stages;
  static_assert(weights >= 2 && inputs >= 2 && weights <= rest);

  Stages() = default;
  __device__ explicit Stages(int) {}
};

/// Rows of codes in boxes (GemmInputs::box_rows): as below.
template <class T>
__device__ void copy_tile_boxes(const GemmChain& chain, WarpgroupRing<T>& ring, std::byte* memory) {
  static_assert(T::input_steps == 1);
  using S = Stages<T>;
  const GemmArgs& args = chain.of[0];
  const GemmInputs& in = args.inputs;
  const int box = in.box_rows, box_bytes = box * kRecordColumns;
  StagePlace place;
  bool all_filled = false;  // once
  for (int i = 0;; ++i) {
    const Tile tile = same_in_warp(tile_of_block<T, Filler::inputs>(chain, ring, i));
    if (tile.count == 0) return;
    const int first_row = row_of_inputs<T>(args, tile), boxes = (tile.count + box - 1) / box,
              first_step = static_cast<int>(tile.part) * args.part_steps,
              scale_bytes = T::record_scales ? (tile.count + 7) / 8 * 8 * 4 : 0;
    for (int step = 0; step < args.steps; ++step) {
      if (all_filled) wait_barrier(ring.inputs_empty + place.index, place.parity ^ 1);
      if (one_of_warp()) {
        std::uint64_t* full = ring.inputs_full + place.index;
        std::byte* to = memory + place.index * S::input_bytes;
        expect_bytes(full, boxes * box_bytes + scale_bytes);
        if constexpr (T::record_scales)
          copy_bulk(to + S::scales_at,
                    in.record_scales + std::int64_t{first_step + step} * in.tile_rows + tile.row, scale_bytes,
                    full);
        for (int b = 0; b < boxes; ++b)
          copy_box(to + b * box_bytes, chain.boxes, (first_step + step) * kRecordColumns, first_row + b * box,
                   full);
      }
      place.advance(S::inputs);
      all_filled |= place.index == 0;
    }
  }
}

/// Copies activations, a stage as soon as it has been read; by one lane, whichever, of a warp.
template <class T>
requires(T::bytes) __device__
    void copy_tile_inputs(const GemmChain& chain, WarpgroupRing<T>& ring, std::byte* memory) {
  using S = Stages<T>;
  if constexpr (T::reads_codes)
    if (chain.of[0].inputs.box_rows > 0) return copy_tile_boxes<T>(chain, ring, memory);
  StagePlace place;
  bool all_filled = false;  // once
  for (int i = 0;; ++i) {
    const Tile tile = same_in_warp(tile_of_block<T, Filler::inputs>(chain, ring, i));
    if (tile.count == 0) return;
    wait_for_inputs_of<T>(chain, tile);
    const GemmArgs& args = multiply_of<T>(chain, tile);
    const GemmInputs& in = args.inputs;
    const int rows = (tile.count + 7) / 8 * 8;
    const OwnRows<T> own(args, rows);
    std::int64_t row = tile.row + own.first + std::int64_t{tile.part} * args.part_steps * in.tile_rows;
    for (int step = 0; step < args.steps; step += T::input_steps) {
      if (all_filled) wait_barrier(ring.inputs_empty + place.index, place.parity ^ 1);
      const int steps = min(T::input_steps, args.steps - step);
      if (one_of_warp()) {
        std::byte* to = memory + place.index * S::input_bytes;
        std::uint64_t* full = ring.inputs_full + place.index;
        expect_bytes(full, steps * rows * (kRecordColumns + (T::record_scales ? 4 : 0)));
        if constexpr (T::record_scales)
          copy_own<T>(args, to + S::scales_at + own.first * 4, in.record_scales + row, own.count * 4, full);
#pragma unroll
        for (int i = 0; i < T::input_steps; ++i)
          if (i < steps)
            copy_own<T>(
                args, to + i * S::scales_at + own.first * kRecordColumns,
                reinterpret_cast<const std::byte*>(in.rows) + (row + i * in.tile_rows) * kRecordColumns,
                own.count * kRecordColumns, full);
      }
      row += steps * in.tile_rows;
      place.advance(S::inputs);
      all_filled |= place.index == 0;
    }
  }
}

}  // namespace gatefold::cuda
