#pragma once
/// \file
/// What follows the multiply (moe_gemm.cuh): sums of several warps become one, scales, biases, activation.

#include "cuda/moe_gemm_ring.cuh"

namespace gatefold::cuda {

/// Sums of a group of units: of each unit and tile the rows lane / 4 and + 8 by two columns.
template <class T>
using Sums = float[kGroupUnits][T::tiles][4];

__device__ __noinline__ inline float activate_gelu(Activation::Kind kind, float g) {
  return 0.5f * g *
         (1.0f + (kind == Activation::Kind::geglu ? erff(g * 0.70710678f)
                                                  : tanhf(0.79788456f * (g + 0.044715f * g * g * g))));
}

__device__ __forceinline__ float limited(const Activation& a, float gate) {
  return fminf(gate, a.limit) + (gate - gate);
}
__device__ __forceinline__ float limited_up(const Activation& a, float up) {
  return fmaxf(fminf(up, a.limit), -a.limit) + (up - up);
}
__device__ __forceinline__ float activate_swiglu(const Activation& a, float gate, float up) {
  const float g = limited(a, gate);
  return g * reciprocal(1.0f + expf(-a.alpha * g)) * (limited_up(a, up) + a.beta);
}
__device__ __forceinline__ float activate(const Activation& a, float gate, float up) {
  if (a.kind == Activation::Kind::geglu || a.kind == Activation::Kind::geglu_tanh)
    return activate_gelu(a.kind, limited(a, gate)) * limited_up(a, up);
  return activate_swiglu(a, gate, up);
}

__device__ __forceinline__ void store(const GemmArgs& args, int slot, std::int64_t row, float value) {
  const std::int64_t at = slot * args.out_stride + row;
  if (args.out_dtype == DType::f32)
    static_cast<float*>(args.out)[at] = value;
  else
    static_cast<std::uint16_t*>(args.out)[at] = narrow(value, args.out_dtype == DType::bf16);
}

/// What follows the multiply, for rows lane / 4 and + 8 of a unit by one column: one channel's gate and up.
__device__ __forceinline__ void finish_gate_up(const GemmArgs& args, int expert, int unit, int slot,
                                               float gate, float up) {
  const int channel = unit * 8 + threadIdx.x % 32 / 4;
  if (channel < args.rows) {
    const int at = expert * args.rows + channel;
    if (args.bias != nullptr) gate += args.bias[at];
    if (args.up_bias != nullptr) up += args.up_bias[at];
    store(args, slot, channel, activate(args.activation, gate, up));
    if (unit + 1 < args.groups * kGroupUnits) return;
  }
  // Down reads rows up to their stride: lanes without a channel fill what follows, and the last unit's do.
#pragma unroll 1
  for (int pad = channel < args.rows ? channel + 8 : channel; pad < args.out_stride; pad += 8)
    store(args, slot, pad, 0.0f);
}

__device__ __forceinline__ void finish_down(const GemmArgs& args, int expert, int unit, int slot,
                                            const float (&sums)[2]) {
  const int row = unit * kUnitRows + threadIdx.x % 32 / 4;
  const std::int64_t part = args.parts > 1 ? std::int64_t{expert} * args.slots * args.out_stride : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (row + 8 * half < args.rows)
      store(args, slot, part + row + 8 * half,
            sums[half] + (args.bias == nullptr ? 0.0f : args.bias[expert * args.rows + row + 8 * half]));
}

/// What the sums of rows lane / 4 and + 8 of a group's units are multiplied by. `early`: it is read when a
/// round begins, as a load at its end waits behind all weights that are on their way. Of others than fp4 that
/// costs as much at the beginning.
template <class T>
struct UnitScales {
  static constexpr bool early = T::P.folded && T::P.value.bits == 4;
  float rows[early ? kGroupUnits : 1][2];

