#pragma once
/// \file
/// What follows the multiply of a tile (moe_wgmma.cuh): scales, biases, activation. All of it happens in the
/// registers of the lanes that have the sums: a unit's rows lane / 4 and + 8, which are a channel's gate and
/// up, by two tokens of each 8. Nothing waits for memory, and there are no branches between tokens, so that
/// what is done for one of them hides the latency of another. Before 16-bit numbers are stored, lanes of
/// neighbouring rows exchange one of both tokens, so that each has neighbours of one token.

#include "cuda/moe_gemm_finish.cuh"
#include "cuda/moe_wgmma_ring.cuh"

namespace gatefold::cuda {

/// min and max that are NaN where either is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
/// 2^x, off by 2^-22 of it.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

/// Tokens that are finished together: enough to hide what is done for one behind others.
inline constexpr int kPieceTokens = 32;

/// What a lane has of a unit, as the multiplies leave it: sums of all tokens of an item, in units of one
/// number for each of both rows.
template <class T>
struct UnitResult {
  typename T::Sum sums[T::tokens / 2];
  float unit[2];
};
/// The same of a tile: of a warp's units.
template <class T>
using TileResult = UnitResult<T>[T::units];

/// What a lane finishes of a unit, by pieces of an item's tokens: sums 4 i and + 1 are the first row's by
/// tokens 8 i + token_ and + 1, sums 4 i + 2 and + 3 the second one's.
template <class T>
class LaneRows {
 public:
  using Sums = float[kPieceTokens / 2];

  /// x_scales: of the tile's tokens, or nullptr.
  __device__ __forceinline__ LaneRows(const GemmArgs& args, const Tile& tile, const float* x_scales,
                                      int of_warp)
      : args_(args), tile_(tile), x_scales_(x_scales), gate_up_(args.kind == GemmKind::gate_up) {
    int thread;  // not a value that took a register during the multiply
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    lane_ = thread % 32;
    unit_ = tile.first_group * kGroupUnits + thread / 32 * T::units + of_warp;
    row_ = unit_ * (gate_up_ ? kUnitRows / 2 : kUnitRows) + lane_ / 4;
    token_ = lane_ % 4 * 2;
    odd_ = lane_ / 4 % 2;
  }
  __device__ __forceinline__ bool there() const { return unit_ < args_.groups * kGroupUnits; }

  /// Sums become results, which are stored.
  __device__ __forceinline__ void finish(UnitResult<T>& result) {
    auto& sums = result.sums;
    load_factors(result.unit);
    const bool f32 = args_.out_dtype == DType::f32;
    if (!gate_up_) {
      if (f32)
        finish_pieces(sums, [&](Sums& own) { store_rows<float>(own, [](float x) { return x; }); });
      else if (args_.out_stride % 4 == 0 && unit_ * kUnitRows + kUnitRows <= args_.rows)
        finish_pieces(sums, [&](Sums& own) { store_narrow_rows(own); });
      else
        finish_pieces_in_turn(sums, [&](Sums& own) {
          store_rows<std::uint16_t>(own, [&](float x) { return narrow(x, args_.out_dtype == DType::bf16); });
        });
      return;
    }
    const Activation::Kind kind = args_.activation.kind;
    const bool in_tiles = args_.out_tile_rows != 0;
    if (kind == Activation::Kind::geglu || kind == Activation::Kind::geglu_tanh)
      finish_pieces_in_turn(sums, [&](Sums& own) {
        apply_geglu(own);
        in_tiles ? store_in_tiles(own) : store_channels(own);
      });
    else if (in_tiles)
      finish_pieces(sums, [&](Sums& own) {
        apply_swiglu(own);
        store_in_tiles(own);
      });
    else
      finish_pieces(sums, [&](Sums& own) {
        apply_swiglu(own);
        store_channels(own);
      });
  }

 private:
  static constexpr int kEights = kPieceTokens / 8, kPieces = T::tokens / kPieceTokens;
  static_assert(T::tokens % kPieceTokens == 0);

