#pragma once
/// \file
/// The kernel of moe_gemm.h for many tokens an expert: multiplies by warpgroups (wgmma.cuh). Weights are the
/// A operand, decoded into registers; tokens are the B operand, read from shared memory.
///
/// One warpgroup fills rings of stages (moe_wgmma_ring.cuh), three or four multiply, each warp the 16 rows of
/// a unit: 32 columns are decoded while those before them are multiplied. Where scales belong to groups of
/// columns, a group's sums are kept by themselves, and are scaled and added up when its multiplies are done.

#include "cuda/moe_gemm.cuh"
#include "cuda/moe_wgmma_finish.cuh"

namespace gatefold::cuda {

/// Decoded weights of 32 columns of a unit: A of two multiplies.
template <class T>
struct Fragments {
  Pair a[2][4];

  template <int kLines>
  __device__ __forceinline__ void decode(const Codes<kLines>& codes, int at, const RecordScales<T::P>& scales,
                                         int block) {
    constexpr PackedFormat P = T::P;
    constexpr int per_row = P.value.bits / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Pair row[4];
      decode8<P, T::M>(codes.words + (2 * at + r) * per_row, scales.template term<T::M>(block, r), row);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i / 2][2 * (i % 2) + r] = row[i];
    }
  }
};

/// The sums of N tokens by the rows of a unit, and those of a group of columns that are not yet part of them.
template <class T, int N>
struct TileSums {
  float sums[N / 2], part[T::scaled_groups ? N / 2 : 1];

  __device__ void clear() {
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll
    for (float& sum : part) sum = 0;
  }
  /// Adds the sums of a group, whose multiplies are done. x_scales: of this lane's columns of B.
  __device__ __forceinline__ void add_part(const RecordScales<T::P>& scales, int group,
                                           const float* x_scales) {
    take_sums(part);
    const float of_rows[2] = {scales.scale(group, 0), scales.scale(group, 1)};
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      float scale = of_rows[i / 2 % 2];
      if constexpr (T::record_scales) scale *= x_scales[i / 4 * 8 + i % 2];
      sums[i] = fmaf(part[i], scale, sums[i]);
    }
  }
};

/// 128 columns by N tokens: the record of this warp's unit, its scales if they lie apart, and a stage of
/// activations. At the end all multiplies are done: the compiler would make those wait that are not, each for
/// the one before.
template <class T, int N>
__device__ __forceinline__ void multiply_record(const std::byte* record, const std::byte* extra,
                                                const std::byte* inputs, int half, TileSums<T, N>& to) {
  constexpr PackedFormat P = T::P;
  constexpr int per_row = P.value.bits / 4;         // words of 8 codes
  constexpr int kLoad = P.value.bits == 4 ? 2 : 1;  // blocks whose codes are loaded at once
  constexpr int kBlocks = kRecordColumns / 32, kLines = kLoad * per_row / 2;
  const int lane = threadIdx.x % 32;
  const std::uint32_t columns = swizzled_rows(__shfl_sync(~0u, shared_address(inputs), 0));
  const float* x =
      reinterpret_cast<const float*>(inputs + 2 * half) + lane % 4 * 2;  // scales, if there are any
  const RecordScales<P> scales(extra, lane);
  Codes<kLines> codes;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if (block % kLoad == 0) codes.load(record + block / kLoad * kLines * kLineBytes, lane);
    Fragments<T> fragments;
    fragments.decode(codes, block % kLoad, scales, block);
    begin_multiplies();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = block * 32 + i * 16;
      const std::uint32_t b = add_bytes(columns, k / 64 * half + k % 64 * 2);
      if constexpr (!T::scaled_groups)
        Wgmma<N, T::M>::template run<true>(to.sums, fragments.a[i], b);
      else if (k % P.group == 0)
        Wgmma<N, T::M>::template run<false>(to.part, fragments.a[i], b);
      else
        Wgmma<N, T::M>::template run<true>(to.part, fragments.a[i], b);
    }
    commit_multiplies();
    const bool ends = T::scaled_groups && (block + 1) * 32 % P.group == 0;
    if (ends || block + 1 == kBlocks)
      wait_for_multiplies<0>();
    else
      wait_for_multiplies<1>();
    if constexpr (T::scaled_groups)
      if (ends) to.add_part(scales, block * 32 / P.group, x);
  }
  if constexpr (!T::scaled_groups) take_sums(to.sums);
}

