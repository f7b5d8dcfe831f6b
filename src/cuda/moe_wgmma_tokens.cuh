#pragma once
/// \file
/// What warpgroups of moe_wgmma.cuh multiply in 8 bits where scales of weights and of activations belong to
/// records, and one of weights to many rows: tokens are the rows of a multiply, weights its columns, both as
/// they lie in shared memory. Sums of a record, which is multiplied by itself (wgmma_bytes.cuh), then become
/// part of the others by one multiply-add each: its factor is one of four numbers, of two tokens by gates and
/// ups. (Where tokens are columns, as in moe_wgmma_rows.cuh, each sum has another one, and there are as many
/// multiplies of scales.)
///
/// A warpgroup has 64 of an item's tokens, by the rows of a tile, a piece of them after the other; where an
/// item has none for it, it only keeps step. While the last piece of a record is multiplied, it waits for the
/// next one and loads its scales.

#include "cuda/moe_wgmma.cuh"
#include "cuda/moe_wgmma_bytes_ring.cuh"
#include "cuda/rounding.cuh"
#include "cuda/wgmma_bytes.cuh"

namespace gatefold::cuda {

/// What a lane has of tokens lane / 4 and + 8 of its warp: sums 4 i and + 1 are the first token's by rows 8 i
/// + lane % 4 * 2 and + 1 of the tile, sums 4 i + 2 and + 3 the second one's.
template <class T>
requires(T::token_rows) struct UnitResult<T> {
  float sums[T::pieces * kPieceRows / 2];
};

/// Sums of 64 tokens by a piece of rows, of a record.
struct PieceSums {
  float part[kPieceRows / 2];