  /// All pieces that have tokens, one after the other.
  template <class AllSums, class Store>
  __device__ __forceinline__ void finish_pieces(const AllSums& sums, Store&& store) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece, first_ += kPieceTokens) {
      if (piece > 0 && first_ >= tile_.count) return;
      Sums own;
#pragma unroll
      for (int i = 0; i < kPieceTokens / 2; ++i)
        own[i] = static_cast<float>(sums[piece * kPieceTokens / 2 + i]);
      scale(own);
      store(own);
    }
  }
  /// The same with little code: the piece that is finished is always in the first registers, the others move
  /// on.
  template <class AllSums, class Store>
  __device__ __forceinline__ void finish_pieces_in_turn(AllSums& sums, Store&& store) {
    constexpr int each = kPieceTokens / 2;
#pragma unroll 1
    for (; first_ < tile_.count; first_ += kPieceTokens) {
      Sums own;
#pragma unroll
      for (int i = 0; i < each; ++i) own[i] = static_cast<float>(sums[i]);
#pragma unroll
      for (int i = 0; i < T::tokens / 2 - each; ++i) sums[i] = sums[i + each];
      scale(own);
      store(own);
    }
  }

  /// Tokens of a piece from this lane's one on that an item has; none of a row that the matrix lacks.
  __device__ __forceinline__ int tokens_left(int token, int row) const {
    return row < args_.rows ? tile_.count - first_ - token : 0;
  }

  __device__ __forceinline__ void load_factors(const float (&unit)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factors_[r] = unit[r] * static_cast<float>(1 << decoded_power<T::P, T::M>());
      if constexpr (T::P.row_scale)
        factors_[r] *= reinterpret_cast<const float*>(
            args_.weights + tile_.expert * args_.expert_stride)[unit_ * kUnitRows + lane_ / 4 + 8 * r];
      const float* from = gate_up_ && r == 1 ? args_.up_bias : args_.bias;
      const int row = row_ + (gate_up_ ? 0 : 8 * r);
      bias_[r] = from != nullptr && row < args_.rows
                     ? from[static_cast<std::int64_t>(tile_.expert) * args_.rows + row]
                     : 0.0f;
    }
  }
  __device__ __forceinline__ void scale(Sums& sums) const {
    if (x_scales_ != nullptr) {
      const float* x_scales = x_scales_ + first_ + token_;
      const int left = tile_.count - first_;
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        const float2 x = 8 * i < left ? *reinterpret_cast<const float2*>(x_scales + 8 * i) : float2{};
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

  /// Gates and ups to channels, in the places of gates.
  __device__ __forceinline__ void apply_swiglu(Sums& sums) const {
    const Activation& by = args_.activation;
    const float power = -1.44269504f * by.alpha;
#pragma unroll
    for (int i = 0; i < kPieceTokens / 4; ++i) {
      float& gate = sums[i / 2 * 4 + i % 2];
      const float g = min_or_nan(gate, by.limit),
                  up = max_or_nan(min_or_nan(sums[i / 2 * 4 + 2 + i % 2], by.limit), -by.limit);
      gate = g * reciprocal(1.0f + power_of_two(power * g)) * (up + by.beta);
    }
  }
  __device__ __forceinline__ void apply_geglu(Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kPieceTokens / 4; ++i) {
      float& gate = sums[i / 2 * 4 + i % 2];
      gate = activate(args_.activation, gate, sums[i / 2 * 4 + 2 + i % 2]);
    }
  }

  /// f32, in rows of channels.
  __device__ __forceinline__ void store_channels(const Sums& sums) const {
    const int left = tokens_left(token_, row_);
    auto* out = static_cast<float*>(args_.out) + (tile_.first + first_ + token_) * args_.out_stride + row_;
#pragma unroll
    for (int i = 0; i < kEights; ++i, out += 8 * args_.out_stride)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c < left) out[c * args_.out_stride] = sums[4 * i + c];
  }

  /// Where a slot's rows are.
  __device__ __forceinline__ std::int64_t place(int slot) const {
    return tile_.expert * args_.part_out + slot * args_.out_stride;
  }

  /// Both rows, as they are.
  template <class Out, class Convert>
  __device__ __forceinline__ void store_rows(const Sums& sums, Convert&& convert) const {
    const int left = tokens_left(token_, row_), left_below = tokens_left(token_, row_ + 8);
    auto* out = static_cast<Out*>(args_.out) + place(tile_.first + first_ + token_) + row_;
#pragma unroll
    for (int i = 0; i < kEights; ++i, out += 8 * args_.out_stride)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (8 * i + c < left) out[c * args_.out_stride] = convert(sums[4 * i + c]);
        if (8 * i + c < left_below) out[c * args_.out_stride + 8] = convert(sums[4 * i + 2 + c]);
      }
  }

  /// Two tokens of this lane's row and those of its neighbour's become two rows of one: token_ + odd_.
  __device__ __forceinline__ std::uint32_t exchange(std::uint32_t tokens) const {
    return __byte_perm(tokens, __shfl_xor_sync(~0u, tokens, 4), odd_ == 0 ? 0x5410 : 0x3276);
  }
  static __device__ __forceinline__ std::uint32_t narrow_both(float low, float high, bool bf16) {
    std::uint32_t pair;
    if (bf16)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }

  /// 16 bits, in tiles; channels that the matrix lacks are 0.
  __device__ __forceinline__ void store_in_tiles(const Sums& sums) const {
    constexpr PackedFormat P = T::P;
    const bool bf16 = args_.out_dtype == DType::bf16, zero = row_ >= args_.rows;
    const int channel = row_ - odd_, token = first_ + token_ + odd_, left = tile_.count - token;
    const auto word_of = [&](int k) {
      return reinterpret_cast<std::uint32_t*>(
          static_cast<std::uint16_t*>(args_.out) +
          tile_position(args_.out_tile_rows, tile_.row + token, P.position(k)));
    };
    constexpr int eight = 8 * 64 / 2;  // rows, in words
    std::uint32_t* out = word_of(channel);
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const std::uint32_t word = exchange(zero ? 0 : narrow_both(sums[4 * i], sums[4 * i + 1], bf16));
      if (8 * i < left) out[i * eight] = word;
    }
    // The last unit's lanes fill rows up to their stride, which is a multiple of what down reads.
    if (unit_ + 1 < args_.groups * kGroupUnits) return;
