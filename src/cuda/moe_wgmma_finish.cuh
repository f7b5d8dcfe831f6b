#pragma once
/// \file
/// What follows the multiply of a tile (moe_wgmma.cuh): scales, biases, activation. All of it happens in the
/// registers of the lanes that have the sums: a unit's rows lane / 4 and + 8, which are a channel's gate and
/// up, by two tokens of each 8. Nothing waits for memory, and there are no branches between tokens, so that
/// what is done for one of them hides the latency of another. Rows of 16 bits go through shared memory, where
/// a warpgroup puts together what it has of a token, 128 bytes; other results go straight from registers,
/// those in tiles after lanes of neighbouring rows have exchanged one of both tokens.

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

/// As activate_swiglu, in fewer instructions.
__device__ __forceinline__ float swiglu(const Activation& by, float gate, float up) {
  const float g = min_or_nan(gate, by.limit), u = max_or_nan(min_or_nan(up, by.limit), -by.limit);
  return g * reciprocal(1.0f + power_of_two(-1.44269504f * by.alpha * g)) * (u + by.beta);
}

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

/// Scales of a tile's tokens, or nullptr; and of the rows of a warpgroup's weights, where they have been
/// copied.
struct EndScales {
  const float *tokens, *rows;
};

/// What an end reads of GemmArgs, by the same names. One multiply's are constants, which instructions read in
/// place. One of two multiplies' would be loaded where they are needed, one after the other: all are at once.
struct EndArgs {
  const std::byte* weights;
  std::int64_t expert_stride;
  std::int32_t groups, rows;
  GemmKind kind;
  Activation activation;
  const float *bias, *up_bias;
  void* out;
  std::int64_t out_stride, part_out;
  std::int32_t out_tile_rows;
  DType out_dtype;

  __device__ __forceinline__ explicit EndArgs(const GemmArgs& args)
      : weights(args.weights),
        expert_stride(args.expert_stride),
        groups(kept(args.groups)),
        rows(kept(args.rows)),
        kind(kept(args.kind)),
        activation{kept(args.activation.kind), kept(args.activation.alpha), kept(args.activation.beta),
                   kept(args.activation.limit)},
        bias(kept(args.bias)),
        up_bias(kept(args.up_bias)),
        out(kept(args.out)),
        out_stride(kept(args.out_stride)),
        part_out(kept(args.part_out)),
        out_tile_rows(kept(args.out_tile_rows)),
        out_dtype(kept(args.out_dtype)) {}
};

/// What a lane finishes of a unit, by pieces of an item's tokens: sums 4 i and + 1 are the first row's by
/// tokens 8 i + token_ and + 1, sums 4 i + 2 and + 3 the second one's.
template <class T>
class LaneRows {
 public:
  using Sums = float[kPieceTokens / 2];

  __device__ __forceinline__ LaneRows(const GemmArgs& args, const Tile& tile, const EndScales& scales,
                                      std::byte* memory, int of_warp)
      : args_(args),
        tile_(tile),
        scales_{scales.tokens, scales.rows + (T::bytes ? of_warp * kWarpgroupRows : 0)},
        gate_up_(args.kind == GemmKind::gate_up) {
    const int thread = thread_again();
    thread_ = thread % 128;
    lane_ = thread % 32;
    first_unit_ = tile.first_group * kGroupUnits + thread / 128 * 4 * T::units + 4 * of_warp;
    unit_ = first_unit_ + thread_ / 32;
    row_ = unit_ * unit_rows() + lane_ / 4;
    token_ = lane_ % 4 * 2;
    odd_ = lane_ / 4 % 2;
    shared_ = memory + Stages<T>::ends_at + thread / 128 * (T::end_tokens * kEndBytes);
  }
  /// Whether any warp of this warpgroup has a unit of the matrix.
  __device__ __forceinline__ bool any_there() const { return first_unit_ < units(); }

