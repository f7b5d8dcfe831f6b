#pragma once
/// \file
/// The kernel of moe_gemm.h for many tokens an expert: multiplies by warpgroups (wgmma.cuh). Weights are the
/// A operand, decoded into registers; tokens are the B operand, read from shared memory.
///
/// Two warps fill rings of stages (moe_wgmma_ring.cuh), two or four warpgroups multiply, each warp the 16
/// rows of one or two units: a batch of columns of a unit is decoded while the one before it is multiplied.
/// Where scales belong to groups of columns, sums are in units of the group's scale, and are brought to the
/// next one's between two batches.

#include "cuda/moe_gemm.cuh"
#include "cuda/moe_wgmma_finish.cuh"

namespace gatefold::cuda {

/// Decoded weights of a batch of columns of a unit: A of multiplies of 16 columns.
template <class T>
struct Fragments {
  static constexpr int blocks = T::batch / 32;
  Pair a[2 * blocks][4];

  __device__ __forceinline__ void decode(const std::byte* record, const RecordScales<T::P>& scales, int batch,
                                         int lane) {
    Codes<T::P, blocks> codes;
    codes.load(record, batch * blocks, lane);
#pragma unroll
    for (int i = 0; i < 2 * blocks; ++i) {
      const int block = i / 2, r = i % 2;
      Pair row[4];
      decode8<T::P, T::M>(codes.row(block, r), scales.template term<T::M>(batch * blocks + block, r), row);
#pragma unroll
      for (int j = 0; j < 4; ++j) a[2 * block + j / 2][2 * (j % 2) + r] = row[j];
    }
  }
};

/// The sums of N tokens by the rows of a unit.
template <class T, int N>
struct UnitSums {
  float sums[N / 2];
  float part[T::record_scales ? N / 2 : 1];  ///< of a group of columns, not yet among the sums
  float unit[2];                             ///< of both rows' sums: the scale of the last group

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll
    for (float& sum : part) sum = 0;
#pragma unroll
    for (float& scale : unit) scale = 1;
  }
  __device__ __forceinline__ float (&to())[N / 2] {
    if constexpr (T::record_scales)
      return part;
    else
      return sums;
  }
  /// Sums, whose multiplies are done, in units of a group's scales.
  __device__ __forceinline__ void change_unit(const RecordScales<T::P>& scales, int group) {
    take_sums(sums);
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = scales.scale(group, r), next = fabsf(scale) < 0x1p-126f ? unit[r] : scale;
      factors[r] = unit[r] * reciprocal(next);
      unit[r] = next;
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] *= factors[i / 2 % 2];
    take_sums(sums);
  }
  /// All multiplies are done.
  __device__ __forceinline__ void leave(UnitResult<T>& result) {
    take_sums(sums);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) result.sums[i] = sums[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) result.unit[r] = unit[r];
  }
  /// Adds the sums of a group, whose multiplies are done. x_scales: of this lane's columns of B.
  __device__ __forceinline__ void add_part(const RecordScales<T::P>& scales, int group,
                                           const float* x_scales) {
    take_sums(part);
    const float of_rows[2] = {scales.scale(group, 0), scales.scale(group, 1)};
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      sums[i] = fmaf(part[i], of_rows[i / 2 % 2] * x_scales[i / 4 * 8 + i % 2], sums[i]);
      part[i] = 0;
    }
    take_sums(part);
  }
};

/// The next stages of both rings.
struct Places {
  StagePlace weights, inputs;
};

