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

/// Adds the sums of a record, whose multiplies are done, to those of the tokens from kFirst on.
/// scales: the record's, for both of a lane's rows, of what is decoded.
template <class T, int kFirst, int kPiece, int kSums>
__device__ __forceinline__ void add_part(float (&sums)[kSums], PartSums<T, kPiece>& part,
                                         const float (&scales)[2]) {
  take_sums(part);
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    float& sum = sums[kFirst / 2 + i];
    sum = fmaf(part_in_f32(part[i]), scales[i / 2 % 2], sum);
  }
}

/// Where the records and scales of a unit of this lane are: from shared memory on, in stage 0 of the weights;
/// and from there to those of its other step.
template <class T>
struct UnitPlace {
  int record, extra;
  static constexpr int next_record = T::step_bytes,
                       next_extra = T::P.apart() ? T::step_extra_bytes : T::step_bytes;

  __device__ __forceinline__ explicit UnitPlace(int of_warp = 0) {
    const int thread = own_thread<T>(), warp = thread / 32,
              unit = (warp / 4 * T::units + of_warp) * 4 + warp % 4, group = unit / kGroupUnits,
              of_group = unit % kGroupUnits;
    const int first = Stages<T>::weights_at + group * T::group_bytes + of_group * T::record_bytes;
    record = first + thread % 32 * 16;
    extra = T::P.apart() ? Stages<T>::weights_at + T::extras_at + group * T::group_extra_bytes +
                               of_group * T::extra_stride
                         : first + T::P.value_bytes();
  }
};

/// What a lane has of a record, as it lies in memory.
template <class T>
struct ByteRecord {
  static constexpr int blocks = kRecordColumns / 32;
  Codes<T::P, blocks> codes;
  RecordScales<T::P> scales;
  ByteTable tables[T::P.for_bytes ? blocks : 1];  ///< of both rows, for two blocks each

  __device__ __forceinline__ void load(const std::byte* stage, const UnitPlace<T>& place, int of_stage,
                                       const ByteTable* all_tables) {
    codes.load(stage + place.record + of_stage * place.next_record, 0, 0);
    scales.load(stage + place.extra + of_stage * place.next_extra, threadIdx.x % 32);
    if constexpr (T::P.for_bytes)
#pragma unroll
      for (int i = 0; i < blocks; ++i) tables[i] = all_tables[__byte_perm(scales.words[0], 0, 0x4440 + i)];
  }
  /// What its sums are to be multiplied by.
  __device__ __forceinline__ void part_scales(float (&rows)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = scales.scale(0, r) * detail::power_of_two(byte_power(T::P, T::M));
  }
};
/// The same decoded: A of its multiplies.
template <class T>
struct ByteFragments {
  static constexpr int blocks = ByteRecord<T>::blocks;
  std::uint32_t a[blocks][4];

  __device__ __forceinline__ void decode(const ByteRecord<T>& from, int first = 0, int end = blocks) {
#pragma unroll
    for (int block = first; block < end; ++block) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        std::uint32_t row[2];
        decode8_bytes<T::P, T::M>(from.codes.row(block, r),
                                  from.tables[T::P.for_bytes ? block / 2 * 2 + r : 0], row);
        a[block][r] = row[0];
        a[block][2 + r] = row[1];
      }
#pragma unroll
      for (std::uint32_t& word : a[block])
        asm volatile("" : "+r"(word));  // not decoded later, among multiplies
    }
  }
};

/// Begins to multiply a record by N tokens: rows of shared memory from `columns` on. kAdd: to what the sums
/// are.
template <bool kAdd, int N, class T, class Sum>
__device__ __forceinline__ void multiply_record(Sum (&sums)[N / 2], const ByteFragments<T>& fragments,
                                                std::uint32_t columns) {
  const Descriptor first = descriptor(columns);
  begin_multiplies();
  ByteWgmma<N>::template run<kAdd>(sums, fragments.a[0], first);
#pragma unroll
  for (int block = 1; block < kRecordColumns / 32; ++block)
    ByteWgmma<N>::template run<true>(sums, fragments.a[block], add_bytes(first, block * 32));
  commit_multiplies();
}