#pragma unroll 1
    for (int pad = channel + 8; pad < args_.out_stride; pad += 8) {
      out = word_of(pad);
#pragma unroll 1
      for (int at = 0; at < left; at += 8, out += eight) *out = 0;
    }
  }

  /// 16 bits: lanes of four rows exchange further, so that each has four neighbours of the first rows or of
  /// the second ones.
  __device__ __forceinline__ void store_narrow_rows(const Sums& sums) const {
    const bool bf16 = args_.out_dtype == DType::bf16, second = lane_ / 8 % 2 != 0;
    const int row = row_ / 4 * 4 + (second ? 8 : 0), token = first_ + token_ + odd_,
              left = tile_.count - token;
    auto* out = static_cast<std::uint16_t*>(args_.out) + place(tile_.first + token) + row;
#pragma unroll
    for (int i = 0; i < kEights; ++i, out += 8 * args_.out_stride) {
      const std::uint32_t low = exchange(narrow_both(sums[4 * i], sums[4 * i + 1], bf16)),
                          high = exchange(narrow_both(sums[4 * i + 2], sums[4 * i + 3], bf16));
      const std::uint32_t other = __shfl_xor_sync(~0u, second ? low : high, 8);
      const uint2 four = second ? uint2{other, high} : uint2{low, other};
      if (8 * i < left) store_8_bytes(out, four);
    }
  }

  const GemmArgs& args_;
  const Tile& tile_;
  const float* x_scales_;
  bool gate_up_;
  int lane_, unit_, row_;  ///< row_: of the matrix, the first row, or the channel
  int token_, odd_;        ///< of 8 tokens, the first of this lane's two; whether the row is an odd one
  int first_ = 0;          ///< token of the piece
  float factors_[2], bias_[2];
};

/// There is one end for all kinds of tiles: a lane's sums of the tokens that an item lacks are anything.
/// Those of the unit that is finished are always in the first registers.
template <class T>
__device__ __forceinline__ void finish_tile(const GemmArgs& args, const Tile& tile, const float* x_scales,
                                            TileResult<T>& result) {
#pragma unroll 1
  for (int u = 0; u < T::units; ++u) {
    LaneRows<T> rows(args, tile, x_scales, u);
    if (!rows.there()) return;  // nor are the others
    rows.finish(result[0]);
    if constexpr (T::units > 1) result[0] = result[1];
  }
}

}  // namespace gatefold::cuda
