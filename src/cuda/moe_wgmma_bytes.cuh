#pragma once
/// \file
/// What warpgroups of moe_wgmma.cuh multiply in 8 bits: weights of 4 bits, decoded to bytes, by activations'
/// codes.
///
/// A record is four multiplies of 32 columns by a piece of the tokens. Where scales belong to records, a
/// record's sums are kept by themselves, and become part of the others in f32, times the scales of their
/// columns, while other warpgroups multiply. Where scales are folded, registers have room for items of twice
/// as many tokens, as all products are added to the same sums; those lose bits as they grow
/// (wgmma_bytes.cuh).

#include <type_traits>

#include "cuda/moe_wgmma.cuh"
#include "cuda/moe_wgmma_bytes_ring.cuh"
#include "cuda/wgmma_bytes.cuh"

namespace gatefold::cuda {

/// Sums of a record by a piece of N tokens, before they are f32.
template <class T, int N>
using PartSums = std::conditional_t<T::M == formats::int8, std::int32_t, float>[N / 2];

__device__ __forceinline__ float part_in_f32(float x) {
  return x;
}
/// Sums of 128 products of int4 (times 16) and int8 are below 2^22: faster than a conversion.
__device__ __forceinline__ float part_in_f32(std::int32_t x) {
  return __int_as_float(x + 0x4b400000) - 0x1.8p23f;
}

/// The scales of a record, for both of a lane's rows, of what is decoded.
template <class T>
struct PartScales {
  float rows[2];

  __device__ __forceinline__ PartScales(const std::byte* extra, int lane) {
    const RecordScales<T::P> scales(extra, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = scales.scale(0, r) * detail::power_of_two(byte_power(T::P, T::M));
  }
};

/// Adds the sums of a record, whose multiplies are done, to those of the tokens from kFirst on.
template <class T, int kFirst, int kPiece, int kSums>
__device__ __forceinline__ void add_part(float (&sums)[kSums], PartSums<T, kPiece>& part,
                                         const PartScales<T>& scales) {
  take_sums(part);
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    float& sum = sums[kFirst / 2 + i];
    sum = fmaf(part_in_f32(part[i]), scales.rows[i / 2 % 2], sum);
  }
}

/// A of the multiplies of a record, decoded from the codes that a lane has, a line of them at a time.
template <class T>
struct ByteFragments {
  std::uint32_t a[kRecordColumns / 32][4];
  Codes<T::P, 2> codes;
  ByteTable tables[2];  ///< of both rows

  /// `record`: from this lane's first byte on. Blocks come one after the other. `scales`: folded ones.
  __device__ __forceinline__ void decode(const std::byte* record, int block, std::uint32_t scales = 0,
                                         const ByteTable* all_tables = nullptr) {
    if (block % 2 == 0) {
      codes.load(record, block, 0);
      if constexpr (T::P.for_bytes)
#pragma unroll
        for (int r = 0; r < 2; ++r) tables[r] = all_tables[__byte_perm(scales, 0, 0x4440 + block + r)];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t row[2];
      decode8_bytes<T::P, T::M>(codes.row(block % 2, r), tables[r], row);
      a[block][r] = row[0];
      a[block][2 + r] = row[1];
    }
#pragma unroll
    for (std::uint32_t& word : a[block])
      asm volatile("" : "+r"(word));  // not decoded later, among multiplies
  }
};

/// Begins to multiply a record by a piece of tokens: its rows of shared memory from `columns` on.
template <class T, int kPiece>
__device__ __forceinline__ void multiply_part(PartSums<T, kPiece>& part, const ByteFragments<T>& fragments,
                                              std::uint32_t columns) {
  begin_multiplies();
#pragma unroll
  for (int block = 0; block < kRecordColumns / 32; ++block) {
    if (block == 0)
      ByteWgmma<kPiece>::template run<false>(part, fragments.a[block], columns);
    else
      ByteWgmma<kPiece>::template run<true>(part, fragments.a[block], add_bytes(columns, block * 32));
  }
  commit_multiplies();
}

/// Where the records and scales of this lane's unit are: from shared memory on, in stage 0 of the weights;
/// and from there to those of its other step.
template <class T>
struct UnitPlace {
  int record, extra;
  static constexpr int next_record = T::step_bytes,
                       next_extra = T::P.apart() ? T::step_extra_bytes : T::step_bytes;