/// This warp has read a stage of weights.
template <class T>
__device__ __forceinline__ void release_weights(const RingBarriers<T>& barriers, Places& at) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barriers.weights_full + at.weights.index * 8 + barriers.empty);
  at.weights.advance(Stages<T>::weights);
}

/// Ends a tile, whose last stage of weights has been read.
template <class T>
__device__ __forceinline__ Tile leave_tile(const WarpgroupRing<T>& ring, const RingBarriers<T>& barriers,
                                           Places& at) {
  const Tile tile = read_by_lane_0(ring.tiles[at.weights.index]);  // again: it took no registers meanwhile
  release_weights<T>(barriers, at);
  return tile;
}
/// Sums, whose multiplies are done, from one record's scales to the next one's. Where those are 0, its codes
/// are, too.
template <int kSums>
__device__ __forceinline__ void change_units(float (&sums)[kSums], const float (&scales)[2],
                                             float (&next)[2]) {
  float factors[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (fabsf(next[r]) < 0x1p-126f) next[r] = scales[r];
    factors[r] = scales[r] * reciprocal(next[r]);
  }
  take_sums(sums);
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] *= factors[i / 2 % 2];
}
template <class T, int kSums>
__device__ __forceinline__ void leave_sums(const float (&sums)[kSums], UnitResult<T>& result) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) result.sums[i] = sums[i];
  result.unit[0] = result.unit[1] = T::parts ? 1.0f : detail::power_of_two(byte_power(T::P, T::M));
}

/// The next stage of weights instead of this one, which this warp has read.
template <class T>
__device__ __forceinline__ void next_stage(const RingBarriers<T>& barriers, Places& at) {
  release_weights<T>(barriers, at);
  wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
}

template <class T>
__device__ __forceinline__ void wait_for_inputs(const RingBarriers<T>& barriers, const StagePlace& stage) {
  wait_barrier(barriers.inputs_full + stage.index * 8, stage.parity);
}

/// A tile of few tokens, at most N, by one unit a warp. Its first stage of weights is there. A step is
/// decoded and then multiplied: four warpgroups hide that from each other.
template <class T, int N>
requires(T::bytes && !T::from_memory && T::few) __device__ __forceinline__ Tile
    multiply_tile(const GemmChain& chain, const Tile& next, const WarpgroupRing<T>& ring,
                  const RingBarriers<T>& barriers, Places& at, std::byte* memory, TileResult<T>& result) {
  using S = Stages<T>;
  static_assert(!T::record_scales && T::units == 1 && T::steps == T::input_steps);
  const UnitPlace<T> place;
  const std::uint32_t all_columns = swizzled_rows(shared_address(memory));
  float sums[N / 2] = {};
  const int steps = reduced_in_warp(multiply_of<T>(chain, next).steps);
  at = reduced_in_warp(at);  // else descriptors are copied there
#pragma unroll 1
  for (int step = 0;;) {
    wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
    const std::uint32_t inputs_full = barriers.inputs_full + at.inputs.index * 8,
                        rows = add_bytes(all_columns, reduced_in_warp(at.inputs.index * S::input_bytes));
    wait_barrier(inputs_full, at.inputs.parity);
#pragma unroll
    for (int of_stage = 0; of_stage < T::steps; ++of_stage) {
      if (of_stage > 0 && step + of_stage == steps) break;
      const std::uint32_t columns = add_bytes(rows, of_stage * S::scales_at);
      ByteRecord<T> record;
      record.load(memory + at.weights.index * T::weight_bytes, place, of_stage, ring.tables);
      ByteFragments<T> fragments;
      fragments.decode(record);
      if constexpr (T::parts) {
        PartSums<T, N> part;
        float scales[2];
        record.part_scales(scales);
        multiply_record<false, N>(part, fragments, columns);
        wait_for_multiplies<0>();
        add_part<T, 0, N>(sums, part, scales);
      } else {
        multiply_record<true, N>(sums, fragments, columns);
        wait_for_multiplies<0>();
      }
    }
    __syncwarp();
    barriers.release_inputs(chain.of[0], inputs_full);
    at.inputs.advance(S::inputs);
    if ((step += T::steps) >= steps) break;
    release_weights<T>(barriers, at);
  }
  take_sums(sums);
  leave_sums<T>(sums, result[0]);
  return leave_tile<T>(ring, barriers, at);
}