  /// Sums become results, which are stored; by a warpgroup's warps together.
  __device__ __forceinline__ void finish(UnitResult<T>& result) {
    auto& sums = result.sums;
    load_factors(result.unit);
    const bool f32 = args_.out_dtype == DType::f32;
    const Activation::Kind kind = args_.activation.kind;
    const bool in_tiles = args_.out_tile_rows != 0,
               geglu = kind == Activation::Kind::geglu || kind == Activation::Kind::geglu_tanh;
    // 16 bytes lie at multiples of 16, and rows that the matrix lacks do not share them with others.
    const bool whole = args_.rows % 8 == 0 && args_.out_stride % 8 == 0 && args_.part_out % 8 == 0 &&
                       reinterpret_cast<std::uintptr_t>(args_.out) % 16 == 0;
    if (whole && !gate_up_ && !f32) return finish_pieces(sums, [&](Sums& own) { store_narrow_rows(own); });
    if (unit_ >= units()) return;
    if (!gate_up_) {
      if (f32)
        finish_pieces(sums, [&](Sums& own) { store_rows<float>(own, [](float x) { return x; }); });
      else
        finish_pieces_in_turn(sums, [&](Sums& own) {
          store_rows<std::uint16_t>(own, [&](float x) { return narrow(x, args_.out_dtype == DType::bf16); });
        });
      return;
    }
    if (geglu)
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
  static constexpr int kEights = kPieceTokens / 8, kPieces = UnitResult<T>::pieces;

  __device__ __forceinline__ int units() const { return args_.groups * kGroupUnits; }
  __device__ __forceinline__ int unit_rows() const { return gate_up_ ? kUnitRows / 2 : kUnitRows; }

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
      for (int i = 0; i < (kPieces - 1) * each; ++i) sums[i] = sums[i + each];
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
      factors_[r] = unit[r] * sum_scale<T::P, T::M>();
      if (T::P.row_scale && unit_ < units()) {
        const float* scales = scales_.rows;
        if constexpr (!T::bytes)
          scales = reinterpret_cast<const float*>(args_.weights + tile_.expert * args_.expert_stride) +
                   first_unit_ * kUnitRows;
        factors_[r] *= scales[thread_ / 32 * kUnitRows + lane_ / 4 + 8 * r];
      }
      const float* from = gate_up_ && r == 1 ? args_.up_bias : args_.bias;
      const int row = row_ + (gate_up_ ? 0 : 8 * r);
      bias_[r] = from != nullptr && row < args_.rows
                     ? from[static_cast<std::int64_t>(tile_.expert) * args_.rows + row]
                     : 0.0f;
    }
  }
  __device__ __forceinline__ void scale(Sums& sums) const {
    if (scales_.tokens != nullptr) {
      const float* x_scales = scales_.tokens + first_ + token_;
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
#pragma unroll
    for (int i = 0; i < kPieceTokens / 4; ++i) {
      float& gate = sums[i / 2 * 4 + i % 2];
      gate = swiglu(args_.activation, gate, sums[i / 2 * 4 + 2 + i % 2]);
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
  /// 16 bits, in tiles, as down takes them; channels that the matrix lacks are 0.
  __device__ __forceinline__ void store_in_tiles(const Sums& sums) const {
    constexpr PackedFormat P = T::P;
    constexpr float larger = input_scale<T::P, T::M>();
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
      const std::uint32_t word =
          exchange(zero ? 0 : narrow_pair(sums[4 * i] * larger, sums[4 * i + 1] * larger, bf16));
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

  /// Where 16 bytes of a token lie: neighbouring tokens' are in different banks.
  __device__ __forceinline__ std::byte* in_shared(int token, int sixteen) const {
    return shared_ + token * kEndBytes + (sixteen ^ token % 8) * 16;
  }
  static __device__ __forceinline__ void sync_warpgroup() {
    sync_threads<128>(1 + threadIdx.x / 128);
  }

  /// 16 bits, of a warpgroup, as many tokens at a time as there is room for.
  __device__ __forceinline__ void store_narrow_rows(const Sums& sums) const {
    const bool bf16 = args_.out_dtype == DType::bf16;
    const int sixteen = thread_ % 8, row = first_unit_ * kUnitRows + sixteen * 8,
              left = row < args_.rows ? tile_.count - first_ : 0;
    auto* out = static_cast<std::uint16_t*>(args_.out) + place(tile_.first + first_ + thread_ / 8) + row;
#pragma unroll
    for (int begin = 0; begin < kPieceTokens; begin += T::end_tokens) {
      sync_warpgroup();  // the tokens before have been read
#pragma unroll
      for (int i = 0; i < T::end_tokens; i += 16) {
        std::uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = (begin + i) / 2 + 2 * j;
          pairs[j] = narrow_pair(sums[at], sums[at + 1], bf16);
        }
        store_transposed(in_shared(i + lane_ / 16 * 8 + lane_ % 8, thread_ / 32 * 2 + lane_ / 8 % 2), pairs);
      }
      sync_warpgroup();
#pragma unroll
      for (int i = 0; i < T::end_tokens; i += 16, out += 16 * args_.out_stride) {
        const auto words = *reinterpret_cast<const uint4*>(in_shared(i + thread_ / 8, sixteen));
        if (begin + i + thread_ / 8 < left) *reinterpret_cast<uint4*>(out) = words;
      }
    }
  }

  const std::conditional_t<chains<T>, EndArgs, const GemmArgs&> args_;
  const Tile& tile_;
  const EndScales scales_;
  bool gate_up_;
  std::byte* shared_;      ///< of this warpgroup: end_tokens * kEndBytes
  int thread_, lane_;      ///< of the warpgroup, and of the warp
  int first_unit_, unit_;  ///< of the warpgroup's four warps, and of this one
  int row_;                ///< of the matrix, the first row, or the channel
  int token_, odd_;        ///< of 8 tokens, the first of this lane's two; whether the row is an odd one
  int first_ = 0;          ///< token of the piece
  float factors_[2], bias_[2];
};

/// There is one end for all kinds of tiles: a lane's sums of the tokens that an item lacks are anything.
/// Those of the unit that is finished are always in the first registers.
template <class T>
__device__ __forceinline__ void finish_tile(const GemmArgs& args, const Tile& tile, const EndScales& scales,
                                            std::byte* memory, TileResult<T>& result) {
#pragma unroll 1
  for (int u = 0; u < T::units; ++u) {
    LaneRows<T> rows(args, tile, scales, memory, u);
    if (!rows.any_there()) return;  // nor are the others
    rows.finish(result[0]);
    if constexpr (T::units > 1) result[0] = result[1];
  }
}

}  // namespace gatefold::cuda