  __device__ __forceinline__ UnitPlace() {
    const int warp = threadIdx.x / 32, group = warp / kGroupUnits, unit = warp % kGroupUnits;
    const int first = Stages<T>::weights_at + group * T::group_bytes + unit * T::record_bytes;
    record = first + threadIdx.x % 32 * 16;
    extra = T::P.apart()
                ? Stages<T>::weights_at + T::extras_at + group * T::group_extra_bytes + unit * T::extra_stride
                : first + T::P.value_bytes();
  }
};

/// This warp has read a stage of weights.
template <class T>
__device__ __forceinline__ void release_weights(const RingBarriers<T>& barriers, Places& at) {
  if (threadIdx.x % 32 == 0) arrive(barriers.weights_full + at.weights.index * 8 + barriers.empty);
  at.weights.advance(Stages<T>::weights);
}

/// Ends a tile, whose last stage of weights has been read.
template <class T, int kSums>
__device__ __forceinline__ Tile leave_tile(const WarpgroupRing<T>& ring, const RingBarriers<T>& barriers,
                                           Places& at, const float (&sums)[kSums], TileResult<T>& result) {
  const Tile tile = read_by_lane_0(ring.tiles[at.weights.index]);  // again: it took no registers meanwhile
  __syncwarp();
  release_weights<T>(barriers, at);
#pragma unroll
  for (int i = 0; i < kSums; ++i) result[0].sums[i] = sums[i];
  result[0].unit[0] = result[0].unit[1] = T::parts ? 1.0f : detail::power_of_two(byte_power(T::P, T::M));
  return tile;
}

/// A tile of at most N tokens, whose products are all added to the same sums. Its first stage of weights is
/// there. While a step is multiplied, weights of the next one are decoded.
template <class T, int N>
requires(T::bytes && !T::from_memory && !T::parts) __device__ __forceinline__ Tile
    multiply_tile(const GemmArgs& args, const WarpgroupRing<T>& ring, const RingBarriers<T>& barriers,
                  Places& at, std::byte* memory, TileResult<T>& result) {
  using S = Stages<T>;
  static_assert(T::steps == 2);
  constexpr int kBlocks = kRecordColumns / 32;
  const int lane = threadIdx.x % 32;
  const UnitPlace<T> place;
  const std::uint32_t all_columns = swizzled_rows(shared_address(memory));
  float sums[N / 2] = {};
  ByteFragments<T> fragments[2];
  const auto decode = [&](ByteFragments<T>& to, int of_stage) {
    const std::byte* const stage = memory + at.weights.index * T::weight_bytes;
    const RecordScales<T::P> scales(stage + place.extra + of_stage * place.next_extra, lane);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      to.decode(stage + place.record + of_stage * place.next_record, block, scales.words[0], ring.tables);
  };
  decode(fragments[0], 0);
  int left = args.steps;  // that are not multiplied
  std::uint32_t stage_columns = all_columns;
  // Step kStep of a stage of weights. Returns whether it was the last one of all.
  const auto multiply_step = [&]<int kStep>() {
    constexpr int kOfInputs = kStep % T::input_steps;
    if constexpr (kOfInputs == 0) {
      wait_barrier(barriers.inputs_full + at.inputs.index * 8, at.inputs.parity);
      stage_columns = add_bytes(all_columns, __shfl_sync(~0u, at.inputs.index * S::input_bytes, 0));
    }
    const std::uint32_t columns = add_bytes(stage_columns, kOfInputs * S::scales_at);
    begin_multiplies();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      ByteWgmma<N>::template run<true>(sums, fragments[kStep].a[block], add_bytes(columns, block * 32));
    commit_multiplies();
    const bool last = --left == 0;
    if (kStep == 1 && !last) {
      __syncwarp();
      release_weights<T>(barriers, at);
      wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
    }
    decode(fragments[1 - kStep], 1 - kStep);  // after the last step: anything
    wait_for_multiplies<0>();
    if (kOfInputs + 1 == T::input_steps || last) {
      __syncwarp();
      barriers.release_inputs(args, barriers.inputs_full + at.inputs.index * 8);
      at.inputs.advance(S::inputs);
    }
    return last;
  };
  while (!multiply_step.template operator()<0>() && !multiply_step.template operator()<1>()) {
  }
  take_sums(sums);
  return leave_tile<T>(ring, barriers, at, sums, result);
}

/// A tile of at most N tokens, in pieces. Its first stage of weights is there. While pieces are multiplied,
/// weights of the next step are decoded.
template <class T, int N>
requires(T::bytes && !T::from_memory && T::parts && T::many) __device__ __forceinline__ Tile
    multiply_tile(const GemmArgs& args, const WarpgroupRing<T>& ring, const RingBarriers<T>& barriers,
                  Places& at, std::byte* memory, TileResult<T>& result) {
  using S = Stages<T>;
  static_assert(!T::record_scales && T::steps == 2);
  constexpr int kBlocks = kRecordColumns / 32, kPieces = N <= 96 ? 1 : 2, kPiece = N / kPieces;
  const int lane = threadIdx.x % 32;
  const UnitPlace<T> place;
  const std::uint32_t all_columns = swizzled_rows(shared_address(memory));
  float sums[N / 2] = {};
  PartSums<T, kPiece> part;
  ByteFragments<T> fragments[2];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
    fragments[0].decode(memory + place.record + at.weights.index * T::weight_bytes, block);
  int left = args.steps;  // that are not multiplied
  // Step kStep of a stage of weights. Returns whether it was the last one of all.
  const auto multiply_step = [&]<int kStep>() {
    const bool last = --left == 0;
    const PartScales<T> scales(
        memory + place.extra + at.weights.index * T::weight_bytes + kStep * place.next_extra, lane);
    const std::uint32_t inputs_full = barriers.inputs_full + at.inputs.index * 8;
    const std::uint32_t columns =
        add_bytes(all_columns, __shfl_sync(~0u, at.inputs.index * S::input_bytes, 0));
    if (kStep == 1) {
      __syncwarp();
      if (!last) {
        release_weights<T>(barriers, at);
        wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
      }
    }
    const std::byte* const next =
        memory + place.record + at.weights.index * T::weight_bytes + (1 - kStep) * place.next_record;
    wait_barrier(inputs_full, at.inputs.parity);
    const auto multiply_piece = [&]<int kIndex>() {
      multiply_part<T, kPiece>(part, fragments[kStep], add_bytes(columns, kIndex * kPiece * kRecordColumns));
#pragma unroll
      for (int block = kIndex * kBlocks / kPieces; block < (kIndex + 1) * kBlocks / kPieces; ++block)
        fragments[1 - kStep].decode(next, block);  // after the last step: anything
      wait_for_multiplies<0>();
      add_part<T, kIndex * kPiece, kPiece>(sums, part, scales);
    };
    multiply_piece.template operator()<0>();
    if constexpr (kPieces > 1) multiply_piece.template operator()<1>();
    __syncwarp();
    barriers.release_inputs(args, inputs_full);
    at.inputs.advance(S::inputs);
    return last;
  };
  while (!multiply_step.template operator()<0>() && !multiply_step.template operator()<1>()) {
  }
  return leave_tile<T>(ring, barriers, at, sums, result);
}

/// The same of few tokens, in one piece: registers of four warpgroups hold no more, nor the weights of two
/// steps. Those of the next one are decoded while other warpgroups multiply.
template <class T, int N>
requires(T::bytes && !T::from_memory && T::parts && !T::many) __device__ __forceinline__ Tile
    multiply_tile(const GemmArgs& args, const WarpgroupRing<T>& ring, const RingBarriers<T>& barriers,
                  Places& at, std::byte* memory, TileResult<T>& result) {
  using S = Stages<T>;
  static_assert(!T::record_scales);
  constexpr int kBlocks = kRecordColumns / 32;
  const int lane = threadIdx.x % 32;
  const UnitPlace<T> place;
  const std::uint32_t all_columns = swizzled_rows(shared_address(memory));
  float sums[N / 2] = {};
  PartSums<T, N> part;
  ByteFragments<T> fragments;
  const std::byte* record = memory + place.record + at.weights.index * T::weight_bytes;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) fragments.decode(record, block);
#pragma unroll 1
  for (int step = 0, of_stage = 0;; ++step) {
    const PartScales<T> scales(
        memory + place.extra + at.weights.index * T::weight_bytes + of_stage * place.next_extra, lane);
    const std::uint32_t columns = add_bytes(all_columns, at.inputs.index * S::input_bytes);
    const std::uint32_t inputs_full = barriers.inputs_full + at.inputs.index * 8;
    const bool last = step + 1 == args.steps;
    if (!last) {
      record += place.next_record;
      if (++of_stage == T::steps) {
        of_stage = 0;
        __syncwarp();
        release_weights<T>(barriers, at);
        record = memory + place.record + at.weights.index * T::weight_bytes;
        wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
      }
    }
    wait_barrier(inputs_full, at.inputs.parity);
    multiply_part<T, N>(part, fragments, columns);
    wait_for_multiplies<0>();
    add_part<T, 0, N>(sums, part, scales);
    __syncwarp();
    barriers.release_inputs(args, inputs_full);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) fragments.decode(record, block);
    at.inputs.advance(S::inputs);
    if (last) break;
  }
  return leave_tile<T>(ring, barriers, at, sums, result);
}

}  // namespace gatefold::cuda
