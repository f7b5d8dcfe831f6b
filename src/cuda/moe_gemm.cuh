#pragma once
/// \file
/// The kernel of moe_gemm.h. Weights are the A operand of m16n8k16 multiplies, tokens the B operand.
///
/// A step is the records of the same 128 columns of a group of units (packed.h). All steps of all groups of
/// all items form one sequence. Each thread block takes an equal run of whole groups, each of its warps an
/// equal run of the block's steps: a stream of memory that it copies through a ring of its own, decodes and
/// multiplies, without meeting the others. A group whose steps several warps have is added up, in the order
/// of k, by the warp that has its first ones.

#include "cuda/moe_gemm_finish.cuh"
#include "cuda/moe_gemm_ring.cuh"

namespace gatefold::cuda {

/// The tokens of an item, as this lane needs them: as columns lane / 4 of B, and 2 (lane % 4) and + 1 of the
/// sums.
template <class T>
struct Columns {
  Item item{};
  const std::uint16_t* rows[T::tiles];  // those that the item lacks are its last one, and are not used
  const float* scales[T::record_scales ? T::tiles : 1][2];

  __device__ void set(const GemmArgs& args, int index, int lane) {
    item = item_at(args, index);
    const GemmInputs& in = args.inputs;
#pragma unroll
    for (int t = 0; t < T::tiles; ++t) {
      const int column = min(t * kTileTokens + lane / 4, item.count - 1);
      rows[t] = in.rows + input_row(in, item.first + column) * in.stride + lane % 4 * 8;
      if constexpr (T::record_scales)
        for (int c = 0; c < 2; ++c) {
          const int token = min(t * kTileTokens + lane % 4 * 2 + c, item.count - 1);
          scales[t][c] = in.record_scales + input_row(in, item.first + token) * (in.stride / kRecordColumns);
        }
    }
  }
  __device__ uint4 load(int tile, int column) const {
    return *reinterpret_cast<const uint4*>(rows[tile] + column);
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

/// The codes that a lane has of `kLines` lines.
template <int kLines>
struct Codes {
  alignas(16) std::uint32_t words[kLines * 4];

  __device__ __forceinline__ void load(const std::byte* lines, int lane) {
#pragma unroll
    for (int i = 0; i < kLines; ++i) load_words<16>(lines + i * kLineBytes + lane * 16, words + 4 * i);
  }
};

/// Scales and zero points of a record, for rows lane / 4 and + 8.
template <PackedFormat P>
struct RecordScales {
  static constexpr int groups = P.groups(), values = P.value_bytes(), zeros_at = P.zeros_at();
  static constexpr int bytes = !P.scale.stored() ? 0 : P.banded ? 8 : groups * 2 * P.scale.bits / 8;
  alignas(16) std::uint32_t words[bytes / 4 + 1];
  std::uint32_t zeros[1];

  __device__ RecordScales(const std::byte* record, int row) {
    if constexpr (bytes != 0) load_words<bytes>(record + values + (P.banded ? 0 : row * bytes), words);
    if constexpr (P.zeros) load_words<groups>(record + zeros_at + row * groups, zeros);
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
    else
      return decode<P.scale>(code(group, half));
  }
  /// decode8's term for 8 columns of a block of 32, those from 8 * quarter on.
  template <Format M>
  __device__ Pair term(int block, int quarter, int half) const {
    if constexpr (P.folded) {  // groups of 16
      static_assert(!P.folded || (P.group == 16 && P.scale.bits == 8));
      return folded_term<P, M>(words[block] >> (quarter / 2 * 16 + half * 8) & 0xff);
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

/// The activations of a step, of one tile: loaded a step ahead, as they may have to come from L2.
using Ahead = uint4[kRecordColumns / 32];

/// Step `index` of a group of units by all tokens of the item; then `ahead` is of step `next`.
template <class T>
__device__ __forceinline__ void multiply_step(const std::byte* step, int index, int next,
                                              const Columns<T>& columns, int lane, Ahead& ahead,
                                              Sums<T>& sums) {
  constexpr PackedFormat P = T::P;
  constexpr int per_row = P.value.bits / 4;  // words of 8 codes
  float x_scales[T::tiles][2];
  if constexpr (T::record_scales)
    for (int t = 0; t < T::tiles; ++t)
      for (int c = 0; c < 2; ++c) x_scales[t][c] = columns.scales[t][c][index];

  const RecordScales<P> scales[kGroupUnits] = {{step, lane / 4}, {step + T::record_bytes, lane / 4}};
  // Codes are read ahead of what needs them by as many blocks of 32 columns as registers have room for.
  constexpr int kAhead = T::tiles == 1 && P.value.bits == 4 ? 4 : 2, kLines = kAhead * per_row / 2;
  Sums<T> parts = {};  // of a group of columns
#pragma unroll
  for (int half = 0; half < kRecordColumns / 32 / kAhead; ++half) {
    Codes<kLines> codes[kGroupUnits];
    uint4 x[kAhead][T::tiles];
#pragma unroll
    for (int unit = 0; unit < kGroupUnits; ++unit)
      codes[unit].load(step + unit * T::record_bytes + half * kLines * kLineBytes, lane);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int t = 0; t < T::tiles; ++t) {
        const int block = half * kAhead + i;
        if constexpr (T::tiles == 1) {
          x[i][t] = ahead[block];
          ahead[block] = columns.load(0, next * kRecordColumns + block * 32);
        } else if (t == 0 || t * kTileTokens < columns.item.count) {
          x[i][t] = columns.load(t, index * kRecordColumns + block * 32);
        }
      }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int unit = 0; unit < kGroupUnits; ++unit) {
        const int block = half * kAhead + i;
        Pair rows[2][4];  // 8 columns of rows lane / 4 and + 8
        for (int r = 0; r < 2; ++r)
          decode8<P, T::M>(codes[unit].words + (2 * i + r) * per_row,
                           scales[unit].template term<T::M>(block, lane % 4, r), rows[r]);
#pragma unroll
        for (int t = 0; t < T::tiles; ++t) {
          if (t > 0 && t * kTileTokens >= columns.item.count) break;
          float(&to)[4] = T::scaled_groups ? parts[unit][t] : sums[unit][t];
          multiply_columns<T>({rows[0][0], rows[1][0], rows[0][1], rows[1][1]}, x[i][t].x, x[i][t].y, to);
          multiply_columns<T>({rows[0][2], rows[1][2], rows[0][3], rows[1][3]}, x[i][t].z, x[i][t].w, to);
          if constexpr (T::scaled_groups)
            if ((block + 1) * 32 % P.group == 0)
              add_group<T>(scales[unit], block * 32 / P.group, x_scales[t], sums[unit][t], parts[unit][t]);
        }
      }
  }
}

template <class T>
__global__ void __launch_bounds__(T::warps * 32, 1) moe_gemm(const __grid_constant__ GemmArgs args) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto* partials = reinterpret_cast<float*>(shared);
  std::byte* rings = reinterpret_cast<std::byte*>(shared) + T::warps * T::partial_bytes;

  if (!args.items_are_old) wait_for_previous_kernel();
  int block_steps = 0;
  const Share share = share_of_warp(args, warp, T::warps, &block_steps);
  Ring<T> ring(args, share, rings + warp * T::ring_bytes, lane);
  if (args.items_are_old) wait_for_previous_kernel();
  let_next_kernel_start();

  int item = share.item, group = share.group, step = share.step;
  bool begun = step == 0;  // the group, by this warp
  Columns<T> columns;
  Ahead ahead;
  const auto set_columns = [&] {
    columns.set(args, item, lane);
    for (int block = 0; T::tiles == 1 && block < kRecordColumns / 32; ++block)
      ahead[block] = columns.load(0, step * kRecordColumns + block * 32);
  };
  if (share.steps > 0) set_columns();
  Sums<T> sums = {};
  for (int left = share.steps; left > 0;) {
    const std::byte* chunk = ring.next();
    for (int i = 0; i < T::chunk && left > 0; ++i, --left) {
      const int next = step + 1 < args.steps ? step + 1 : 0;
      multiply_step<T>(chunk + i * T::step_bytes, step, next, columns, lane, ahead, sums);
      if (++step < args.steps) continue;
      if (begun)
        finish_group<T>(args, columns.item, group, lane, sums);
      else
        leave_partial<T>(partials, warp, lane, sums);
      for (auto& unit : sums)
        for (auto& tile : unit)
          for (float& sum : tile) sum = 0;
      step = 0;
      begun = true;
      if (++group == args.groups) {
        group = 0;
        ++item;
        if (left > 1) set_columns();
      }
    }
  }
  const bool ended = step == 0;
  if (!ended && !begun) leave_partial<T>(partials, warp, lane, sums);  // all its steps are inside one group
  __syncthreads();
  if (ended || !begun) return;
  add_partials<T>(partials, warp, block_steps, args.steps - step, lane, sums);
  finish_group<T>(args, columns.item, group, lane, sums);
}

}  // namespace gatefold::cuda