  /// Begins to multiply it.
  __device__ __forceinline__ void multiply(Descriptor tokens, Descriptor rows) {
    begin_multiplies();
    RowsWgmma<kPieceRows>::run<false>(part, tokens, rows);
#pragma unroll
    for (int k = 32; k < kRecordColumns; k += 32)
      RowsWgmma<kPieceRows>::run<true>(part, add_bytes(tokens, k), add_bytes(rows, k));
    commit_multiplies();
  }
  /// Adds them to others, when multiplies are done. scales: of both tokens, by rows 0 to 7 of units and by
  /// rows 8 to 15.
  __device__ __forceinline__ void add_to(float* sums, const float (&scales)[2][2]) {
    wait_for_multiplies<0>();
    take_sums(part);
#pragma unroll
    for (int i = 0; i < kPieceRows / 2; ++i) sums[i] = fmaf(part[i], scales[i / 2 % 2][i / 4 % 2], sums[i]);
  }
};

/// A tile. Its first stage of weights is there.
template <class T>
requires(T::token_rows) __device__ __forceinline__ Tile
    multiply_tile_of(const GemmChain& chain, const Tile& next, const WarpgroupRing<T>& ring,
                     const RingBarriers<T>& barriers, Places& at, std::byte* memory, TileResult<T>& result) {
  using S = Stages<T>;
  const GemmArgs& args = chain.of[0];
  static_assert(S::weights == S::inputs && T::steps == 1);  // a step has the same place in both rings
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            first_token = same_in_warp(warp / 4) * kWarpgroupTokens;
  const std::uint32_t base = shared_address(memory);
  // Of stage 0.
  const std::uint32_t tokens = add_bytes(swizzled_rows(base), first_token * kRecordColumns),
                      rows = add_bytes(swizzled_rows(base), S::weights_at),
                      token_scales = kept(base + S::scales_at + (warp * kWarpTokens + lane / 4) * 4),
                      row_scales = kept(base + S::weights_at + T::extras_at);
  StagePlace place = at.inputs;
  const auto wait_for = [&](const StagePlace& stage) {
    const std::uint32_t full = barriers.weights_full + stage.index * 8;
    wait_barrier(full, stage.parity);
    wait_barrier(full + barriers.inputs_after, stage.parity);
  };
  const auto release = [&](const StagePlace& stage) {
    const std::uint32_t full = barriers.weights_full + stage.index * 8;
    __syncwarp();
    barriers.release_inputs(args, full + barriers.inputs_after);
    if (lane == 0) arrive(full + barriers.empty);
  };
  auto& sums = result[0].sums;
#pragma unroll
  for (float& sum : sums) sum = 0;
  PieceSums of_record;
  const auto multiply = [&](int piece) {
    const int index = same_in_warp(place.index);
    of_record.multiply(
        descriptor(add_bytes(tokens, index * S::input_bytes)),
        descriptor(add_bytes(rows, index * T::weight_bytes + piece * (kPieceRows * kRecordColumns))));
  };
  float of_tokens[2];
  float2 of_rows[T::pieces];
  const auto load_scales = [&] {
#pragma unroll
    for (int t = 0; t < 2; ++t) of_tokens[t] = load_f32(token_scales + place.index * S::input_bytes + t * 32);
#pragma unroll
    for (int piece = 0; piece < T::pieces; ++piece)
      of_rows[piece] = load_two_f32(row_scales + place.index * T::weight_bytes +
                                    piece * (kPieceGroups * T::group_extra_bytes));
  };
  wait_for(place);
  if (first_token >= next.count) {
#pragma unroll 1
    for (int left = args.steps; --left > 0; wait_for(place)) {
      release(place);
      place.advance(S::weights);
    }
  } else {
    load_scales();
    multiply(0);
#pragma unroll 1
    for (int left = args.steps;;) {
      float scales[T::pieces][2][2];
#pragma unroll
      for (int i = 0; i < T::pieces * 2; ++i) {
        scales[i / 2][i % 2][0] = of_tokens[i % 2] * of_rows[i / 2].x;
        scales[i / 2][i % 2][1] = of_tokens[i % 2] * of_rows[i / 2].y;
      }
#pragma unroll
      for (int piece = 0; piece + 1 < T::pieces; ++piece) {
        of_record.add_to(sums + piece * (kPieceRows / 2), scales[piece]);
        multiply(piece + 1);
      }
      const StagePlace last = place;
      const bool more = --left > 0;
      if (more) {  // without a branch the compiler would wait for the multiplies first
        place.advance(S::weights);
        wait_for(place);
        load_scales();
      }
      of_record.add_to(sums + (T::pieces - 1) * (kPieceRows / 2), scales[T::pieces - 1]);
      if (!more) break;
      release(last);
      multiply(0);
    }
  }
  const Tile tile = read_by_lane_0(ring.tiles[place.index]);  // again: it took no registers meanwhile
  release(place);
  place.advance(S::weights);
  at = {place, place};
  return tile;
}

/// What a warp finishes of a tile: its tokens by chunks of rows, two units each. A lane's sums are as in
/// UnitResult, of four blocks of 8 rows: of gates, ups, gates, ups; or of rows of down.
template <class T>
class WarpTokens {
 public:
  static constexpr int kRows = kGroupUnits * kUnitRows, kChunks = T::groups, kBlocks = kRows / 8;
  using Sums = float[kRows / 2];

  /// row_scales: of the tile's rows of weights.
  __device__ __forceinline__ WarpTokens(const GemmArgs& args, const Tile& tile, const float* row_scales,
                                        std::byte* memory)
      : args_(args), tile_(tile), row_scales_(row_scales), gate_up_(args.kind == GemmKind::gate_up) {
    const unsigned thread = static_cast<unsigned>(thread_again());
    lane_ = thread % 32;
    first_token_ = thread / 32 * kWarpTokens;
    row_ = lane_ % 4 * 2;
    shared_ = memory + Stages<T>::ends_at + thread / 32 * (kWarpTokens * kRows * 2);
  }

  /// Sums become results, which are stored: what gate and up leave is codes, or f32 that is rounded later.
  __device__ __forceinline__ void finish(UnitResult<T>& result) {
    if (first_token_ >= tile_.count) return;
    if (!gate_up_) return finish_rows(result);
    if constexpr (T::rounds_channels)
      round_channels(result);
    else
      finish_channels(result);
  }

