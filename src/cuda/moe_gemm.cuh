#pragma once
/// \file
/// The kernel of moe_gemm.h. Weights are the A operand of m16n8k16 multiplies, tokens the B operand.
///
/// Thread blocks stay, each with an equal run of groups of units; moe_gemm_ring.cuh says how it is cut,
/// shared by teams of warps, and comes to shared memory. A warp decodes and multiplies its step of each
/// stage; at the end of a round, warps that share a group add up their sums.

#include <climits>

#include "cuda/moe_gemm_finish.cuh"
#include "cuda/moe_gemm_items.cuh"

namespace gatefold::cuda {

/// Where a round's activations are in a stage, for this lane: column lane / 4 of B.
template <class T>
struct Columns {
  int offsets[T::tiles];
  int odd;  ///< from an even block of 8 columns to the next

  /// Tokens that the item lacks are its last one, and are not used.
  __device__ __forceinline__ void set(const Round& round, int slice, int lane) {
    constexpr PackedFormat P = T::P;
    for (int t = 0; t < T::tiles; ++t)
      offsets[t] = T::inputs_at + (slice * kRecordColumns + P.column(lane % 4, 0)) * 2 +
                   min(t * kTileTokens + lane / 4, round.count - 1) * T::input_stride(round.slices);
    if (P.folded) odd = 16 - lane / 2 % 2 * 32;
  }
  /// A multiprocessor reads the 16 bytes of 8 lanes at once, four of each of two tokens, from different
  /// banks: rows of two tokens are 64 bytes apart, modulo 128. Folded: the four of a token read every second
  /// 16 bytes, the first two of them even ones and the last two odd ones, or the other way round.
  __device__ __forceinline__ uint4 load(const std::byte* stage, int tile, int block) const {
    const int next = T::P.folded ? odd : 64;
    return *reinterpret_cast<const uint4*>(stage + offsets[tile] + block % 2 * next + block / 2 * 128);
  }
};

/// The scales of an item's tokens 2 (lane % 4) and + 1 of each tile, where they belong to records.
template <class T>
struct ColumnScales {
  std::int32_t offsets[T::record_scales ? T::tiles : 1][2];

  __device__ void set(const GemmArgs& args, const Items& items, const Round& round, int lane) {
    const GemmInputs& in = args.inputs;
    for (int t = 0; t < T::tiles; ++t)
      for (int c = 0; c < 2; ++c) {
        const int token = min(t * kTileTokens + lane % 4 * 2 + c, round.count - 1);
        const int row = items.slot(round.first + token) / in.slots_of_row;
        offsets[t][c] =
            row * static_cast<std::int32_t>(in.stride / kRecordColumns) + round.expert * args.part_steps;
      }
  }
};

template <int kBytes>
__device__ __forceinline__ void load_words(const std::byte* from, std::uint32_t* words) {
  if constexpr (kBytes == 1)
    words[0] = *reinterpret_cast<const std::uint8_t*>(from);
  else if constexpr (kBytes == 2)
    words[0] = *reinterpret_cast<const std::uint16_t*>(from);
  else if constexpr (kBytes == 4)
    words[0] = *reinterpret_cast<const std::uint32_t*>(from);
  else if constexpr (kBytes == 8)
    *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(from);
  else
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(words)[i] = reinterpret_cast<const uint4*>(from)[i];
}

/// The codes that a lane has of kBlocks blocks of 32 columns (a multiple of them from column 0 on).
template <PackedFormat P, int kBlocks>
class Codes {
  static constexpr int per_row = P.value.bits / 4;  // words of 8 codes
  static constexpr int words = kBlocks * 2 * per_row;

 public:
  __device__ __forceinline__ void load(const std::byte* record, int first_block, int lane) {
    if constexpr (P.value.bits == 8) {
      const int at = lane / 4 * kRecordColumns + (lane % 4 * 2 ^ lane / 4) * 16,
                next = 16 - lane / 4 % 2 * 32;
#pragma unroll
      for (int i = 0; i < kBlocks; i += 2)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          constexpr int bytes = kBlocks == 1 ? 8 : 16;
          alignas(16) std::uint32_t row[4];  // two blocks
          const std::byte* from = record + at + (first_block + i) / 2 * next + r * 8 * kRecordColumns;
          load_words<bytes>(from + first_block % 2 * 8, row);
          for (int word = 0; word < bytes / 4; ++word)
            words_[((i + word / 2) * 2 + r) * 2 + word % 2] = row[word];
        }
    } else if constexpr (words >= 4) {
#pragma unroll
      for (int i = 0; i < words / 4; ++i)
        load_words<16>(record + (first_block * 2 * per_row / 4 + i) * kLineBytes + lane * 16, words_ + 4 * i);
    } else {
      load_words<8>(record + first_block / 2 * kLineBytes + lane * 16 + first_block % 2 * 8, words_);
    }
  }
  /// 8 codes of a block, of row lane / 4 or + 8.
  __device__ __forceinline__ const std::uint32_t* row(int block, int r) const {
    return words_ + (2 * block + r) * per_row;
  }

