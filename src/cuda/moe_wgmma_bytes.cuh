#pragma once
/// \file
/// What warpgroups of moe_wgmma.cuh multiply in 8 bits: weights of 4 bits, decoded to bytes, by activations'
/// codes.
///
/// A record is four multiplies of 32 columns by a piece of the tokens. Sums of e4m3 products lose bits as
/// they grow (wgmma_bytes.cuh), and scales belong to records: so a record's sums are kept by themselves, and
/// become part of the others in f32, times the scales of their columns, while other warpgroups multiply.

#include <type_traits>

#include "cuda/moe_wgmma.cuh"
#include "cuda/moe_wgmma_bytes_ring.cuh"
#include "cuda/wgmma_bytes.cuh"

namespace gatefold::cuda {

/// The sums of N tokens by the rows of a unit, and those of a record by a piece of the tokens: of half of
/// them, where registers do not hold all.
template <class T, int N>
struct ByteSums {
  static constexpr int pieces = N > 96 ? 2 : 1, piece = N / pieces;
  float sums[N / 2];
  std::conditional_t<T::M == formats::int8, std::int32_t, float> part[piece / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& sum : sums) sum = 0;
  }

  /// Adds the sums of a record, whose multiplies are done, to those of the tokens from `first` on. x_scales:
  /// of this lane's columns of B.
  __device__ __forceinline__ void add_part(int first, const RecordScales<T::P>& scales,
                                           const float* x_scales) {
    take_sums(part);
    constexpr float unit = T::M == formats::int8 ? 0x1p-4f : 1.0f;  // int4 is decoded to 16 times its value
    const float of_rows[2] = {scales.scale(0, 0) * unit, scales.scale(0, 1) * unit};
#pragma unroll
    for (int i = 0; i < piece / 2; ++i) {
      float scale = of_rows[i / 2 % 2];
      if constexpr (T::record_scales) scale *= x_scales[first + i / 4 * 8 + i % 2];
      float& sum = sums[first / 2 + i];
      sum = fmaf(in_f32(part[i]), scale, sum);
    }
  }

 private:
  static __device__ __forceinline__ float in_f32(float x) {
    return x;
  }
  /// Sums of 128 products of int4 (times 16) and int8 are below 2^22: faster than a conversion.
  static __device__ __forceinline__ float in_f32(std::int32_t x) {
    return __int_as_float(x + 0x4b400000) - 0x1.8p23f;
  }
};

/// A of the multiplies of a record, decoded from the codes that a lane has, a line of them at a time.
template <class T>
struct ByteFragments {
  std::uint32_t a[kRecordColumns / 32][4];
  Codes<T::P, 2> codes;

  /// `record`: from this lane's first byte on. Blocks come one after the other.
  __device__ __forceinline__ void decode(const std::byte* record, int block) {
    if (block % 2 == 0) codes.load(record, block, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t row[2];
      decode8_bytes<T::P, T::M>(codes.row(block % 2, r), row);
      a[block][r] = row[0];
      a[block][2 + r] = row[1];
    }
#pragma unroll
    for (std::uint32_t& word : a[block])
      asm volatile("" : "+r"(word));  // not decoded later, among multiplies
  }
};

/// A tile of at most N tokens, in pieces. Its first stage of weights is there. Weights are decoded once for
/// all pieces, those of the next step while the last piece is multiplied.
template <class T, int N>
requires(T::bytes && !T::from_memory) __device__ __forceinline__ Tile
    multiply_tile(const GemmArgs& args, const WarpgroupRing<T>& ring, const RingBarriers<T>& barriers,
                  Places& at, std::byte* memory, TileResult<T>& result) {
  using S = Stages<T>;
  static_assert(T::parts);
  constexpr int kBlocks = kRecordColumns / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / kGroupUnits, unit = warp % kGroupUnits;
  const std::byte* const first_record =
      memory + S::weights_at + group * T::group_bytes + unit * T::record_bytes + lane * 16;
  const std::byte* record = first_record + at.weights.index * T::weight_bytes;
  ByteSums<T, N> to;
  to.clear();
  ByteFragments<T> fragments;
  const std::uint32_t all_columns = swizzled_rows(shared_address(memory));
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) fragments.decode(record, block);
#pragma unroll 1
  for (int step = 0, of_stage = 0;; ++step) {
    const std::byte* extra = record - lane * 16 +
                             (T::P.apart() ? T::extras_at + group * (T::group_extra_bytes - T::group_bytes) +
                                                 unit * (T::extra_stride - T::record_bytes) +
                                                 of_stage * (T::step_extra_bytes - T::step_bytes)
                                           : T::P.value_bytes());
    const RecordScales<T::P> scales(extra, lane);
    const std::byte* inputs = memory + at.inputs.index * S::input_bytes;
    const std::uint32_t columns = add_bytes(all_columns, at.inputs.index * S::input_bytes);
    const std::uint32_t inputs_full = barriers.inputs_full + at.inputs.index * 8;
    const float* x_scales = reinterpret_cast<const float*>(inputs + S::scales_at) + lane % 4 * 2;
    const bool last = step + 1 == args.steps;
    if (!last) {
      record += T::step_bytes;
      if (++of_stage == T::steps) {
        of_stage = 0;
        __syncwarp();
        if (lane == 0) arrive(barriers.weights_full + at.weights.index * 8 + barriers.empty);
        at.weights.advance(S::weights);
        record = first_record + at.weights.index * T::weight_bytes;
        wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
      }
    }
    wait_barrier(inputs_full, at.inputs.parity);
#pragma unroll
    for (int first = 0; first < N; first += to.piece) {
      begin_multiplies();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const std::uint32_t b = add_bytes(columns, first * kRecordColumns + block * 32);
        if (block == 0)
          ByteWgmma<to.piece>::template run<false>(to.part, fragments.a[block], b);
        else
          ByteWgmma<to.piece>::template run<true>(to.part, fragments.a[block], b);
        commit_multiplies();
      }
      if (first + to.piece == N) break;
      wait_for_multiplies<0>();
      to.add_part(first, scales, x_scales);
    }
    wait_for_multiplies<3>();
    fragments.decode(record, 0);
    wait_for_multiplies<2>();
    fragments.decode(record, 1);
    wait_for_multiplies<1>();
    fragments.decode(record, 2);
    wait_for_multiplies<0>();
    to.add_part(N - to.piece, scales, x_scales);
    __syncwarp();
    if (lane == 0) arrive(inputs_full + barriers.empty);
    fragments.decode(record, 3);
    at.inputs.advance(S::inputs);
    if (last) break;
  }
  const Tile tile = read_by_lane_0(ring.tiles[at.weights.index]);  // again: it took no registers meanwhile
  __syncwarp();
  if (lane == 0) arrive(barriers.weights_full + at.weights.index * 8 + barriers.empty);
  at.weights.advance(S::weights);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) result[0].sums[i] = to.sums[i];
  result[0].unit[0] = result[0].unit[1] = 1;
  return tile;
}

}  // namespace gatefold::cuda