  static __device__ __forceinline__ const float* at(const GemmArgs& args, const Round& round, int unit,
                                                    int lane) {
    return reinterpret_cast<const float*>(args.weights + round.expert * args.expert_stride) +
           unit * kUnitRows + lane / 4;
  }
  /// When a round begins.
  __device__ __forceinline__ void load(const GemmArgs& args, const Round& round, int warp, int lane) {
    const int row = round.row(warp);
    if (!early || row >= round.groups) return;
    const float* scales = at(args, round, (round.group + row) * kGroupUnits, lane);
#pragma unroll
    for (int i = 0; i < 2 * kGroupUnits; ++i) rows[i / 2][i % 2] = scales[i * 8];
  }
  /// Of both rows of a unit.
  __device__ __forceinline__ float2 of(const GemmArgs& args, const Round& round, int unit, int lane) const {
    constexpr float power = detail::power_of_two(decoded_power<T::P, T::M>());
    if constexpr (!T::P.row_scale) {
      return {power, power};
    } else if constexpr (early) {
      static_assert(kGroupUnits == 2);
      const bool second = unit % 2 != 0;
      return {power * (second ? rows[1][0] : rows[0][0]), power * (second ? rows[1][1] : rows[0][1])};
    } else {
      const float* own = at(args, round, unit, lane);
      return {power * own[0], power * own[8]};
    }
  }
};

/// The two rows and two columns that this lane has of a unit and tile.
template <class T>
__device__ __forceinline__ void finish_tile(const GemmArgs& args, const Items& items, const Round& round,
                                            int unit, int tile, int lane, const UnitScales<T>& unit_scales,
                                            const float4& sums) {
  const float2 of_rows = unit_scales.of(args, round, unit, lane);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = tile * kTileTokens + lane % 4 * 2 + c;
    if (column >= round.count) continue;
    const int slot = items.slot(round.first + column);
    const float* scales = args.inputs.row_scales;
    const float scale = scales == nullptr ? 1.0f : scales[slot / args.inputs.slots_of_row];
    const float both[2] = {(c == 0 ? sums.x : sums.y) * of_rows.x * scale,
                           (c == 0 ? sums.z : sums.w) * of_rows.y * scale};
    if (args.kind == GemmKind::gate_up)
      finish_gate_up(args, round.expert, unit, slot, both[0], both[1]);
    else
      finish_down(args, round.expert, unit, slot, both);
  }
}

/// The end of a round, by all warps that multiply. Warps that share a group leave their sums to each other in
/// the memory of the last stage; each adds up and finishes some of the tiles, in the order of slices.
template <class T>
__device__ __forceinline__ void finish_round(const GemmArgs& args, const Items& items, const Round& round,
                                             int warp, int lane, Sums<T>& sums, const UnitScales<T>& scales,
                                             float4* partials) {
  const int tiles = (round.count + kTileTokens - 1) / kTileTokens;
  const int row = round.row(warp), slice = round.slice(warp);
  const int first_unit = (round.group + row) * kGroupUnits;
  constexpr int parts = kGroupUnits * T::shared_tiles;
  if (round.slices > 1) {
    sync_threads<T::warps * 32>(1 + threadIdx.x / T::threads);  // all have read the stage
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const auto& s = sums[i % kGroupUnits][i / kGroupUnits];
      if (i / kGroupUnits < tiles) partials[(warp * parts + i) * 32 + lane] = {s[0], s[1], s[2], s[3]};
    }
    sync_threads<T::warps * 32>(1 + threadIdx.x / T::threads);
  }
#pragma unroll 1
  for (int i = slice; row < round.groups && i < kGroupUnits * tiles; i += round.slices) {
    float4 sum{};
    if (round.slices == 1) {
#pragma unroll
      for (int own = 0; own < kGroupUnits * T::tiles; ++own) {
        const auto& s = sums[own % kGroupUnits][own / kGroupUnits];
        if (i == own) sum = {s[0], s[1], s[2], s[3]};
      }
    }
    for (int from = 0; round.slices > 1 && from < round.slices; ++from) {
      const float4 part = partials[((warp - slice + from) * parts + i) * 32 + lane];
      sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    finish_tile<T>(args, items, round, first_unit + i % kGroupUnits, i / kGroupUnits, lane, scales, sum);
  }
  if (round.slices > 1) shared_memory_to_copies();
#pragma unroll
  for (auto& unit : sums)
    for (auto& tile : unit)
      for (float& sum : tile) sum = 0;
}

}  // namespace gatefold::cuda
