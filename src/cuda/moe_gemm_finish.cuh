#pragma once
/// \file
/// What follows the multiply (moe_gemm.cuh): sums of several warps become one, scales, biases, activation.

#include "cuda/moe_gemm_ring.cuh"

namespace gatefold::cuda {

/// The row of the inputs that a position reads.
__device__ __forceinline__ std::int64_t input_row(const GemmInputs& in, int position) {
  return in.slots == nullptr ? position : in.slots[position] / in.top_k;
}

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

__device__ __forceinline__ float activate(const Activation& a, float gate, float up) {
  const float g = fminf(gate, a.limit) + (gate - gate), u = fmaxf(fminf(up, a.limit), -a.limit) + (up - up);
  switch (a.kind) {
    case Activation::Kind::geglu:
      return 0.5f * g * (1.0f + erff(g * 0.70710678f)) * u;
    case Activation::Kind::geglu_tanh:
      return 0.5f * g * (1.0f + tanhf(0.79788456f * (g + 0.044715f * g * g * g))) * u;
    default:
      return g * sigmoid(a.alpha * g) * (u + a.beta);
  }
}

__device__ __forceinline__ void store(const GemmArgs& args, int position, int row, float value) {
  const std::int64_t at = position * args.out_stride + row;
  if (args.out_dtype == DType::f32)
    static_cast<float*>(args.out)[at] = value;
  else if (args.out_dtype == DType::bf16)
    static_cast<std::uint16_t*>(args.out)[at] = static_cast<std::uint16_t>(encode<formats::bf16>(value));
  else
    static_cast<std::uint16_t*>(args.out)[at] = static_cast<std::uint16_t>(encode<formats::f16>(value));
}

/// What follows the multiply, for the two rows and two columns a tile that this lane has of a unit.
template <class T>
__device__ void finish_unit(const GemmArgs& args, const Item& item, int unit, int lane,
                            const float (&sums)[T::tiles][4]) {
  constexpr auto power = static_cast<float>(1 << decoded_power<T::P, T::M>());
  const int row = lane / 4;
  float low = power, high = power;
  if constexpr (T::P.row_scale) {
    const auto* scales =
        reinterpret_cast<const float*>(args.weights + item.expert * args.expert_stride) + unit * kUnitRows;
    low *= scales[row];
    high *= scales[row + 8];
  }
  const GemmInputs& in = args.inputs;
#pragma unroll
  for (int t = 0; t < T::tiles; ++t)
    for (int c = 0; c < 2; ++c) {
      const int column = t * kTileTokens + lane % 4 * 2 + c;
      if (column >= item.count) continue;
      const int position = item.first + column;
      const float scale = in.row_scales == nullptr ? 1.0f : in.row_scales[input_row(in, position)];
      const float first = sums[t][c] * low * scale, second = sums[t][2 + c] * high * scale;
      const std::int64_t biases = static_cast<std::int64_t>(item.expert) * args.rows;
      if (args.kind == GemmKind::gate_up) {
        const int channel = unit * 8 + row;
        // The last unit's lanes fill rows up to their stride, which is a multiple of what down reads.
        const int end = unit + 1 == args.groups * kGroupUnits ? static_cast<int>(args.out_stride) : 0;
        for (int pad = channel < args.rows ? channel + 8 : channel; pad < end; pad += 8)
          if (pad >= args.rows) store(args, position, pad, 0.0f);
        if (channel >= args.rows) continue;
        const float gate = first + (args.bias == nullptr ? 0.0f : args.bias[biases + channel]);
        const float up = second + (args.up_bias == nullptr ? 0.0f : args.up_bias[biases + channel]);
        store(args, position, channel, activate(args.activation, gate, up));
      } else {
        for (int half = 0; half < 2; ++half) {
          const int out = unit * kUnitRows + row + 8 * half;
          if (out >= args.rows) continue;
          store(args, position, out,
                (half == 0 ? first : second) + (args.bias == nullptr ? 0.0f : args.bias[biases + out]));
        }
      }
    }
}

template <class T>
__device__ __forceinline__ void finish_group(const GemmArgs& args, const Item& item, int group, int lane,
                                             const Sums<T>& sums) {
#pragma unroll 1
  for (int unit = 0; unit < kGroupUnits; ++unit) {
    float one[T::tiles][4];
    for (int t = 0; t < T::tiles; ++t)
      for (int i = 0; i < 4; ++i) one[t][i] = unit == 0 ? sums[0][t][i] : sums[1][t][i];
    finish_unit<T>(args, item, group * kGroupUnits + unit, lane, one);
  }
}

/// A warp's sums of a group that another warp has begun.
template <class T>
__device__ __forceinline__ float& partial(float* partials, int warp, int index, int lane) {
  return partials[(warp * kGroupUnits * T::tiles * 4 + index) * 32 + lane];
}
template <class T>
__device__ __forceinline__ void leave_partial(float* partials, int warp, int lane, const Sums<T>& sums) {
  int index = 0;
  for (const auto& unit : sums)
    for (const auto& tile : unit)
      for (const float sum : tile) partial<T>(partials, warp, index++, lane) = sum;
}

/// Adds what the next warps have of the group that a warp has begun and not ended: theirs are the first steps
/// of their shares.
template <class T>
__device__ __forceinline__ void add_partials(float* partials, int warp, int block_steps, int missing,
                                             int lane, Sums<T>& sums) {
  for (int next = warp + 1; missing > 0; ++next) {
    const int theirs = split(block_steps, T::warps, next + 1) - split(block_steps, T::warps, next);
    if (theirs == 0) continue;
    int index = 0;
    for (auto& unit : sums)
      for (auto& tile : unit)
        for (float& sum : tile) sum += partial<T>(partials, next, index++, lane);
    missing -= theirs;
  }
}

}  // namespace gatefold::cuda