/// Scales for the end of a tile are copied to shared memory while it is multiplied, where there is room for
/// them: those of its tokens, and then those of weights' rows. Warpgroups have their own.
template <class T>
__device__ __forceinline__ float* own_scales(std::byte* memory) {
  return reinterpret_cast<float*>(memory + Stages<T>::end_scales_at) + threadIdx.x / 128 * T::end_scales;
}
template <class T>
__device__ __forceinline__ void copy_end_scales(const GemmArgs& args, const Tile& tile, std::byte* memory) {
  if constexpr (T::bytes) {
    const int thread = threadIdx.x % 128;
    float* const own = own_scales<T>(memory);
    sync_threads<128>(1 + threadIdx.x / 128);  // the last tile's have been read
    if constexpr (T::scaled_tokens > 0)
      for (int i = thread; i < tile.count; i += 128)
        copy_4_bytes(own + i, args.inputs.row_scales + tile.row + i);
    const int row =
        tile.first_group * (kGroupUnits * kUnitRows) + threadIdx.x / 128 * kWarpgroupRows + thread;
    if (T::P.row_scale && thread < kWarpgroupRows && row < args.groups * (kGroupUnits * kUnitRows))
      copy_4_bytes(own + T::scaled_tokens + thread,
                   reinterpret_cast<const float*>(args.weights + tile.expert * args.expert_stride) + row);
  }
}
/// At the end of the tile.
template <class T>
__device__ __forceinline__ EndScales end_scales(const GemmArgs& args, const Tile& tile, std::byte* memory) {
  if constexpr (T::bytes) {
    wait_for_copies();
    sync_threads<128>(1 + threadIdx.x / 128);
    const float* own = own_scales<T>(memory);
    return {T::scaled_tokens > 0 ? own : nullptr, own + T::scaled_tokens};
  }
  return {args.inputs.row_scales == nullptr ? nullptr : args.inputs.row_scales + tile.row, nullptr};
}

/// A tile by its item's tokens, at most N. Its first stage of weights is there.
template <class T, int N>
__device__ __forceinline__ Tile multiply_tile(const GemmArgs& args, const WarpgroupRing<T>& ring,
                                              const RingBarriers<T>& barriers, Places& at, std::byte* memory,
                                              TileResult<T>& result) {
  constexpr PackedFormat P = T::P;
  constexpr int kBatches = kRecordColumns / T::batch;
  const Stages<T>& stages = ring.stages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int unit = warp / 4 * 4 * T::units + warp % 4, group = unit / kGroupUnits;  // the first one
  constexpr int next_unit = 4 / kGroupUnits;  // groups from a warp's unit to its next one
  UnitSums<T, N> to[T::units];
#pragma unroll
  for (auto& sums : to) sums.clear();
  Fragments<T> fragments[2];
  const auto release_weights = [&] {
    if (lane == 0) arrive(barriers.weights_full + at.weights.index * 8 + barriers.empty);
    at.weights.advance(stages.weights);
  };
#pragma unroll 1
  for (int step = 0;;) {
    wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
    const std::byte* const stage = memory + stages.weights_at + at.weights.index * T::weight_bytes;
    const std::byte* const records = stage + group * T::group_bytes + unit % kGroupUnits * T::record_bytes;
    const std::byte* const extras = T::P.apart() ? stage + T::extras_at + group * T::group_extra_bytes +
                                                       unit % kGroupUnits * T::extra_stride
                                                 : records + T::P.value_bytes();
#pragma unroll
    for (int of_stage = 0; of_stage < T::steps; ++of_stage) {
      if (of_stage > 0 && step + of_stage == args.steps) break;
      const bool first = of_stage % T::input_steps == 0,
                 last = (of_stage + 1) % T::input_steps == 0 || step + of_stage + 1 == args.steps;
      const std::uint32_t inputs_full = barriers.inputs_full + at.inputs.index * 8;
      if (first) wait_barrier(inputs_full, at.inputs.parity);
      const std::byte* record = records + of_stage * T::step_bytes;
      const std::byte* extra = extras + of_stage * (T::P.apart() ? T::step_extra_bytes : T::step_bytes);
      const std::byte* inputs = memory + at.inputs.index * stages.input_bytes;
      const std::uint32_t columns = add_bytes(swizzled_rows(__shfl_sync(~0u, shared_address(inputs), 0)),
                                              of_stage % T::input_steps * 2 * stages.half);
      const std::uint32_t halves[2] = {columns, add_bytes(columns, stages.half)};
      const float* x = reinterpret_cast<const float*>(inputs + 2 * stages.half) + lane % 4 * 2;  // scales

#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch)
#pragma unroll
        for (int u = 0; u < T::units; ++u) {
          const RecordScales<P> scales(
              extra + u * next_unit * (T::P.apart() ? T::group_extra_bytes : T::group_bytes), lane);
          Fragments<T>& a = fragments[(batch * T::units + u) % 2];
          a.decode(record + u * next_unit * T::group_bytes, scales, batch, lane);
          if constexpr (T::scaled_groups)
            if (batch * T::batch % P.group == 0) {
              if constexpr (T::units == 1) wait_for_multiplies<0>();
              to[u].change_unit(scales, batch * T::batch / P.group);
            }
          begin_multiplies();
#pragma unroll
          for (int i = 0; i < T::batch / 16; ++i) {
            const int k = batch * T::batch + i * 16;
            Wgmma<N, T::M>::run(to[u].to(), a.a[i], add_bytes(halves[k / 64], k % 64 * 2));
          }
          commit_multiplies();
          if (T::record_scales && batch + 1 == kBatches) {
            wait_for_multiplies<0>();
            if constexpr (T::record_scales) to[u].add_part(scales, 0, x);
          } else if (batch * T::units + u + 1 < kBatches * T::units) {
            wait_for_multiplies<1>();  // of the fragments that come next
          } else {
            wait_for_multiplies<0>();
          }
        }
      if (!last) continue;
      __syncwarp();
      barriers.release_inputs(args, inputs_full);
      at.inputs.advance(stages.inputs);
    }
    if ((step += T::steps) >= args.steps) break;
    release_weights();
  }
  const Tile tile = read_by_lane_0(ring.tiles[at.weights.index]);  // again: it took no registers meanwhile
  __syncwarp();
  release_weights();
#pragma unroll
  for (int u = 0; u < T::units; ++u) to[u].leave(result[u]);
  return tile;
}

