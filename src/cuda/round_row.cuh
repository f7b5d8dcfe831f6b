#pragma once
/// \file
/// Rows of activations, read and rounded by warps, and stored as the multiply takes them (inputs.h).

#include "cuda/rounding.cuh"

namespace gatefold::cuda {

inline constexpr int kPerLane = 8;  ///< neighbours in k, of a warp's 256 columns

/// What threads read of a row of x.
template <class Input>
struct Row {
  using Piece = Elements<Input::format, kPerLane>;
  using Range = typename Piece::Range;
  const std::byte* x;
  int cols;
  bool wide;

  __device__ __forceinline__ Row(const InputArgs& args, int i) : cols(static_cast<int>(args.x.cols)) {
    const int from = args.divisor == 1 ? i : i / args.divisor;
    x = static_cast<const std::byte*>(args.x.data) + from * args.x.cols * (Input::format.bits / 8);
    wide = cols % kPerLane == 0 && reinterpret_cast<std::uintptr_t>(args.x.data) % 16 == 0;
  }
  /// Numbers k .. k + 7; those from K on are 0.
  __device__ __forceinline__ Piece load(int k) const {
    Piece piece;
    // What kernels leave to others is f32.
    constexpr Reads reads = Input::format == formats::f32 ? Reads::once : Reads::any;
    piece.template load<reads>(x, k, cols, wide);
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

/// How a warp stores its next 256 columns of a row.
static_assert(kMostTopK <= 32, "a lane has each copy's place");
struct Store {
  const InputArgs& args;
  const int lane, copies;
  const std::int32_t place;      // of copy `lane`; -1: there is none
  std::uint32_t* const columns;  // shared, room for them

  __device__ __forceinline__ std::int32_t place_of(int copy) const { return __shfl_sync(~0u, place, copy); }

  /// Columns k .. k + 7, by each lane.
  __device__ __forceinline__ void numbers(int k, const std::uint32_t (&words)[kPerLane / 2]) const {
    const PackedFormat p{.folded = args.order.folded, .in_order = args.order.in_order};
    uint4 piece = {words[0], words[1], words[2], words[3]};
    if (p.in_order)  // what lies in the places of codes 0, 2, 1, 3
      piece = {__byte_perm(piece.x, piece.y, 0x5410), __byte_perm(piece.x, piece.y, 0x7632),
               __byte_perm(piece.z, piece.w, 0x5410), __byte_perm(piece.z, piece.w, 0x7632)};
    if (!args.order.tiled) {
      const std::int64_t row = place_of(0);
      const int column = k % kRecordColumns,
                at = p.in_order ? k - column + p.block_of(column) * 32 + p.quarter_of(column) * 8 : k;
      if (k < args.stride) *reinterpret_cast<uint4*>(args.rows + row * args.stride + at) = piece;
      return;
    }
    const std::uint32_t pairs[] = {piece.x, piece.y, piece.z, piece.w};
    for (int pair = 0; pair < kPerLane / 2; ++pair)
      columns[p.position(lane * kPerLane) / 2 + 4 * pair] = pairs[pair];
    __syncwarp();
    piece = reinterpret_cast<const uint4*>(columns)[lane];
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < copies; ++i)
      if (const std::int32_t row = place_of(i); row >= 0 && k < args.stride)
        *reinterpret_cast<uint4*>(args.rows + tile_position(args.tile_rows, row, k)) = piece;
  }

  /// The same of codes.
  __device__ __forceinline__ void bytes(int k, const std::uint32_t (&words)[2]) const {
    const PackedFormat p{.folded = args.order.folded, .in_order = args.order.in_order};
    const int column = lane * kPerLane % kRecordColumns;
    const int block = p.block_of(column), quarter = p.quarter_of(column);
    for (int half = 0; half < 2; ++half)
      columns[lane / 16 * 32 +
              (args.order.of_rows ? quarter * 8 + block * 2 + half : block * 8 + half * 4 + quarter)] =
          __byte_perm(words[0], words[1], args.order.bytes >> (16 * half));
    __syncwarp();
    const uint4 piece = reinterpret_cast<const uint4*>(columns)[lane % 16];
    __syncwarp();
    k += lane % 16 * 16 - lane * kPerLane;  // 16 columns of each of half of the lanes; copies in turn
    const std::int64_t rows_before = static_cast<std::int64_t>(k / kRecordColumns) * args.tile_rows;
    uint4* record = reinterpret_cast<uint4*>(args.rows) + rows_before * 8;
#pragma unroll 1
    for (int first = 0; first < copies; first += 2)
      if (const std::int32_t row = place_of(first + lane / 16); row >= 0 && k < args.stride)
        record[(row * 8u + row % 8u) ^ lane % 8u] = piece;
  }

  /// That of the record that begins at k.
  __device__ __forceinline__ void record_scale(int k, float scale) const {
#pragma unroll 1
    for (int i = 0; i < copies; ++i)
      if (const std::int64_t to = place_of(i); to >= 0 && k < args.stride && k % kRecordColumns == 0)
        args.record_scales[args.tile_rows == 0 ? (to * args.stride + k) / kRecordColumns
                                               : k / kRecordColumns * args.tile_rows + to] = scale;
  }
};

/// Stores the values of columns k .. k + 7 of an operand's codes, in bf16.
template <class Activation>
__device__ __forceinline__ void store_values(const Store& store, int k,
                                             std::uint32_t (&words)[kPerLane / 2]) {
  constexpr Operand a = Activation::operand;
  // Activations with other scales of groups are multiplied by weights with folded scales: it is 1.
  if constexpr ((a.group.k == 0 || !a.quantized() || has_record_scales(a)) && a.value != formats::f16)
    if (const float scale = store.args.order.scale; scale != 1)
      for (std::uint32_t& word : words)
        word = multiply<formats::bf16>(word, (__float_as_uint(scale) >> 16) * 0x10001u);
  if constexpr (are_e4m3_rows(a))
    if (store.args.order.f16)
      for (std::uint32_t& word : words) word = f16_of_bf16(word);
  store.numbers(k, words);
}

/// Rounds and stores a row, of which a lane has numbers k, k + step, .. and their neighbours: x, of the first
/// ones, of which `range` is (where scales are of whole rows), and what comes after them. By whole warps.
template <class Activation, bool kBytes, class Input, int kPieces>
__device__ __forceinline__ void round_row(const Row<Input>& row,
                                          const typename Row<Input>::Piece (&x)[kPieces],
                                          const typename Row<Input>::Range& range, const RowScales& scales,
                                          int k, int step, const Store& store) {
  constexpr Operand a = Activation::operand;
  constexpr bool with_groups = a.quantized() && a.group.k != 0, whole = a.quantized() && a.group.k == 0,
                 with_record_scales = has_record_scales(a);
  constexpr int group = with_groups ? a.group.k : kRecordColumns;
  using Range = typename Row<Input>::Range;
  const auto round = [&](const typename Row<Input>::Piece& numbers, Range of_numbers, bool fits) {
    if constexpr (with_groups) of_numbers = numbers.range();
    const auto factors = GroupFactors::of<Activation>(
        scales, with_groups ? group_max<group / kPerLane>(of_numbers.amax) : 0.0f);
    std::uint32_t words[kBytes ? 2 : kPerLane / 2];
    if constexpr (kBytes) {
      encode_elements<Activation::operand.value>(numbers, factors.divisor, of_numbers, fits, words);
      store.bytes(k, words);
    } else {
      encode_inputs<Activation>(numbers, factors, of_numbers, fits, words);
      store_values<Activation>(store, k, words);
    }
    if constexpr (with_record_scales) store.record_scale(k, factors.record);
  };
  const auto there = [&] { return k - store.lane * kPerLane < store.args.stride; };  // the same for a warp
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

}  // namespace gatefold::cuda
