#pragma once
/// \file
/// What follows the multiply of a tile (moe_wgmma.cuh): scales, biases, activation. All of it happens in the
/// registers of the lanes that have the sums: a unit's rows lane / 4 and + 8, which are a channel's gate and
/// up, by two tokens of each 8. Nothing waits for memory, and there are no branches between tokens, so that
/// what is done for one of them hides the latency of another. 16 bits go through shared memory, where a
/// warpgroup puts together what it has of a token: 128 bytes of down's, 64 of channels. f32 goes straight
/// from registers.

#include "cuda/moe_wgmma_activation.cuh"
#include "cuda/moe_wgmma_codes.cuh"
#include "cuda/moe_wgmma_ends.cuh"
#include "cuda/rounding.cuh"

namespace gatefold::cuda {

/// Tokens that are finished together: enough to hide what is done for one behind others.
inline constexpr int kPieceTokens = 32;

/// What a lane has of a unit, as the multiplies leave it: sums of all tokens of an item, in units of one
/// number for each of both rows.
template <class T>
struct UnitResult {
  static constexpr int pieces = (T::tokens + kPieceTokens - 1) / kPieceTokens;
  typename T::Sum sums[pieces * kPieceTokens / 2];
  float unit[2];
};
/// The same of a tile: of a warp's units.
template <class T>
using TileResult = UnitResult<T>[T::units];

/// What a lane finishes of a tile, unit by unit and by pieces of an item's tokens: sums 4 i and + 1 are the
/// first row's by tokens 8 i + token_ and + 1, sums 4 i + 2 and + 3 the second one's. What all tokens of a
/// unit have in common is found once, and there are no branches that lanes do not take together.
template <class T>
class LaneRows {
 public:
  using Sums = float[kPieceTokens / 2];

  __device__ __forceinline__ LaneRows(const GemmArgs& args, const Tile& tile, const EndScales& scales,
                                      std::byte* memory)
      : args_(args),
        tile_(tile),
        scales_(scales),
        gate_up_(args.kind == GemmKind::gate_up),
        finds_amax_(args.out_amax != nullptr) {
    const unsigned thread = static_cast<unsigned>(thread_again());
    thread_ = thread % 128;
    lane_ = thread % 32;
    warp_ = reduced_in_warp(static_cast<int>(thread_ / 32));
    const int warpgroup = reduced_in_warp(static_cast<int>(thread / 128));
    token_ = lane_ % 4 * 2;
    first_unit_ = tile.first_group * kGroupUnits + warpgroup * 4 * T::units;
    if (T::bytes) scales_.rows += warp_ * kUnitRows;
    shared_ = memory + Stages<T>::ends_at + warpgroup * (T::end_tokens * kEndBytes);
  }
  /// Whether the matrix has units of any warp of this warpgroup.
  __device__ __forceinline__ bool any_there() const { return first_unit_ < units(); }
  /// Of each warp.
  __device__ __forceinline__ void next_unit() {
    first_unit_ += 4;
    if (T::bytes) scales_.rows += kWarpgroupRows;
  }

  /// The largest finite magnitude of the channels that this warp has stored. By whole warps.
  __device__ __forceinline__ float amax() const requires(T::of_tensors) {
    return __uint_as_float(__reduce_max_sync(~0u, amax_));
  }