 private:
  /// So many numbers lie at multiples of their bytes, and rows that the matrix lacks do not share them.
  __device__ __forceinline__ bool whole(int numbers, int bytes) const {
    return args_.rows % numbers == 0 && args_.out_stride % numbers == 0 &&
           reinterpret_cast<std::uintptr_t>(args_.out) % bytes == 0;
  }
  __device__ __forceinline__ void finish_rows(UnitResult<T>& result) {
    const bool f32 = args_.out_dtype == DType::f32, bf16 = args_.out_dtype == DType::bf16;
    if (f32 && whole(2, 8))
      finish_chunks(result, [&](Sums& own) { store_pairs<1>(own); });
    else if (!f32 && whole(8, 16))
      finish_chunks(result, [&](Sums& own) { store_narrow_rows(own); });
    else
      finish_chunks_in_turn(result, [&](Sums& own) {
        f32 ? store_one_by_one<float, 1>(own, [](float x) { return x; })
            : store_one_by_one<std::uint16_t, 1>(own, [&](float x) { return narrow(x, bf16); });
      });
  }
  __device__ __forceinline__ void finish_channels(UnitResult<T>& result) {
    if (whole(2, 8) && !is_geglu(args_.activation))
      for_all_swiglu(result, [&](Sums& own) { store_pairs<2>(own); });
    else
      for_all_in_turn(result, [&](Sums& own) { store_one_by_one<float, 2>(own, [](float x) { return x; }); });
  }