/// A tile of at most N tokens, by two units a warp in turn. Its first stage of weights is there. While one
/// unit's record is multiplied, the last one's sums are added to the others, the next one, which was loaded
/// before, is decoded, and the one after it is loaded.
template <class T, int N>
requires(T::bytes && !T::from_memory && T::units == 2) __device__ __forceinline__ Tile
    multiply_tile(const GemmChain& chain, const Tile&, const WarpgroupRing<T>& ring,
                  const RingBarriers<T>& barriers, Places& at, std::byte* memory, TileResult<T>& result) {
  using S = Stages<T>;
  const GemmArgs& args = chain.of[0];
  static_assert(!T::record_scales && T::steps == 2 && T::input_steps == 1);
  const UnitPlace<T> places[2] = {UnitPlace<T>(0), UnitPlace<T>(1)};
  const std::uint32_t all_columns = swizzled_rows(shared_address(memory));
  float sums[2][N / 2] = {};
  PartSums<T, N> part[2] = {};
  float part_scales[2][2] = {};
  ByteRecord<T> loaded;
  ByteFragments<T> fragments[2];
  const auto load = [&](int of_stage, int u) {
    loaded.load(memory + at.weights.index * T::weight_bytes, places[u], of_stage, ring.tables);
  };
  const auto decode = [&](int u) {
    fragments[u].decode(loaded);
    if constexpr (T::parts) loaded.part_scales(part_scales[u]);
  };
  const auto add_last_part = [&](int u) {
    if constexpr (T::parts) add_part<T, 0, N>(sums[u], part[u], part_scales[u]);
  };
  const auto multiply = [&](int u, std::uint32_t columns) {
    if constexpr (T::parts)
      multiply_record<false, N>(part[u], fragments[u], columns);
    else
      multiply_record<true, N>(sums[u], fragments[u], columns);
    wait_for_multiplies<1>();  // of the other unit
    add_last_part(1 - u);
  };
  load(0, 0);
  decode(0);
  load(0, 1);
  /// The rows of a stage of activations; the same for all lanes.
  const auto rows_of = [&](const StagePlace& stage) {
    return add_bytes(all_columns, reduced_in_warp(stage.index * S::input_bytes));
  };
  wait_for_inputs(barriers, at.inputs);
  std::uint32_t columns = rows_of(at.inputs);
  int left = args.steps;  // that are not multiplied
  // Step kStep of a stage of weights. Returns whether it was the last one of all.
  const auto multiply_step = [&]<int kStep>() {
    const bool last = --left == 0;
    multiply(0, columns);
    decode(1);
    if (!last) {
      if (kStep == 1) next_stage<T>(barriers, at);
      load(1 - kStep, 0);
    }
    multiply(1, columns);
    StagePlace next_inputs = at.inputs;
    next_inputs.advance(S::inputs);
    if (!last) {  // without a branch the compiler would wait for the multiplies first
      decode(0);
      load(1 - kStep, 1);
      wait_for_inputs(barriers, next_inputs);
    }
    columns = rows_of(next_inputs);
    wait_for_multiplies<0>();
    barriers.release_inputs(args, barriers.inputs_full + at.inputs.index * 8);
    at.inputs = next_inputs;
    return last;
  };
  while (!multiply_step.template operator()<0>() && !multiply_step.template operator()<1>()) {
  }
  add_last_part(1);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    take_sums(sums[u]);
    leave_sums<T>(sums[u], result[u]);
  }
  return leave_tile<T>(ring, barriers, at);
}