  /// Sums become results, which are stored; by a warpgroup's warps together.
  __device__ __forceinline__ void finish(UnitResult<T>& result) {
    auto& sums = result.sums;
    unit_ = first_unit_ + warp_;
    row_ = unit_ * unit_rows() + lane_ / 4;
    load_factors(result.unit);
    const bool f32 = args_.out_dtype == DType::f32;
    const bool tiled = !T::bytes && args_.out_tile_rows != 0;
    // 16 bytes lie at multiples of 16, and rows that the matrix lacks do not share them with others.
    const bool whole = args_.rows % 8 == 0 && args_.out_stride % 8 == 0 &&
                       reinterpret_cast<std::uintptr_t>(args_.out) % 16 == 0;
    if (!gate_up_ && whole && !f32) return store_narrow_rows(sums);
    if (gate_up_ && tiled) return finish_in_tiles([&](auto&& store) { finish_channels(sums, store); });
    if constexpr (leaves_narrow_rows<T>)
      if (gate_up_ && !of_codes()) return finish_in_rows(sums, whole);
    if (unit_ >= units()) return;
    if (gate_up_)
      finish_channels_alone(sums);
    else if (f32)
      finish_pieces_in_turn(
          sums, [&](Sums& own, int first) { store_rows<float>(own, first, [](float x) { return x; }); });
    else
      finish_pieces_in_turn(sums, [&](Sums& own, int first) {
        store_rows<std::uint16_t>(own, first,
                                  [&](float x) { return narrow(x, args_.out_dtype == DType::bf16); });
      });
  }

 private:
  static constexpr int kEights = kPieceTokens / 8, kPieces = UnitResult<T>::pieces;

  __device__ __forceinline__ int units() const { return args_.groups * kGroupUnits; }
  __device__ __forceinline__ int unit_rows() const { return gate_up_ ? kUnitRows / 2 : kUnitRows; }