 private:
  alignas(16) std::uint32_t words_[words];
};

/// Scales and zero points of a record, for rows lane / 4 and + 8; folded: of this lane's columns.
template <PackedFormat P>
struct RecordScales {
  static constexpr int groups = P.groups();
  static constexpr int bytes = !P.scale.stored() ? 0
                               : P.folded        ? 4
                               : P.banded        ? 8
                                                 : groups * 2 * P.scale.bits / 8;
  alignas(16) std::uint32_t words[bytes / 4 + 1];
  std::uint32_t zeros[1];

  RecordScales() = default;
  __device__ RecordScales(const std::byte* extra, int lane) { load(extra, lane); }
  __device__ __forceinline__ void load(const std::byte* extra, int lane) {
    const int row = lane / 4, at = P.banded ? 0 : (P.folded ? lane / (P.group / 16) : row) * bytes;
    if constexpr (bytes != 0) load_words<bytes>(extra + at, words);
    if constexpr (P.zeros) load_words<groups>(extra + P.scale_bytes() + row * groups, zeros);
  }
  __device__ std::uint32_t code(int group, int half) const {
    constexpr int bits = P.scale.bits == 0 ? 32 : P.scale.bits;
    const int index = group * 2 + half;
    return words[index * bits / 32] >> (index * bits % 32) & (~0u >> (32 - bits));
  }
  __device__ float scale(int group, int half) const {
    if constexpr (!P.scale.stored() || P.folded)
      return 1.0f;
    else if constexpr (P.scale == formats::bf16)
      return __uint_as_float(half == 0 ? words[group] << 16 : words[group] & 0xffff0000u);
    else if constexpr (P.scale == formats::f16)
      return f32_of_f16(words[group], half);
    else
      return decode<P.scale>(code(group, half));
  }
  /// A scale of 16 bits, twice.
  __device__ Pair scale_pair(int group, int half) const {
    static_assert(P.scale.bits == 16);
    return __byte_perm(words[group], 0, half == 0 ? 0x1010 : 0x3232);
  }
  /// decode8's term for the 8 columns of a block.
  template <Format M>
  __device__ Pair term(int block, int half) const {
    if constexpr (P.folded) {
      const int byte = block / 2 * 2 + half;
      if constexpr (takes_scales<P, M>()) return folded_term<P, M>(__byte_perm(words[0], 0, 0x4440 + byte));
      // To both halves.
      return folded_pair<P, M>(__byte_perm(words[0], folded_upper<P, M>(), 0x4040 + byte * 0x0101));
    }
    if constexpr (P.zeros) return zero_term<P, M>(zeros[0] >> (block * 32 / P.group * 8 + half * 4) & 15);
    return 0;
  }
};

/// The sums of one group become part of those of the unit.
template <class T>
__device__ __forceinline__ void add_group(const RecordScales<T::P>& scales, int group,
                                          const float (&x_scales)[2], float (&sums)[4], float (&part)[4]) {
  for (int i = 0; i < 4; ++i) {
    float scale = scales.scale(group, i / 2);
    if constexpr (T::record_scales) scale *= x_scales[i % 2];
    sums[i] = fmaf(part[i], scale, sums[i]);
    part[i] = 0;
  }
}

/// 16 columns of both rows, as two bf16 numbers each if need be, by one tile of tokens.
template <class T>
__device__ __forceinline__ void multiply_columns(const Pair (&a)[4], Pair b0, Pair b1, float (&sums)[4]) {
  if constexpr (T::split_weights) {
    Pair high[4], low[4];
    for (int i = 0; i < 4; ++i) split_f16(a[i], high[i], low[i]);
    mma<T::M>(sums, low, b0, b1);
    mma<T::M>(sums, high, b0, b1);
  } else if constexpr (T::split_inputs) {
    Pair high[2], low[2];
    split_f16(b0, high[0], low[0]);
    split_f16(b1, high[1], low[1]);
    mma<T::M>(sums, a, low[0], low[1]);
    mma<T::M>(sums, a, high[0], high[1]);
  } else {
    mma<T::M>(sums, a, b0, b1);
  }
}