/// The next stages of both rings.
struct Places {
  StagePlace weights, inputs;
};

/// A tile by its item's tokens, at most N. Its first stage of weights is there.
template <class T, int N>
__device__ __forceinline__ void multiply_tile(const GemmArgs& args, const Items& items, const Tile& tile,
                                              WarpgroupRing<T>& ring, Places& at, std::byte* memory) {
  const int warp = threadIdx.x / 32;
  const Stages<T>& stages = ring.stages;
  TileSums<T, N> sums;
  sums.clear();
#pragma unroll 1
  for (int step = 0; step < args.steps; ++step) {
    const int of_stage = step % T::steps;
    if (of_stage == 0) wait_barrier(ring.weights_full + at.weights.index, at.weights.parity);
    wait_barrier(ring.inputs_full + at.inputs.index, at.inputs.parity);
    shared_memory_to_copies();  // multiplies read what was copied
    const std::byte* weights = memory + stages.weights_at + at.weights.index * T::weight_bytes;
    const int group = warp / kGroupUnits, unit = warp % kGroupUnits;
    const std::byte* record =
        weights + group * T::group_bytes + of_stage * T::step_bytes + unit * T::record_bytes;
    const std::byte* extra = T::P.apart() ? weights + T::extras_at + group * T::group_extra_bytes +
                                                of_stage * T::step_extra_bytes + unit * T::extra_stride
                                          : record + T::P.value_bytes();
    multiply_record<T, N>(record, extra, memory + at.inputs.index * stages.input_bytes, stages.half, sums);
    release_stage(ring.inputs_empty + at.inputs.index);
    at.inputs.advance(stages.inputs);
    if (of_stage + 1 < T::steps && step + 1 < args.steps) continue;
    release_stage(ring.weights_empty + at.weights.index);
    at.weights.advance(stages.weights);
  }
  finish_tile<T, N>(args, items, tile, sums.sums,
                    reinterpret_cast<float*>(memory + T::ring_bytes + warp * T::sums_bytes));
}

template <class T>
__device__ __forceinline__ void multiply_tiles(const GemmArgs& args, const Items& items,
                                               WarpgroupRing<T>& ring, std::byte* memory) {
  for (Places at;;) {
    wait_barrier(ring.weights_full + at.weights.index, at.weights.parity);
    const Tile tile = read_by_lane_0(ring.tiles[at.weights.index]);
    if (tile.count == 0) return;
    constexpr int fewer = T::tokens == kFewTokensOfTile ? 32 : 64;
    if (tile.count <= fewer)
      multiply_tile<T, fewer>(args, items, tile, ring, at, memory);
    else
      multiply_tile<T, T::tokens>(args, items, tile, ring, at, memory);
  }
}

template <class T>
__global__ void __launch_bounds__(T::threads, 1) moe_wgmma(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) uint4 shared[];
  __shared__ WarpgroupRing<T> ring;
  auto* memory = reinterpret_cast<std::byte*>(shared);
  memory += (1024 - shared_address(memory) % 1024) % 1024;
  auto* tables = reinterpret_cast<FewTables*>(memory + T::ring_bytes + T::warps * T::sums_bytes);

  ring.init(args.tile_tokens);
  if (!args.routed_early) wait_for_previous_kernel();
  const Items items = find_items<T>(args, *tables, memory);
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x >= T::warps * 32) {
    give_registers<T::fill_registers>();
    if (threadIdx.x < T::threads - T::input_threads) {
      copy_tile_weights<T>(args, items, ring, memory);
    } else {
      let_next_kernel_start();
      copy_tile_inputs<T>(args, items, ring, memory);
    }
  } else {
    take_registers<T::registers>();
    multiply_tiles<T>(args, items, ring, memory);
  }
}

}  // namespace gatefold::cuda