  /// All pieces that have tokens, one after the other: store(sums, first token).
  template <class AllSums, class Store>
  __device__ __forceinline__ void finish_pieces(const AllSums& sums, Store&& store) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int first = piece * kPieceTokens;
      if (piece > 0 && first >= tile_.count) return;
      Sums own;
#pragma unroll
      for (int i = 0; i < kPieceTokens / 2; ++i) own[i] = static_cast<float>(sums[first / 2 + i]);
      scale(own, first);
      store(own, first);
    }
  }
  /// The same with little code: the piece that is finished is always in the first registers, the others move
  /// on.
  template <class AllSums, class Store>
  __device__ __forceinline__ void finish_pieces_in_turn(AllSums& sums, Store&& store) const {
    constexpr int each = kPieceTokens / 2;
#pragma unroll 1
    for (int first = 0; first < tile_.count; first += kPieceTokens) {
      Sums own;
#pragma unroll
      for (int i = 0; i < each; ++i) own[i] = static_cast<float>(sums[i]);
#pragma unroll
      for (int i = 0; i < (kPieces - 1) * each; ++i) sums[i] = sums[i + each];
      scale(own, first);
      store(own, first);
    }
  }

  /// Tokens of an item from this lane's one on; none of a row that the matrix lacks.
  __device__ __forceinline__ int tokens_left(int row) const {
    return row < args_.rows ? tile_.count - token_ : 0;
  }

  __device__ __forceinline__ void load_factors(const float (&unit)[2]) {
    if constexpr (copies_ends<T>) {  // of rows that the matrix lacks anything
      const float* own = scales_.rows + lane_ / 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factors_[r] = unit[r] * sum_scale<T::P, T::M>() * (T::P.row_scale ? own[8 * r] : 1.0f);
        bias_[r] = (gate_up_ && r == 1 ? args_.up_bias : args_.bias) == nullptr ? 0 : own[kUnitRows + 8 * r];
      }
      return;
    }
    const float* row_scales = scales_.rows;
    if constexpr (T::P.row_scale && !T::bytes)
      row_scales = reinterpret_cast<const float*>(args_.weights + tile_.expert * args_.expert_stride) +
                   unit_ * kUnitRows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factors_[r] = unit[r] * sum_scale<T::P, T::M>();
      if (T::P.row_scale && unit_ < units()) factors_[r] *= row_scales[lane_ / 4 + 8 * r];
      bias_[r] = 0;
      const float* bias = gate_up_ && r == 1 ? args_.up_bias : args_.bias;
      const int row = row_ + (gate_up_ ? 0 : 8 * r);
      if (bias != nullptr && row < args_.rows)
        bias_[r] = bias[static_cast<std::int64_t>(tile_.expert) * args_.rows + row];
    }
  }
  __device__ __forceinline__ void scale(Sums& sums, int first) const {
    if (scales_.tokens != nullptr) {
      const float* x_scales = scales_.tokens + first + token_;
      const int left = tile_.count - first;
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        // In shared memory anything can be read.
        const float2 x =
            T::bytes || 8 * i < left ? *reinterpret_cast<const float2*>(x_scales + 8 * i) : float2{};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sums[4 * i + 2 * r] *= x.x;
          sums[4 * i + 2 * r + 1] *= x.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPieceTokens / 2; ++i) sums[i] = fmaf(sums[i], factors_[i / 2 % 2], bias_[i / 2 % 2]);
  }

  /// Gates and ups to channels.
  template <class Activate>
  __device__ __forceinline__ void for_channels(Sums& sums, Activate&& activate) const {
#pragma unroll
    for (int i = 0; i < kPieceTokens / 4; ++i) {
      float& gate = sums[i / 2 * 4 + i % 2];
      gate = activate(gate, sums[i / 2 * 4 + 2 + i % 2]);
    }
  }
  /// Channels of each piece, in the places of gates.
  template <class AllSums, class Store>
  __device__ __forceinline__ void finish_channels(AllSums& sums, Store&& store) const {
    if (!is_plain_swiglu(args_.activation)) return finish_channels_in_turn(sums, store);
    finish_pieces(sums, [&](Sums& own, int first) {
      for_channels(own, [&](float gate, float up) { return swiglu<true>(args_.activation, gate, up); });
      store(own, first);
    });
  }
  /// By any activation, with little code.
  template <class AllSums, class Store>
  __device__ __forceinline__ void finish_channels_in_turn(AllSums& sums, Store&& store) const {
    const Activation& by = args_.activation;
    finish_pieces_in_turn(sums, [&](Sums& own, int first) {
      if (is_geglu(by))
        for_channels(own, [&](float gate, float up) { return activate(by, gate, up); });
      else
        for_channels(own, [&](float gate, float up) { return swiglu<false>(by, gate, up); });
      store(own, first);
    });
  }

  /// Where a slot's rows are.
  template <class Out>
  __device__ __forceinline__ Out* slot_of(int token) const {
    const int row = tile_.first + token;
    // The same in three ways: each keeps the compiler from spilling registers of some kernels.
    if constexpr (T::P.value.bits == 16)
      return reinterpret_cast<Out*>(static_cast<std::byte*>(args_.out) +
                                    row * (args_.out_stride * static_cast<std::int64_t>(sizeof(Out))));
    return static_cast<Out*>(args_.out) + (T::P.zeros && !T::few ? kept(row) : row) * args_.out_stride;
  }

  /// Whether channels become codes here.
  __device__ __forceinline__ bool of_codes() const {
    if constexpr (leaves_codes<T>) return args_.static_scales != nullptr;
    return false;
  }
  /// By each warp itself.
  template <class AllSums>
  __device__ __forceinline__ void finish_channels_alone(AllSums& sums) const {
    if constexpr (leaves_codes<T>)
      finish_codes(sums);
    else if constexpr (!leaves_narrow_rows<T>)
      finish_channels_in_turn(sums, [&](const Sums& own, int first) { store_channels(own, first); });
  }

  /// Codes, in tiles: 8 bytes of each token.
  template <class AllSums>
  __device__ __forceinline__ void finish_codes(AllSums& sums) const {
    const float scale = args_.static_scales[tile_.expert].apply(1.0f);
    const int own = lane_ / 4, token = own / 2 * 8 + token_ + own % 2, k = unit_ * 8,
              chunk = k / 8 % 4 * 2 + k / 64 % 2;
    auto* const out = static_cast<uint2*>(args_.out) +
                      (static_cast<std::int64_t>(k / kRecordColumns) * args_.out_tile_rows + tile_.row) * 16;
    finish_channels(sums, [&](const Sums& channels, int first) {
      Elements<formats::f32, kEights * 2> numbers;  // of this lane's channel, by its tokens
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        // As if rows of bf16 had been left.
        const std::uint32_t pair = narrow_pair(channels[4 * i], channels[4 * i + 1], true);
        const int left = tile_.count - (first + i * 8 + token_);
        numbers.words[2 * i] = left > 0 ? pair << 16 : 0;
        numbers.words[2 * i + 1] = left > 1 ? pair & 0xffff0000u : 0;
      }
      const auto range = numbers.range();
      const bool fits = __all_sync(~0u, range.finite && FastDivider(scale).fits(range.amax));
      std::uint32_t words[2];
      encode_elements<T::M>(numbers, scale, range, fits, words);
      const uint2 codes = codes_of_token(words);
      const int row = first + token;
      if (row >= tile_.count) return;
      out[(row * 8 + (chunk ^ (tile_.row + row) % 8)) * 2 + k / 32 % 2] = codes;
      if (unit_ == 0) args_.out_scales[tile_.row + row] = scale;
    });
  }

  /// f32, in rows of channels.
  __device__ __forceinline__ void store_channels(const Sums& sums, int first) const {
    const int left = tokens_left(row_) - first;
    float* out = slot_of<float>(first + token_) + row_;
#pragma unroll
    for (int i = 0; i < kEights; ++i, out += 8 * args_.out_stride)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c < left) out[c * args_.out_stride] = sums[4 * i + c];
  }

  /// Of these bf16, of two tokens of each 8, finite ones are among those of amax().
  __device__ __forceinline__ void include(const std::uint32_t (&pairs)[kEights], int first) {
    const int left = tokens_left(row_) - first;
#pragma unroll
    for (int i = 0; i < kEights * 2; ++i) {
      const std::uint32_t magnitude = (i % 2 == 0 ? pairs[i / 2] << 16 : pairs[i / 2]) & 0x7fff0000u;
      if (i / 2 * 8 + i % 2 < left && magnitude < 0x7f800000u) amax_ = max(amax_, magnitude);
    }
  }

  /// Both rows, as they are.
  template <class Out, class Convert>
  __device__ __forceinline__ void store_rows(const Sums& sums, int first, Convert&& convert) const {
    const int left = tokens_left(row_) - first, left_below = tokens_left(row_ + 8) - first;
    Out* out = slot_of<Out>(first + token_) + row_;
#pragma unroll
    for (int i = 0; i < kEights; ++i, out += 8 * args_.out_stride)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * i + c < left) out[c * args_.out_stride] = convert(sums[4 * i + c]);
        if (8 * i + c < left_below) out[c * args_.out_stride + 8] = convert(sums[4 * i + 2 + c]);
      }
  }

  /// Where a channel of an item's token lies in tiles.
  __device__ __forceinline__ std::uint16_t* in_tiles(int token, int channel) const {
    constexpr PackedFormat P = T::P;
    __builtin_assume(channel >= 0);
    return static_cast<std::uint16_t*>(args_.out) +
           tile_position(args_.out_tile_rows, tile_.row + token, P.position(channel));
  }
  static constexpr int kChannelBytes = kEndBytes / 2;  ///< of a token
  /// 16 bits, in tiles, as down takes them; channels that the matrix lacks are 0. In tiles a warpgroup's 32
  /// channels of a token are four times 16 bytes, each of two channels of every warp, for which lanes read a
  /// word of every warp. `finish` is given what stores a piece.
  template <class Finish>
  __device__ __forceinline__ void finish_in_tiles(Finish&& finish) const {
    static_assert(kEights == 4);
    constexpr float larger = input_scale<T::P, T::M>();
    constexpr bool bf16 = T::M == formats::bf16;
    constexpr int kBytes = kPieceTokens * kChannelBytes, kPlaces = T::end_tokens * kEndBytes / kBytes;
    const unsigned token = thread_ / 4, pair = thread_ % 4;
    const std::uint32_t there = row_ < args_.rows ? ~0u : 0;
    const int left = tile_.count - static_cast<int>(token), channel = first_unit_ * unit_rows() + pair * 2;
    std::byte* const to = shared_ + lane_ * kChannelBytes + (warp_ ^ lane_ / 2 % 4) * 16;
    std::uint16_t* const out = in_tiles(token, channel);
    std::uint16_t* const out_folded = in_tiles(token, channel + 8);  // of every second warp
    if (kPlaces > 1) sync_warpgroup();                               // the unit before has been read
    finish([&](const Sums& sums, int first) {
      std::uint32_t pairs[4], words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = there & narrow_pair(sums[4 * i] * larger, sums[4 * i + 1] * larger, bf16);
      const int place = first / kPieceTokens % kPlaces * kBytes;
      if (kPlaces == 1) sync_warpgroup();  // the piece before has been read
      store_transposed(to + place, pairs);
      sync_warpgroup();
#pragma unroll
      for (int w = 0; w < 4; ++w)
        words[w] = *reinterpret_cast<const std::uint32_t*>(
            shared_ + place + (token * kChannelBytes + (w ^ token / 2 % 4) * 16 + pair * 4));
      if (first >= left) return;
      if constexpr (T::P.folded) {
        *reinterpret_cast<uint2*>(out + first * 64) = {words[0], words[2]};
        *reinterpret_cast<uint2*>(out_folded + first * 64) = {words[1], words[3]};
      } else {
        *reinterpret_cast<uint4*>(out + first * 64) = {words[0], words[1], words[2], words[3]};
      }
    });
    // The last unit's lanes fill rows up to their stride, which is a multiple of what down reads.
    if (unit_ + 1 != units()) return;
#pragma unroll 1
    for (int k = units() * unit_rows() + lane_ % 4 * 2; k < args_.out_stride; k += 8)
#pragma unroll 1
      for (int i = lane_ / 4; i < tile_.count; i += 8) *reinterpret_cast<std::uint32_t*>(in_tiles(i, k)) = 0;
  }

  /// bf16, in rows of channels: of a warpgroup, 64 bytes of a token.
  template <class AllSums>
  __device__ __forceinline__ void finish_in_rows(AllSums& sums, bool whole) {
    constexpr int kBytes = kPieceTokens * kChannelBytes;
    static_assert(2 * kBytes <= T::end_tokens * kEndBytes);
    const int token = static_cast<int>(thread_ / 4), eight = static_cast<int>(thread_ % 4),
              channel = first_unit_ * unit_rows() + eight * 8,
              left = channel < args_.rows ? tile_.count - token : 0;
    std::byte* const to = shared_ + lane_ * kChannelBytes + (warp_ ^ lane_ / 2 % 4) * 16;
    const std::byte* const from = shared_ + token * kChannelBytes + (eight ^ token / 2 % 4) * 16;
    auto* const out = slot_of<std::uint16_t>(token) + channel;
    sync_warpgroup();  // the unit before has been read
    finish_channels(sums, [&](const Sums& own, int first) {
      std::uint32_t pairs[kEights];
#pragma unroll
      for (int i = 0; i < kEights; ++i) pairs[i] = narrow_pair(own[4 * i], own[4 * i + 1], true);
      if (T::of_tensors && finds_amax_) include(pairs, first);
      const int place = first / kPieceTokens % 2 * kBytes;
      store_transposed(to + place, pairs);
      sync_warpgroup();
      if (first >= left) return;
      std::uint16_t* const row = out + first * args_.out_stride;
      if (whole)
        *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(from + place);
      else
#pragma unroll 1
        for (int i = 0; i < 8 && channel + i < args_.rows; ++i)
          row[i] = reinterpret_cast<const std::uint16_t*>(from + place)[i];
    });
  }

  /// Where 16 bytes of a token lie: neighbouring tokens' are in different banks.
  __device__ __forceinline__ std::byte* in_shared(unsigned token, unsigned sixteen) const {
    return shared_ + token * kEndBytes + (sixteen ^ token % 8) * 16;
  }
  static __device__ __forceinline__ void sync_warpgroup() {
    sync_threads<128>(1 + threadIdx.x / 128);
  }

  /// 16 bits, of a warpgroup, as many tokens at a time as there is room for.
  template <class AllSums>
  __device__ __forceinline__ void store_narrow_rows(const AllSums& sums) const {
    const bool bf16 = args_.out_dtype == DType::bf16;
    const int sixteen = thread_ % 8, token = thread_ / 8, row = first_unit_ * kUnitRows + sixteen * 8,
              left = row < args_.rows ? tile_.count - token : 0;
    std::byte* const to = in_shared(lane_ / 16 * 8 + lane_ % 8, warp_ * 2 + lane_ / 8 % 2);
    const std::byte* const from = in_shared(token, sixteen);
    auto* out = slot_of<std::uint16_t>(token) + row;
    finish_pieces(sums, [&](Sums& own, int first) {
#pragma unroll
      for (int begin = 0; begin < kPieceTokens; begin += T::end_tokens) {
        sync_warpgroup();  // the tokens before have been read
#pragma unroll
        for (int i = 0; i < T::end_tokens; i += 16) {
          std::uint32_t pairs[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int at = (begin + i) / 2 + 2 * j;
            pairs[j] = narrow_pair(own[at], own[at + 1], bf16);
          }
          store_transposed(to + i * kEndBytes, pairs);
        }
        sync_warpgroup();
#pragma unroll
        for (int i = 0; i < T::end_tokens; i += 16, out += 16 * args_.out_stride)
          if (first + begin + i < left)
            *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(from + i * kEndBytes);
      }
    });
  }

  const std::conditional_t<chains<T>, EndArgs, const GemmArgs&> args_;
  const Tile& tile_;
  EndScales scales_;
  const bool gate_up_, finds_amax_;
  std::byte* shared_;           ///< of this warpgroup: end_tokens * kEndBytes
  unsigned thread_, lane_;      ///< of the warpgroup, and of the warp
  int warp_;                    ///< of the warpgroup
  int first_unit_, unit_ = 0;   ///< of the warpgroup's four warps, and of this one
  int row_ = 0;                 ///< of the matrix, the first row, or the channel
  int token_;                   ///< of 8 tokens, the first of this lane's two
  float factors_[2], bias_[2];  ///< of both rows
  std::uint32_t amax_ = 0;      ///< of this lane, the bits of an f32
};

/// There is one end for all kinds of tiles: a lane's sums of the tokens that an item lacks are anything.
/// Those of the unit that is finished are always in the first registers.
template <class T>
__device__ __forceinline__ void finish_tile(const GemmArgs& args, const Tile& tile, const EndScales& scales,
                                            std::byte* memory, TileResult<T>& result) {
  LaneRows<T> rows(args, tile, scales, memory);
#pragma unroll 1
  for (int u = 0; u < T::units; ++u) {
    if (!rows.any_there()) return;  // nor are the others
    rows.finish(result[0]);
    if constexpr (T::units > 1) {
      result[0] = result[1];
      rows.next_unit();
    }
  }
  if constexpr (T::of_tensors)
    if (args.out_amax != nullptr)
      if (const float amax = rows.amax(); threadIdx.x % 32 == 0)  // of numbers >= 0, as of their bits
        atomicMax(reinterpret_cast<int*>(args.out_amax), __float_as_int(amax));
}

}  // namespace gatefold::cuda