/// A tile of at most N tokens, by one unit a warp. Its first stage of weights is there. While a step is
/// multiplied, in pieces if sums of records are kept by themselves, the next one, which was loaded before, is
/// decoded, and the one after it is loaded.
template <class T, int N>
requires(T::bytes && !T::from_memory && T::most) __device__ __forceinline__ Tile
    multiply_tile(const GemmChain& chain, const Tile&, const WarpgroupRing<T>& ring,
                  const RingBarriers<T>& barriers, Places& at, std::byte* memory, TileResult<T>& result) {
  using S = Stages<T>;
  const GemmArgs& args = chain.of[0];
  static_assert(!T::record_scales && T::steps == 2 && T::input_steps == 1);
  constexpr int kBlocks = ByteFragments<T>::blocks, kPieces = T::parts && N > 112 ? 2 : 1,
                kPiece = N / kPieces;
  const UnitPlace<T> place;
  const std::uint32_t all_columns = swizzled_rows(shared_address(memory));
  float sums[N / 2] = {};
  PartSums<T, kPiece> part;
  ByteRecord<T> loaded;
  ByteFragments<T> fragments[2];
  const auto load = [&](int of_stage) {
    loaded.load(memory + at.weights.index * T::weight_bytes, place, of_stage, ring.tables);
  };
  int left = args.steps;  // that are not multiplied
  float scales[2][2], unit[2];
  const auto decode = [&](int step, int first, int end) {
    fragments[step].decode(loaded, first, end);
    if constexpr (T::parts || T::changes_units)
      if (end == kBlocks) loaded.part_scales(scales[step]);
  };
  load(0);
  decode(0, 0, kBlocks);
  if constexpr (T::changes_units)
    for (float& scale : scales[0])
      if (fabsf(scale) < 0x1p-126f) scale = 1;
  if (left > 1) load(1);
  /// The rows of a stage of activations; the same for all lanes.
  const auto rows_of = [&](const StagePlace& stage) {
    return add_bytes(all_columns, reduced_in_warp(stage.index * S::input_bytes));
  };
  wait_for_inputs(barriers, at.inputs);
  std::uint32_t columns = rows_of(at.inputs);
  // Step kStep of a stage of weights. Returns whether it was the last one of all.
  const auto multiply_step = [&]<int kStep>() {
    const bool last = --left == 0;
    StagePlace next_inputs = at.inputs;
    next_inputs.advance(S::inputs);
    const auto multiply_piece = [&]<int kIndex>() {
      const std::uint32_t of_piece = add_bytes(columns, kIndex * kPiece * kRecordColumns);
      if constexpr (T::parts)
        multiply_record<false, kPiece>(part, fragments[kStep], of_piece);
      else
        multiply_record<true, N>(sums, fragments[kStep], of_piece);
      if (!last) {  // without this branch the compiler would wait for the multiplies first
        decode(1 - kStep, kIndex * kBlocks / kPieces, (kIndex + 1) * kBlocks / kPieces);
        if (kIndex + 1 == kPieces) {
          if (left > 1) {
            if (kStep == 0) next_stage<T>(barriers, at);
            load(kStep);
          }
          wait_for_inputs(barriers, next_inputs);
        }
      }
      wait_for_multiplies<0>();
      if constexpr (T::parts) add_part<T, kIndex * kPiece, kPiece>(sums, part, scales[kStep]);
      if constexpr (T::changes_units) {
        if (last)
          unit[0] = scales[kStep][0], unit[1] = scales[kStep][1];
        else
          change_units(sums, scales[kStep], scales[1 - kStep]);
      }
    };
    multiply_piece.template operator()<0>();
    if constexpr (kPieces > 1) multiply_piece.template operator()<1>();
    __syncwarp();
    barriers.release_inputs(args, barriers.inputs_full + at.inputs.index * 8);
    at.inputs = next_inputs;
    columns = rows_of(at.inputs);
    return last;
  };
  while (!multiply_step.template operator()<0>() && !multiply_step.template operator()<1>()) {
  }
  take_sums(sums);
  leave_sums<T>(sums, result[0]);
  if constexpr (T::changes_units) result[0].unit[0] = unit[0], result[0].unit[1] = unit[1];
  return leave_tile<T>(ring, barriers, at);
}

}  // namespace gatefold::cuda