/// A step of a group of units by kTiles tiles of tokens.
template <class T, int kTiles>
__device__ __forceinline__ void multiply_step(const std::byte* step, const std::byte* extra,
                                              const std::byte* stage, const Columns<T>& columns, int lane,
                                              const float (&x_scales)[T::tiles][2], Sums<T>& sums) {
  constexpr PackedFormat P = T::P;
  const RecordScales<P> scales[kGroupUnits] = {{extra, lane}, {extra + T::extra_stride, lane}};
  // Codes are read ahead of what needs them by as many blocks of 32 columns as registers have room for.
  constexpr int kAhead = kTiles == 1 && P.value.bits == 4 ? 4 : 2;
  Sums<T> parts = {};  // of a group of columns
#pragma unroll
  for (int half = 0; half < kRecordColumns / 32 / kAhead; ++half) {
    Codes<P, kAhead> codes[kGroupUnits];
#pragma unroll
    for (int unit = 0; unit < kGroupUnits; ++unit)
      codes[unit].load(step + unit * T::record_bytes, half * kAhead, lane);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int block = half * kAhead + i;
      Pair rows[kGroupUnits][2][4];  // 8 columns of rows lane / 4 and + 8
#pragma unroll
      for (int unit = 0; unit < kGroupUnits; ++unit)
        for (int r = 0; r < 2; ++r)
          decode8<P, T::M>(codes[unit].row(i, r), scales[unit].template term<T::M>(block, r), rows[unit][r]);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 x = columns.load(stage, t, block);
#pragma unroll
        for (int unit = 0; unit < kGroupUnits; ++unit) {
          const auto& [low, high] = rows[unit];
          float(&to)[4] = T::scaled_groups ? parts[unit][t] : sums[unit][t];
          multiply_columns<T>({low[0], high[0], low[1], high[1]}, x.x, x.y, to);
          multiply_columns<T>({low[2], high[2], low[3], high[3]}, x.z, x.w, to);
          if constexpr (T::scaled_groups)
            if ((block + 1) * 32 % P.group == 0)
              add_group<T>(scales[unit], block * 32 / P.group, x_scales[t], sums[unit][t], parts[unit][t]);
        }
      }
    }
  }
}

/// Multiplies what comes; by the other warps.
template <class T>
__device__ __forceinline__ void multiply_stages(const GemmArgs& args, const Items& items, RingState<T>& ring,
                                                std::byte* memory, int warp) {
  const int lane = threadIdx.x % 32;
  Sums<T> sums = {};
  Round round;
  Columns<T> columns;
  ColumnScales<T> column_scales;
  UnitScales<T> unit_scales;
  int step = 0, slice = 0;  // slice of warps without a group: larger than any step
  for (Place<T> place;; place.advance()) {
    wait_barrier(ring.full + place.index, place.parity);
    if (step == 0) {
      round = ring.round_of(place);
      if (round.groups == 0) return;
      slice = round.row(warp) < round.groups ? round.slice(warp) : INT_MAX / 2;
      columns.set(round, round.slice(warp), lane);
      unit_scales.load(args, round, warp, lane);
      if constexpr (T::record_scales) column_scales.set(args, items, round, lane);
    }
    std::byte* stage = memory + place.index * T::stage_bytes;
    if (step + slice < args.steps) {
      float x_scales[T::tiles][2];
      if constexpr (T::record_scales)
        for (int t = 0; t < T::tiles; ++t)
          for (int c = 0; c < 2; ++c)
            x_scales[t][c] = args.inputs.record_scales[column_scales.offsets[t][c] + step + slice];
      // Without branches inside, loads of one tile overlap with multiplies of another.
      const std::byte* own = stage + warp * T::step_bytes;
      const std::byte* extra =
          T::P.apart() ? stage + T::extras_at + warp * T::step_extra_bytes : own + T::P.value_bytes();
      if (constexpr int most = T::tiles; most == 1 || round.count > most / 2 * kTileTokens)
        multiply_step<T, most>(own, extra, stage, columns, lane, x_scales, sums);
      else
        multiply_step<T, (most + 1) / 2>(own, extra, stage, columns, lane, x_scales, sums);
    }
    step += round.slices;
    if (step < args.steps) {
      ring.release(place);
      continue;
    }
    step = 0;
    if (T::tiles > 1) round = ring.round_of(place);  // not kept in registers
    if (round.slices == 1) ring.release(place);
    finish_round<T>(args, items, round, warp, lane, sums, unit_scales, reinterpret_cast<float4*>(stage));
    if (round.slices > 1) ring.release(place);
  }
}

template <class T>
__global__ void __launch_bounds__(T::bounds, 1) moe_gemm(const __grid_constant__ GemmArgs args) {
  // Copies in bulk take up to 1.4 times as long where source and destination differ modulo 128 bytes.
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ RingState<T> rings[T::teams];
  __shared__ int taken;
  const int team = threadIdx.x / T::threads;
  RingState<T>& ring = rings[team];
  auto* memory = reinterpret_cast<std::byte*>(shared);
  auto* tables = reinterpret_cast<FewTables*>(memory + T::teams * T::team_bytes);

  ring.init(threadIdx.x % T::threads);
  if (threadIdx.x == 0) taken = 0;
  if (!args.routed_early) wait_for_previous_kernel();
  const Items items = find_items<T>(args, *tables, memory);
  __syncthreads();
  memory += team * T::team_bytes;
  const int warp = threadIdx.x % T::threads / 32;
  if (warp == T::warps) {
    copy_weights<T>(args, items, ring, memory, &taken);
    return;
  }
  wait_for_previous_kernel();
  if (warp > T::warps) {
    let_next_kernel_start();
    copy_inputs<T>(args, items, ring, memory);
  } else {
    multiply_stages<T>(args, items, ring, memory, warp);
  }
}

}  // namespace gatefold::cuda
