#pragma once
/// \file
/// What the end of a tile (moe_wgmma_finish.cuh) reads, and what gate and up leave there.

#include "cuda/moe_wgmma_ring.cuh"

namespace gatefold::cuda {

/// Whether gate and up leave rows of bf16, not f32, for what rounds each by its largest number, or by one
/// number: half of what is written and read. (What is rounded by groups of columns, ends leave as codes by
/// many tokens.)
template <class T>
inline constexpr bool leaves_narrow_rows = T::bytes && !T::record_scales;

/// Scales of a tile's tokens, or nullptr; and of the rows of a warpgroup's weights, or what UnitEnds has of a
/// warp.
struct EndScales {
  const float *tokens, *rows;
};

/// Whether what an end reads of memory is copied to where it then leaves results while the tile is
/// multiplied, as a load at the end would wait behind all weights that are on their way. Two units of a warp
/// would need more memory than that, and a stage of weights less costs more.
template <class T>
inline constexpr bool copies_ends = !T::bytes && T::units == 1;

/// That, of a warp's unit: the scales of 16 rows, and 16 biases, gates' before ups'.
template <class T>
struct UnitEnds {
  static_assert(copies_ends<T> && 4 * kUnitEndBytes <= T::end_tokens * kEndBytes);

  static __device__ __forceinline__ float* of_warp(std::byte* memory) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return reinterpret_cast<float*>(memory + Stages<T>::ends_at + warp / 4 * (T::end_tokens * kEndBytes) +
                                    warp % 4 * kUnitEndBytes);
  }
  /// By a warp, of its warpgroup's next tile, when the others do not read the memory any more.
  static __device__ __forceinline__ void copy(const GemmArgs& args, const Tile& tile, std::byte* memory) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
              r = lane % kUnitRows, unit = tile.first_group * kGroupUnits + warp;
    const bool of_scales = lane < kUnitRows, gate_up = args.kind == GemmKind::gate_up;
    const int row = gate_up ? unit * (kUnitRows / 2) + r % (kUnitRows / 2) : unit * kUnitRows + r;
    const auto* scales = reinterpret_cast<const float*>(args.weights + tile.expert * args.expert_stride);
    const float* bias = gate_up && r >= kUnitRows / 2 ? args.up_bias : args.bias;
    const bool there =
        of_scales ? T::P.row_scale && unit < args.groups * kGroupUnits : bias != nullptr && row < args.rows;
    copy_4_bytes_if(
        there, of_warp(memory) + lane,
        of_scales ? scales + unit * kUnitRows + r : bias + (std::int64_t{tile.expert} * args.rows + row));
  }
};

/// What an end reads of GemmArgs, by the same names. One multiply's are constants, which instructions read in
/// place. One of two multiplies' would be loaded where they are needed, one after the other: all are at once.
struct EndArgs {
  const std::byte* weights;
  std::int64_t expert_stride;
  std::int32_t groups, rows;
  GemmKind kind;
  Activation activation;
  const float *bias, *up_bias;
  void* out;
  std::int64_t out_stride;
  std::int32_t out_tile_rows;
  DType out_dtype;

  __device__ __forceinline__ explicit EndArgs(const GemmArgs& args)
      : weights(args.weights),
        expert_stride(args.expert_stride),
        groups(kept(args.groups)),
        rows(kept(args.rows)),
        kind(kept(args.kind)),
        activation{kept(args.activation.kind), kept(args.activation.alpha), kept(args.activation.beta),
                   kept(args.activation.limit)},
        bias(kept(args.bias)),
        up_bias(kept(args.up_bias)),
        out(kept(args.out)),
        out_stride(kept(args.out_stride)),
        out_tile_rows(kept(args.out_tile_rows)),
        out_dtype(kept(args.out_dtype)) {}
};

}  // namespace gatefold::cuda
