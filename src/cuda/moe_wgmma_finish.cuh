#pragma once
/// \file
/// What follows the multiply of a tile (moe_wgmma.cuh): scales, biases, activation. Sums go through shared
/// memory, 16 tokens of a warp's units at a time, so that lanes store neighbouring rows of a token.

#include "cuda/moe_gemm_finish.cuh"
#include "cuda/moe_wgmma_ring.cuh"

namespace gatefold::cuda {

/// What a lane finishes of each token: four neighbouring rows of a warp's units, or the gates and ups of two
/// channels.
template <class T>
struct LaneRows {
  static constexpr int lanes = 4 * T::units;  ///< of a token
  bool gate_up;
  int unit, first;  ///< the lane's unit; of a matrix: its first row or channel
  int at[2];        ///< among a token's sums: rows 0 and 1, 2 and 3
  float scales[4], bias[4];

  __device__ __forceinline__ LaneRows(const GemmArgs& args, const Tile& tile)
      : gate_up(args.kind == GemmKind::gate_up) {
    const int warp = static_cast<int>(threadIdx.x) / 32, part = static_cast<int>(threadIdx.x) % lanes;
    unit = tile.first_group * kGroupUnits + warp * T::units + part / 4;
    first = gate_up ? unit * 8 + part % 4 * 2 : unit * kUnitRows + part % 4 * 4;
    at[0] = part / 4 * kUnitRows + (gate_up ? part % 4 * 2 : part % 4 * 4);
    at[1] = at[0] + (gate_up ? 8 : 2);
    const auto* row_scales = reinterpret_cast<const float*>(args.weights + tile.expert * args.expert_stride) +
                             (unit - part / 4) * kUnitRows;
    const std::int64_t of_expert = static_cast<std::int64_t>(tile.expert) * args.rows;
    const bool there = unit < args.groups * kGroupUnits;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (T::P.row_scale) scales[i] = there ? row_scales[at[i / 2] + i % 2] : 0.0f;
      const float* from = gate_up && i >= 2 ? args.up_bias : args.bias;
      const int row = first + (gate_up ? i % 2 : i);
      bias[i] = from != nullptr && row < args.rows ? from[of_expert + row] : 0.0f;
    }
  }