  /// Channels of a tile, a record of each token, become codes.
  __device__ __forceinline__ void round_channels(UnitResult<T>& result) {
    const auto leave = [](Sums&) {};
    is_geglu(args_.activation) ? for_all_in_turn(result, leave) : for_all_swiglu(result, leave);
    constexpr int kEights = kRecordColumns / 8;
    Elements<formats::f32, kEights * 2> channels[2];  // of both tokens, of each 8 channels this lane's two
#pragma unroll
    for (int i = 0; i < kEights * 4; ++i) {
      const int eight = i / 4, c = i % 2, channel = tile_.first_group * (kRows / 2) + eight * 8 + row_ + c;
      // Two blocks of a tile, gates and ups, are 8 channels.
      const float x = result.sums[eight * 8 + i % 4];
      channels[i % 4 / 2].words[eight * 2 + c] = channel < args_.rows ? __float_as_uint(x) : 0;
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const auto range = channels[t].range();
      const float amax = group_max<4>(range.amax);
      const auto factors = GroupFactors::of<RoundedTo<T>>({}, amax);
      const FastDivider divider(factors.divisor);
      std::uint32_t words[4][2];
      if (__all_sync(~0u, !has_token(t) || (range.finite && divider.fits(amax))))
        encode_pairs(channels[t], divider, words);
      else
        encode_pairs(channels[t], AnyDivider(factors.divisor), words);
      uint4 pieces[2];
      bring_together(words, pieces);
      if (!has_token(t)) continue;
      const std::int64_t row =
          tile_.first_group * (kRows / 2) / kRecordColumns * static_cast<std::int64_t>(args_.out_tile_rows) +
          tile_.row + first_token_ + lane_ / 4 + 8 * t;
      auto* const out = static_cast<uint4*>(args_.out) + row * (kRecordColumns / 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) out[(lane_ % 4 * 2 + i) ^ lane_ / 4] = pieces[i];
      if (lane_ % 4 == 0) args_.out_scales[row] = factors.record;
    }
  }
  /// Quotients of 2 of each 8 channels as codes: words[q][i] are of channels 64 i + 8 q on and 32 further.
  template <class Divider>
  static __device__ __forceinline__ void encode_pairs(
      const Elements<formats::f32, kRecordColumns / 4>& channels, const Divider& divider,
      std::uint32_t (&words)[4][2]) {
    const auto pair = [&](int eight) {
      return encode_pair<RoundedTo<T>::operand.value>(divider.quotient(channels[2 * eight]),
                                                      divider.quotient(channels[2 * eight + 1]));
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int eight = i % 2 * 8 + i / 2;
      words[i / 2][i % 2] = pair(eight) | pair(eight + 4) << 16;
    }
  }
  /// By 4 lanes: of those words lane q gets all that have its q, in the order of records of 8 bits (Store).
  __device__ __forceinline__ void bring_together(const std::uint32_t (&words)[4][2],
                                                 uint4 (&pieces)[2]) const {
    static_assert(byte_order(T::P) == 0x75643120 && !T::P.folded);
    const bool odd = lane_ % 2 != 0, upper = lane_ % 4 >= 2;
    std::uint32_t fours[2][4];  // half of 8 channels each, of 32 i on
#pragma unroll
    for (int q = 0; q < 4; q += 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t own = odd ? words[q + 1][i] : words[q][i],
                            other = __shfl_xor_sync(~0u, odd ? words[q][i] : words[q + 1][i], 1);
        fours[q / 2][2 * i] = __byte_perm(own, other, odd ? 0x1504 : 0x5140);
        fours[q / 2][2 * i + 1] = __byte_perm(own, other, odd ? 0x3726 : 0x7362);
      }
    std::uint32_t halves[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t own = upper ? fours[1][i] : fours[0][i],
                          other = __shfl_xor_sync(~0u, upper ? fours[0][i] : fours[1][i], 2);
      halves[i][0] = upper ? other : own;
      halves[i][1] = upper ? own : other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      pieces[i] = {halves[2 * i][0], halves[2 * i][1], halves[2 * i + 1][0], halves[2 * i + 1][1]};
  }

  /// Gates and ups become channels, in the places of gates, and then finish(sums).
  template <class Finish>
  __device__ __forceinline__ void for_all_swiglu(UnitResult<T>& result, Finish&& finish) {
    const Activation& by = args_.activation;
    if (is_plain_swiglu(by))
      finish_chunks(result, [&](Sums& own) {
        for_channels(own, [&](float gate, float up) { return swiglu<true>(by, gate, up); });
        finish(own);
      });
    else
      finish_chunks(result, [&](Sums& own) {
        for_channels(own, [&](float gate, float up) { return swiglu<false>(by, gate, up); });
        finish(own);
      });
  }
  /// The same of any activation, with little code.
  template <class Finish>
  __device__ __forceinline__ void for_all_in_turn(UnitResult<T>& result, Finish&& finish) {
    finish_chunks_in_turn(result, [&](Sums& own) {
      for_channels(own, [&](float gate, float up) { return activate(args_.activation, gate, up); });
      finish(own);
    });
  }
  /// finish(sums) may change them.
  template <class Finish>
  __device__ __forceinline__ void finish_chunks(UnitResult<T>& result, Finish&& finish) {
    constexpr int each = kRows / 2;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Sums own;
#pragma unroll
      for (int i = 0; i < each; ++i) own[i] = result.sums[chunk * each + i];
      finish_chunk(own, chunk, finish);
#pragma unroll
      for (int i = 0; i < each; ++i) result.sums[chunk * each + i] = own[i];
    }
  }
  /// The same with little code: the chunk that is finished is always in the first registers, and all move on.
  template <class Finish>
  __device__ __forceinline__ void finish_chunks_in_turn(UnitResult<T>& result, Finish&& finish) {
    constexpr int each = kRows / 2;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Sums own;
#pragma unroll
      for (int i = 0; i < each; ++i) own[i] = result.sums[i];
#pragma unroll
      for (int i = 0; i < (kChunks - 1) * each; ++i) result.sums[i] = result.sums[i + each];
      finish_chunk(own, chunk, finish);
#pragma unroll
      for (int i = 0; i < each; ++i) result.sums[(kChunks - 1) * each + i] = own[i];
    }
  }
  template <class Finish>
  __device__ __forceinline__ void finish_chunk(Sums& own, int chunk, Finish&& finish) {
    group_ = tile_.first_group + chunk;
    if (group_ >= args_.groups) return;
    if constexpr (T::P.row_scale) {
      const float* scales = row_scales_ + chunk * kRows + row_;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const auto both = *reinterpret_cast<const float2*>(scales + block * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) own[4 * block + i] *= i % 2 == 0 ? both.x : both.y;
      }
    }
    if (args_.bias != nullptr) add_bias(own, args_.bias, gate_up_ ? 2 : 1, 0);
    if (gate_up_ && args_.up_bias != nullptr) add_bias(own, args_.up_bias, 2, 1);
    finish(own);
  }
  /// To blocks first, first + step, ..
  __device__ __forceinline__ void add_bias(Sums& own, const float* bias, int step, int first) const {
    bias += static_cast<std::int64_t>(tile_.expert) * args_.rows;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block % step != first) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = row_of(block) + c;
        const float x = row < args_.rows ? bias[row] : 0.0f;
        own[4 * block + c] += x;
        own[4 * block + 2 + c] += x;
      }
    }
  }

  /// The first of this lane's two rows of a block of the chunk: of the matrix, or of the channels.
  __device__ __forceinline__ int row_of(int block) const {
    return (gate_up_ ? group_ * (kBlocks / 2) + block / 2 : group_ * kBlocks + block) * 8 + row_;
  }

  /// Gates and ups to channels, in the places of gates.
  template <class Activate>
  __device__ __forceinline__ void for_channels(Sums& sums, Activate&& activate) const {
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[4 * block + i] = activate(sums[4 * block + i], sums[4 * block + 4 + i]);
  }

  __device__ __forceinline__ bool has_token(int t) const {
    return first_token_ + lane_ / 4 + 8 * t < tile_.count;
  }
  /// Rows of this lane's token.
  template <class Out>
  __device__ __forceinline__ Out* out_of(int token) const {
    return static_cast<Out*>(args_.out) + (tile_.first + first_token_ + token) * args_.out_stride;
  }

  /// f32, of every block or every second one.
  template <int kStep>
  __device__ __forceinline__ void store_pairs(const Sums& sums) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (!has_token(t)) return;
      auto* out = out_of<float>(lane_ / 4 + 8 * t);
