#pragma once
/// \file
/// What follows the multiply of a tile (moe_wgmma.cuh): scales, biases, activation. Sums go through shared
/// memory, 16 tokens of a unit at a time, so that four lanes store neighbouring rows of a token.

#include "cuda/moe_gemm_finish.cuh"
#include "cuda/moe_wgmma_ring.cuh"

namespace gatefold::cuda {

/// Two channels of a token, whose gates are rows 2 pair and + 1 and ups those and 8.
template <class T>
__device__ __forceinline__ void finish_channels(const GemmArgs& args, int expert, int unit, int slot,
                                                float scale, const float* row_scales, const float* sums,
                                                int pair) {
  constexpr PackedFormat P = T::P;
  const int channel = unit * 8 + 2 * pair;
  float values[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * pair + i;
    float gate = sums[row] * scale, up = sums[row + 8] * scale;
    if constexpr (T::P.row_scale) gate *= row_scales[row], up *= row_scales[row + 8];
    const bool there = channel + i < args.rows;
    const int at = expert * args.rows + channel + i;
    if (there && args.bias != nullptr) gate += args.bias[at];
    if (there && args.up_bias != nullptr) up += args.up_bias[at];
    values[i] = there ? activate(args.activation, gate, up) : 0.0f;
  }
  const std::int64_t row = static_cast<std::int64_t>(slot) * args.out_stride;
  if (args.out_dtype == DType::f32) {
    auto* out = static_cast<float*>(args.out) + row + channel;
    for (int i = 0; i < 2; ++i)
      if (channel + i < args.out_stride) out[i] = values[i];
    return;
  }
  const bool bf16 = args.out_dtype == DType::bf16;
  auto* out = static_cast<std::uint16_t*>(args.out) + row;
  *reinterpret_cast<std::uint32_t*>(out + P.position(channel)) = narrow_pair(values[0], values[1], bf16);
  if (unit + 1 < args.groups * kGroupUnits) return;
    // The last unit's lanes fill rows up to their stride, which is a multiple of what down reads.
#pragma unroll 1
  for (int pad = channel + 8; pad < args.out_stride; pad += 8)
    *reinterpret_cast<std::uint32_t*>(out + P.position(pad)) = 0;
}

/// Rows 4 part .. of a unit by one token.
template <class T>
__device__ __forceinline__ void finish_rows(const GemmArgs& args, int expert, int unit, int slot, float scale,
                                            const float* row_scales, const float* sums, int part) {
  float values[4];
  const int first = unit * kUnitRows + 4 * part;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = sums[4 * part + i] * scale;
    if constexpr (T::P.row_scale) values[i] *= row_scales[4 * part + i];
    if (args.bias != nullptr && first + i < args.rows) values[i] += args.bias[expert * args.rows + first + i];
  }
  const std::int64_t at = static_cast<std::int64_t>(slot) * args.out_stride + first;
  if (args.out_stride % 4 != 0 || first >= args.rows) {
    for (int i = 0; i < 4; ++i)
      if (first + i < args.rows) store(args, slot, first + i, values[i]);
  } else if (args.out_dtype == DType::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = {values[0], values[1], values[2],
                                                                      values[3]};
  } else {
    const bool bf16 = args.out_dtype == DType::bf16;
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(args.out) + at) = {
        narrow_pair(values[0], values[1], bf16), narrow_pair(values[2], values[3], bf16)};
  }
}

template <class T, int N>
__device__ __forceinline__ void finish_tile(const GemmArgs& args, const Items& items, const Tile& tile,
                                            const float (&sums)[N / 2], float* memory) {
  const int lane = threadIdx.x % 32;
  const int unit = tile.first_group * kGroupUnits + static_cast<int>(threadIdx.x) / 32;
  if (unit >= args.groups * kGroupUnits) return;
  constexpr auto power = static_cast<float>(1 << decoded_power<T::P, T::M>());
  constexpr int pieces = (N + 15) / 16;
  const int part = lane % 4, expert = tile.expert;
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    const int first = piece * 16;
    if (first >= tile.count) break;
      // Rows lane / 4 and + 8 by two columns of two tiles of 8 tokens.
#pragma unroll
    for (int own = 0; own < pieces; ++own)
      if (own == piece)
#pragma unroll
        for (int i = 0; i < 8 && own * 8 + i < N / 2; ++i)
          memory[(i / 4 * 8 + lane % 4 * 2 + i % 2) * T::sums_stride + lane / 4 + i / 2 % 2 * 8] =
              sums[own * 8 + i];
    __syncwarp();
    const auto* row_scales =
        reinterpret_cast<const float*>(args.weights + expert * args.expert_stride) + unit * kUnitRows;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int token = lane / 8 + lane / 4 % 2 * 4 + 8 * i;
      if (first + token >= tile.count) continue;
      const int slot = items.slot(tile.first + first + token);
      float scale = power;
      if (args.inputs.row_scales != nullptr) scale *= args.inputs.row_scales[slot / args.inputs.slots_of_row];
      const float* own = memory + token * T::sums_stride;
      if (args.kind == GemmKind::gate_up)
        finish_channels<T>(args, expert, unit, slot, scale, row_scales, own, part);
      else
        finish_rows<T>(args, expert, unit, slot, scale, row_scales, own, part);
    }
    __syncwarp();
  }
}

}  // namespace gatefold::cuda