  /// Of a tile's tokens those from `begin` on, 16 at most, whose sums are there. A lane's tokens are finished
  /// side by side, without branches between them.
  __device__ __forceinline__ void finish(const GemmArgs& args, const Tile& tile, const float* sums,
                                         int begin) const {
    constexpr auto power = static_cast<float>(1 << decoded_power<T::P, T::M>());
    const int token = static_cast<int>(threadIdx.x) % 32 / lanes, end = tile.count - begin;
    const float* x_scales =
        args.inputs.row_scales == nullptr ? nullptr : args.inputs.row_scales + tile.row + begin;
    float values[kTokens][4];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float* own = sums + (token + i * kApart) * T::sums_stride;
      const float2 low = *reinterpret_cast<const float2*>(own + at[0]);
      const float2 high = *reinterpret_cast<const float2*>(own + at[1]);
      const float x_scale =
          x_scales != nullptr && token + i * kApart < end ? x_scales[token + i * kApart] : 1.0f;
      const float both[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[i][j] = both[j] * (power * x_scale);
        if constexpr (T::P.row_scale) values[i][j] *= scales[j];
        values[i][j] += bias[j];
      }
    }
    if (gate_up) activate_all(args.activation, values);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (token + i * kApart >= end) continue;
      const int of_tile = begin + token + i * kApart;
      if (!gate_up)
        store_rows(args, tile.first + of_tile, tile.expert * args.part_out, values[i]);
      else if (args.out_tile_rows == 0)
        store_channels(args, tile.first + of_tile, values[i]);
      else
        store_in_tiles(args, tile.row + of_tile, values[i]);
    }
  }

 private:
  static constexpr int kApart = 32 / lanes, kTokens = 16 / kApart;  ///< of a lane

  /// Gates and ups to channels, in the places of gates.
  static __device__ __forceinline__ void activate_all(const Activation& by, float (&values)[kTokens][4]) {
    if (by.kind == Activation::Kind::geglu || by.kind == Activation::Kind::geglu_tanh) {
#pragma unroll
      for (auto& of : values)
#pragma unroll
        for (int i = 0; i < 2; ++i) of[i] = activate(by, of[i], of[2 + i]);
    } else {
#pragma unroll
      for (auto& of : values)
#pragma unroll
        for (int i = 0; i < 2; ++i) of[i] = activate_swiglu(by, of[i], of[2 + i]);
    }
  }

  /// f32, in rows of channels.
  __device__ __forceinline__ void store_channels(const GemmArgs& args, std::int64_t row,
                                                 const float (&values)[4]) const {
    auto* out = static_cast<float*>(args.out) + row * args.out_stride + first;
    for (int i = 0; i < 2; ++i)
      if (first + i < args.rows) out[i] = values[i];
  }
  __device__ __forceinline__ void store_in_tiles(const GemmArgs& args, std::int64_t row,
                                                 const float (&values)[4]) const {
    constexpr PackedFormat P = T::P;
    const auto to = [&](int k) {
      auto* out = static_cast<std::uint16_t*>(args.out);
      return reinterpret_cast<std::uint32_t*>(out + tile_position(args.out_tile_rows, row, P.position(k)));
    };
    *to(first) = narrow_pair(first < args.rows ? values[0] : 0.0f, first + 1 < args.rows ? values[1] : 0.0f,
                             args.out_dtype == DType::bf16);
    // The last unit's lanes fill rows up to their stride, which is a multiple of what down reads.
    if (unit + 1 < args.groups * kGroupUnits) return;
#pragma unroll 1
    for (int pad = first + 8; pad < args.out_stride; pad += 8) *to(pad) = 0;
  }

  __device__ __forceinline__ void store_rows(const GemmArgs& args, int row, std::int64_t part,
                                             const float (&values)[4]) const {
    const std::int64_t to = part + static_cast<std::int64_t>(row) * args.out_stride + first;
    if (args.out_stride % 4 != 0 || first >= args.rows) {
      for (int i = 0; i < 4; ++i)
        if (first + i < args.rows) store(args, row, part + first + i, values[i]);
    } else if (args.out_dtype == DType::f32) {
      *reinterpret_cast<float4*>(static_cast<float*>(args.out) + to) = {values[0], values[1], values[2],
                                                                        values[3]};
    } else {
      const bool bf16 = args.out_dtype == DType::bf16;
      *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(args.out) + to) = {
          narrow_pair(values[0], values[1], bf16), narrow_pair(values[2], values[3], bf16)};
    }
  }
};

/// `of`: the sums of a warp's units; `memory`: of the warp.
template <class T, int N, class Sums>
__device__ __forceinline__ void finish_tile(const GemmArgs& args, const Tile& tile,
                                            const Sums (&of)[T::units], float* memory) {
  const int lane = threadIdx.x % 32;
  const LaneRows<T> rows(args, tile);
#pragma unroll 1
  for (int piece = 0; piece * 16 < tile.count; ++piece) {
    // Rows lane / 4 and + 8 by two columns of two tiles of 8 tokens.
#pragma unroll
    for (int own = 0; own < N / 16; ++own)
      if (own == piece)
#pragma unroll
        for (int u = 0; u < T::units; ++u)
#pragma unroll
          for (int i = 0; i < 8; ++i)
            memory[(i / 4 * 8 + lane % 4 * 2 + i % 2) * T::sums_stride + u * 16 + lane / 4 + i / 2 % 2 * 8] =
                of[u].sums[own * 8 + i];
    __syncwarp();
    if (rows.unit < args.groups * kGroupUnits) rows.finish(args, tile, memory, piece * 16);
    __syncwarp();
  }
}

}  // namespace gatefold::cuda