#pragma unroll
      for (int block = 0; block < kBlocks; block += kStep)
        if (const int row = row_of(block); row < args_.rows)
          *reinterpret_cast<float2*>(out + row) = {sums[4 * block + 2 * t], sums[4 * block + 2 * t + 1]};
    }
  }
  template <class Out, int kStep, class Convert>
  __device__ __forceinline__ void store_one_by_one(const Sums& sums, Convert&& convert) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (!has_token(t)) return;
      auto* out = out_of<Out>(lane_ / 4 + 8 * t);
#pragma unroll
      for (int i = 0; i < kBlocks / kStep * 2; ++i) {
        const int block = i / 2 * kStep, row = row_of(block) + i % 2;
        if (row < args_.rows) out[row] = convert(sums[4 * block + 2 * t + i % 2]);
      }
    }
  }

  /// 16 bits of a chunk: four times 16 bytes of a token, of which lanes put together two rows each. Where
  /// they lie: those of neighbouring tokens are in different banks.
  __device__ __forceinline__ std::byte* in_shared(int token, int sixteen) const {
    return shared_ + token * (kRows * 2) + (sixteen ^ token / 2 % 4) * 16;
  }
  __device__ __forceinline__ void store_narrow_rows(const Sums& sums) const {
    const bool bf16 = args_.out_dtype == DType::bf16;
    __syncwarp();  // the chunk before has been read
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = narrow_pair(sums[4 * block + 2 * i], sums[4 * block + 2 * i + 1], bf16);
      store_matrices(in_shared(lane_ % 16, block + lane_ / 16), pairs);
    }
    __syncwarp();
    const int sixteen = lane_ % 4, token = lane_ / 4, row = group_ * kRows + sixteen * 8;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const auto words = *reinterpret_cast<const uint4*>(in_shared(token + 8 * t, sixteen));
      if (has_token(t) && row < args_.rows)
        *reinterpret_cast<uint4*>(out_of<std::uint16_t>(token + 8 * t) + row) = words;
    }
  }

  const GemmArgs& args_;
  const Tile& tile_;
  const float* row_scales_;
  bool gate_up_;
  std::byte* shared_;  ///< of this warp: a chunk of its tokens, in 16 bits
  int lane_, first_token_;
  int row_;        ///< of a block, the first of this lane's two
  int group_ = 0;  ///< of units: the chunk
};

template <class T>
requires(T::token_rows) __device__ __forceinline__
    void finish_tile(const GemmArgs& args, const Tile& tile, const EndScales& scales, std::byte* memory,
                     TileResult<T>& result) {
  WarpTokens<T>(args, tile, scales.rows, memory).finish(result[0]);
}

}  // namespace gatefold::cuda