/// With as few tokens as will do: N, N + token_step ..
template <class T, int N>
__device__ __forceinline__ Tile multiply_tile_of(const GemmArgs& args, const WarpgroupRing<T>& ring,
                                                 const RingBarriers<T>& barriers, int count, Places& at,
                                                 std::byte* memory, TileResult<T>& result) {
  if constexpr (N < T::tokens)
    if (count > N)
      return multiply_tile_of<T, N + T::token_step>(args, ring, barriers, count, at, memory, result);
  return multiply_tile<T, N>(args, ring, barriers, at, memory, result);
}

template <class T>
__device__ __forceinline__ void multiply_tiles(const GemmArgs& args, const WarpgroupRing<T>& ring,
                                               std::byte* memory) {
  const RingBarriers<T> barriers(ring);
  for (Places at;;) {
    wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
    const Tile next = read_by_lane_0(ring.tiles[at.weights.index]);
    if (next.count == 0) return;
    copy_end_scales<T>(args, next, memory);
    TileResult<T> result;
    const Tile tile =
        multiply_tile_of<T, T::least_tokens>(args, ring, barriers, next.count, at, memory, result);
    finish_tile<T>(args, tile, end_scales<T>(args, tile, memory), memory, result);
  }
}

template <class T>
__global__ void __launch_bounds__(T::threads, 1) moe_wgmma(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) uint4 shared[];
  __shared__ WarpgroupRing<T> ring;
  static_assert((sizeof(ring) + 1023) / 1024 * 1024 + T::shared_bytes <= kSharedBytes);
  auto* memory = reinterpret_cast<std::byte*>(shared);
  memory += (1024 - shared_address(memory) % 1024) % 1024;

  ring.init(args);
  T::may_share ? sync_cluster() : __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp >= T::warps) {
    give_registers<T::fill_registers>();
    if (warp == T::warps) {
      if (!args.routed_early) wait_for_previous_kernel();
      copy_tile_weights<T>(args, ring, memory);
    } else if (warp == T::warps + 1) {
      wait_for_previous_kernel();
      global_memory_to_copies();
      let_next_kernel_start();
      copy_tile_inputs<T>(args, ring, memory);
    }
  } else {
    take_registers<T::registers>();
    wait_for_previous_kernel();
    multiply_tiles<T>(args, ring, memory);
  }
  if constexpr (T::may_share) sync_cluster();  // no block ends while another one writes to its memory
}

}  // namespace gatefold::cuda
