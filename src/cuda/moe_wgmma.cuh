#pragma once
/// \file
/// The kernel of moe_gemm.h for many tokens an expert: multiplies by warpgroups (wgmma.cuh). Weights are the
/// A operand, decoded into registers; tokens are the B operand, read from shared memory.
///
/// Two or three warps fill rings of stages (moe_wgmma_ring.cuh). For few tokens four warpgroups multiply,
/// each warp the 16 rows of a unit: some decode while others multiply; up to 8 tokens by mma, each warp by
/// itself. For many tokens two do, each warp two units in turn: a batch of columns of one unit is decoded
/// while one of the other is multiplied. Where scales belong to groups of columns and are not multiplied into
/// the weights, sums are in units of the group's scale, and are brought to the next one's between two
/// batches.

#include "cuda/moe_gemm.cuh"
#include "cuda/moe_wgmma_finish.cuh"
#include "cuda/moe_wgmma_rounding.cuh"

namespace gatefold::cuda {

/// Codes of a batch of columns of a unit.
template <class T>
using BatchCodes = Codes<T::P, T::batch / 32>;

/// Decoded weights of a batch of columns of a unit: A of multiplies of 16 columns.
template <class T>
struct Fragments {
  static constexpr int blocks = T::batch / 32;
  Pair a[2 * blocks][4];

  __device__ __forceinline__ void decode(const BatchCodes<T>& codes, const RecordScales<T::P>& scales,
                                         int batch) {
#pragma unroll
    for (int i = 0; i < 2 * blocks; ++i) {
      const int block = i / 2, r = i % 2, of_record = batch * blocks + block;
      const Pair term = scales.template term<T::M>(of_record, r);
      Pair row[4];
      if constexpr (T::rounds_products)
        decode8_products<T::P, T::M>(codes.row(block, r), term,
                                     scales.scale_pair(of_record * 32 / T::P.group, r), row);
      else
        decode8_small<T::P, T::M>(codes.row(block, r), term, row);
#pragma unroll
      for (int j = 0; j < 4; ++j) a[2 * block + j / 2][2 * (j % 2) + r] = row[j];
    }
  }
  /// What has been decoded is not decoded later, among multiplies.
  __device__ __forceinline__ void keep() {
#pragma unroll
    for (auto& of_multiply : a)
      asm volatile(""
                   : "+r"(of_multiply[0]), "+r"(of_multiply[1]), "+r"(of_multiply[2]), "+r"(of_multiply[3]));
  }
};

/// Where the records of a warp's first unit, and their scales, are in a stage of weights: from the start of
/// shared memory on.
template <class T>
struct StageRecords {
  int record = 0, extra = 0;

  __device__ __forceinline__ void enter(int stage) {
    const int warp = threadIdx.x / 32, unit = warp / 4 * 4 * T::units + warp % 4, group = unit / kGroupUnits;
    record = stage + group * T::group_bytes + unit % kGroupUnits * T::record_bytes;
    extra = T::P.apart()
                ? stage + T::extras_at + group * T::group_extra_bytes + unit % kGroupUnits * T::extra_stride
                : record + T::P.value_bytes();
  }
  /// From a step of the stage to the next one.
  __device__ __forceinline__ void next_step() {
    record += T::step_bytes;
    extra += T::P.apart() ? T::step_extra_bytes : T::step_bytes;
  }
  /// A batch of columns of unit u.
  __device__ __forceinline__ BatchCodes<T> codes(const std::byte* memory, int of_stage, int batch,
                                                 int u) const {
    BatchCodes<T> codes;
    codes.load(memory + record + u * next_unit * T::group_bytes + of_stage * T::step_bytes,
               batch * (T::batch / 32), static_cast<int>(threadIdx.x % 32));
    return codes;
  }
  /// The scales of its record, if they are multiplied into weights or a group of columns begins with it.
  __device__ __forceinline__ RecordScales<T::P> scales(const std::byte* memory, int of_stage, int batch,
                                                       int u) const {
    constexpr PackedFormat P = T::P;
    constexpr int extra_group = P.apart() ? T::group_extra_bytes : T::group_bytes,
                  extra_step = P.apart() ? T::step_extra_bytes : T::step_bytes;
    const int lane = threadIdx.x % 32;
    RecordScales<P> scales;
    if (P.folded || P.zeros || T::rounds_products || batch * T::batch % P.group == 0)
      scales.load(memory + extra + u * next_unit * extra_group + of_stage * extra_step, lane);
    return scales;
  }

 private:
  static constexpr int next_unit = 4 / kGroupUnits;  ///< groups from a warp's unit to its next one
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
  __device__ __forceinline__ void add_part(const float* of_rows, const float* x_scales) {
    take_sums(part);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      sums[i] = fmaf(part[i], of_rows[i / 2 % 2] * x_scales[i / 4 * 8 + i % 2], sums[i]);
      part[i] = 0;
    }
    take_sums(part);
  }
};

/// Scales for the end of a tile are copied to shared memory while it is multiplied, where there is room for
/// them: those of its tokens, and then those of weights' rows. Warpgroups have their own.
template <class T>
__device__ __forceinline__ float* own_scales(std::byte* memory) {
  return reinterpret_cast<float*>(memory + Stages<T>::end_scales_at) + own_thread<T>() / 128 * T::end_scales;
}
template <class T>
__device__ __forceinline__ void copy_end_scales(const GemmArgs& args, const Tile& tile, std::byte* memory) {
  if constexpr (!T::bytes) {
    // Lanes are together then, which the compiler has to know (reduced_in_warp). Of bytes, below.
    sync_threads<128>(1 + threadIdx.x / 128);
    if constexpr (copies_ends<T>) UnitEnds<T>::copy(args, tile, memory);
  } else {
    const int thread = own_thread<T>() % 128;
    float* const own = own_scales<T>(memory);
    sync_threads<128>(1 + threadIdx.x / 128);  // the last tile's have been read
    if constexpr (T::scaled_tokens > 0)
      for (int i = thread; i < tile.count; i += 128)
        copy_4_bytes(own + i, args.inputs.row_scales + row_of_inputs<T>(args, tile) + i);
    if constexpr (T::P.row_scale) {
      const int first = tile.first_group * (kGroupUnits * kUnitRows) +
                        (T::token_rows ? 0 : threadIdx.x / 128 * T::end_rows);
      const int rows = min(T::end_rows, args.groups * (kGroupUnits * kUnitRows) - first);
      const auto* from =
          reinterpret_cast<const float*>(args.weights + tile.expert * args.expert_stride) + first;
      for (int i = thread; i < rows; i += 128) copy_4_bytes(own + T::scaled_tokens + i, from + i);
    }
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
  EndScales scales{args.inputs.row_scales == nullptr ? nullptr : args.inputs.row_scales + tile.row, nullptr};
  if constexpr (copies_ends<T>) {
    wait_for_copies();
    __syncwarp();
    scales.rows = UnitEnds<T>::of_warp(memory);
  }
  return scales;
}

/// A batch of columns by 8 tokens, by each warp itself: it waits for no other one. All of them read all
/// tokens' numbers from shared memory, which has no time for many more.
template <class T>
__device__ __forceinline__ void multiply_by_warps(float (&sums)[kTileTokens / 2], const Fragments<T>& a,
                                                  int batch, const std::byte* rows, int half) {
  const int lane = threadIdx.x % 32, row = lane % 8, own = row * 128 + (lane / 8 ^ row) * 16;
#pragma unroll
  for (int i = 0; i < T::batch / 16; i += 2) {
    const int k = batch * T::batch + i * 16;
    std::uint32_t b[4];  // of 32 columns
    load_matrices(rows + k / 64 * half + (own ^ k % 64 * 2), b);
    mma<T::M>(sums, a.a[i], b[0], b[1]);
    mma<T::M>(sums, a.a[i + 1], b[2], b[3]);
  }
}

/// A tile by its item's tokens, at most N. Its first stage of weights is there. A step's columns are decoded
/// and multiplied batch by batch.
template <class T, int N>
requires(!T::bytes && T::units == 1) __device__ __forceinline__ Tile
    multiply_tile(const GemmChain& chain, const Tile& next, const WarpgroupRing<T>& ring,
                  const RingBarriers<T>& barriers, Places& at, std::byte* memory, TileResult<T>& result) {
  static_assert(!T::record_scales);
  constexpr int kBatches = kRecordColumns / T::batch;
  const Stages<T> stages = reduced_in_warp(ring.stages);
  const int lane = threadIdx.x % 32;
  UnitSums<T, N> to;
  to.clear();
  Fragments<T> fragments[2];
  StageRecords<T> records;
  const int steps = reduced_in_warp(multiply_of<T>(chain, next).steps);
  at = reduced_in_warp(at);  // descriptors follow from it: no copies for each step
  const auto release_weights = [&] {
    if (lane == 0) arrive(barriers.weights_full + at.weights.index * 8 + barriers.empty);
    at.weights.advance(stages.weights);
  };
#pragma unroll 1
  for (int step = 0;;) {
    wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
    records.enter(stages.weights_at + at.weights.index * T::weight_bytes);
#pragma unroll
    for (int of_stage = 0; of_stage < T::steps; ++of_stage) {
      if (of_stage > 0 && step + of_stage == steps) break;
      const int of_inputs = of_stage % T::input_steps;
      const std::uint32_t inputs_full = barriers.inputs_full + at.inputs.index * 8;
      if (of_inputs == 0) wait_barrier(inputs_full, at.inputs.parity);
      const std::byte* const rows = memory + at.inputs.index * stages.input_bytes;
      const std::uint32_t columns =
          add_bytes(swizzled_rows(shared_address(rows)), of_inputs * 2 * stages.half);
      const Descriptor halves[2] = {descriptor(columns), descriptor(add_bytes(columns, stages.half))};
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        Fragments<T>& a = fragments[batch % 2];
        const auto scales = records.scales(memory, of_stage, batch, 0);
        a.decode(records.codes(memory, of_stage, batch, 0), scales, batch);
        if constexpr (T::scaled_groups)
          if (batch * T::batch % T::P.group == 0) {
            if (N > kTileTokens) wait_for_multiplies<0>();
            to.change_unit(scales, batch * T::batch / T::P.group);
          }
        if constexpr (N == kTileTokens) {
          multiply_by_warps(to.sums, a, batch, rows + of_inputs * 2 * stages.half, stages.half);
        } else {
          begin_multiplies();
#pragma unroll
          for (int i = 0; i < T::batch / 16; ++i) {
            const int k = batch * T::batch + i * 16;
            Wgmma<N, T::M>::run(to.sums, a.a[i], add_bytes(halves[k / 64], k % 64 * 2));
          }
          commit_multiplies();
          if (batch + 1 < kBatches)
            wait_for_multiplies<1>();  // of the fragments that come next
          else
            wait_for_multiplies<0>();
        }
      }
      if (of_inputs + 1 < T::input_steps && step + of_stage + 1 < steps) continue;
      __syncwarp();
      barriers.release_inputs(chain.of[0], inputs_full);
      at.inputs.advance(stages.inputs);
    }
    if ((step += T::steps) >= steps) break;
    release_weights();
  }
  const Tile tile = read_by_lane_0(ring.tiles[at.weights.index]);  // again: it took no registers meanwhile
  __syncwarp();
  release_weights();
  to.leave(result[0]);
  return tile;
}

/// The same of many tokens. While columns of a unit are multiplied, the next ones are decoded, and stages of
/// the next step are waited for.
template <class T, int N>
requires(!T::bytes && T::units == 2) __device__ __forceinline__ Tile
    multiply_tile(const GemmChain& chain, const Tile& next, const WarpgroupRing<T>& ring,
                  const RingBarriers<T>& barriers, Places& at, std::byte* memory, TileResult<T>& result) {
  static_assert(T::input_steps == 1);
  constexpr PackedFormat P = T::P;
  constexpr int kParts = kRecordColumns / T::batch * T::units;  // of a step: batches of columns by units
  const Stages<T> stages = reduced_in_warp(ring.stages);
  const int lane = threadIdx.x % 32;
  UnitSums<T, N> to[T::units];
#pragma unroll
  for (auto& sums : to) sums.clear();
  Fragments<T> fragments[2];
  StageRecords<T> records;
  const auto enter_weights = [&] { records.enter(stages.weights_at + at.weights.index * T::weight_bytes); };
  float of_rows[T::units][2];  // scales of the last record of each unit
  // Codes are read before what comes ahead of them is multiplied; those of 16 bits are operands themselves.
  constexpr bool kAhead = P.value.bits < 16;
  BatchCodes<T> codes;
  RecordScales<P> of_record[T::units];  // scales: those that are multiplied into weights are read once
  const auto load = [&](int part) { codes = records.codes(memory, 0, part / T::units, part % T::units); };
  const auto decode = [&](int part) {
    const int batch = part / T::units, u = part % T::units;
    if (!kAhead) load(part);
    if (batch == 0 || !T::rounds_products) of_record[u] = records.scales(memory, 0, batch, u);
    const RecordScales<P>& scales = of_record[u];
    fragments[part % 2].decode(codes, scales, batch);
    fragments[part % 2].keep();
    if constexpr (T::scaled_groups)  // this unit's multiplies are done, not the other one's
      if (batch * T::batch % P.group == 0) to[u].change_unit(scales, batch * T::batch / P.group);
    if (T::record_scales && batch == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) of_rows[u][r] = scales.scale(0, r);
  };
  const auto release_weights = [&] {
    if (lane == 0) arrive(barriers.weights_full + at.weights.index * 8 + barriers.empty);
    at.weights.advance(stages.weights);
  };
  const std::uint32_t all_rows = swizzled_rows(shared_address(memory));
  /// The rows of a stage of activations, as soon as they are there.
  const auto wait_for_inputs = [&](const StagePlace& place) {
    wait_barrier(barriers.inputs_full + place.index * 8, place.parity);
    return add_bytes(all_rows, reduced_in_warp(place.index * stages.input_bytes));
  };
  enter_weights();
  if (kAhead) load(0);
  decode(0);
  std::uint32_t rows = wait_for_inputs(at.inputs);
  int left = multiply_of<T>(chain, next).steps, left_of_stage = T::steps;  // that are not multiplied
#pragma unroll 1
  for (bool last = false; !last;) {
    const Descriptor halves[2] = {descriptor(rows), descriptor(add_bytes(rows, stages.half))};
    last = --left == 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int column = part / T::units * T::batch;
      if (kAhead && part + 1 < kParts) load(part + 1);
      UnitSums<T, N>& sums = to[part % T::units];
      begin_multiplies();
#pragma unroll
      for (int i = 0; i < T::batch / 16; ++i) {
        const int k = column + i * 16;
        Wgmma<N, T::M>::run(sums.to(), fragments[part % 2].a[i], add_bytes(halves[k / 64], k % 64 * 2));
      }
      commit_multiplies();
      wait_for_multiplies<1>();  // of the fragments that come next
      if (part + 1 < kParts) {
        decode(part + 1);
        continue;
      }
      [[maybe_unused]] const float of_first[2] = {of_rows[0][0], of_rows[0][1]};  // the next one is decoded
      StagePlace next_inputs = at.inputs;
      next_inputs.advance(stages.inputs);
      if (!last) {  // without a branch the compiler would wait for the multiplies first
        if (T::steps == 1 || --left_of_stage == 0) {
          left_of_stage = T::steps;
          __syncwarp();
          release_weights();
          wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
          enter_weights();
        } else {
          records.next_step();
        }
        if (kAhead) load(0);
        decode(0);
        rows = wait_for_inputs(next_inputs);
      }
      wait_for_multiplies<0>();
      if constexpr (T::record_scales) {
        const std::byte* const x_scales = memory + at.inputs.index * stages.input_bytes + 2 * stages.half;
#pragma unroll
        for (int u = 0; u < T::units; ++u)
          to[u].add_part(u == 0 ? of_first : of_rows[u],
                         reinterpret_cast<const float*>(x_scales) + lane % 4 * 2);
        __syncwarp();
      }
      barriers.release_inputs(chain.of[0], barriers.inputs_full + at.inputs.index * 8);
      at.inputs = next_inputs;
    }
  }
  const Tile tile = read_by_lane_0(ring.tiles[at.weights.index]);  // again: it took no registers meanwhile
  __syncwarp();
  release_weights();
#pragma unroll
  for (int u = 0; u < T::units; ++u) to[u].leave(result[u]);
  return tile;
}

/// By the first loop from this one on that has enough tokens.
template <class T, int kLoop = 0>
__device__ __forceinline__ Tile multiply_tile_of(const GemmChain& chain, const Tile& next,
                                                 const WarpgroupRing<T>& ring,
                                                 const RingBarriers<T>& barriers, Places& at,
                                                 std::byte* memory, TileResult<T>& result) {
  constexpr int N = T::loops.tokens[kLoop];
  if constexpr (N < T::tokens)
    if (next.count > N)
      return multiply_tile_of<T, kLoop + 1>(chain, next, ring, barriers, at, memory, result);
  return multiply_tile<T, N>(chain, next, ring, barriers, at, memory, result);
}

template <class T>
__device__ __forceinline__ void multiply_tiles(const GemmChain& chain, WarpgroupRing<T>& ring,
                                               std::byte* memory) {
  const RingBarriers<T> barriers(ring);
  bool rounded = false;
  for (Places at;;) {
    wait_barrier(barriers.weights_full + at.weights.index * 8, at.weights.parity);
    Tile next = read_by_lane_0(ring.tiles[at.weights.index]);
    if (next.count == 0) return;
    if constexpr (rounds<T>) {
      if (next.second) {
        if (!rounded) round_rows<T>(chain, at, memory + Stages<T>::ends_at);
        rounded = true;
        next = read_by_lane_0(ring.tiles[at.weights.index]);  // it took no registers meanwhile
        // Scales of tokens are there as well then.
        wait_barrier(barriers.inputs_full + at.inputs.index * 8, at.inputs.parity);
      }
    }
    copy_end_scales<T>(multiply_of<T>(chain, next), next, memory);
    TileResult<T> result;
    const Tile tile = multiply_tile_of<T>(chain, next, ring, barriers, at, memory, result);
    const GemmArgs& args = multiply_of<T>(chain, tile);
    finish_tile<T>(args, tile, end_scales<T>(args, tile, memory), memory, result);
    if constexpr (T::counts) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(ring.found.multiplied + tile.place);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::threads, 1) moe_wgmma(const __grid_constant__ GemmChain chain) {
  extern __shared__ __align__(1024) uint4 shared[];
  __shared__ WarpgroupRing<T> ring;
  static_assert((sizeof(ring) + 1023) / 1024 * 1024 + T::shared_bytes <= kSharedBytes);
  auto* memory = reinterpret_cast<std::byte*>(shared);
  memory += (1024 - shared_address(memory) % 1024) % 1024;

  const GemmArgs& args = chain.of[0];
  ring.init(args);
  T::may_share ? sync_cluster() : __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp >= T::warps) {
    give_registers<T::fill_registers>();
    if (!args.routed_early) wait_for_previous_kernel();
    if (warp == T::warps) {
      copy_tile_weights<T, false>(chain, ring, memory);
    } else if (warp == T::warps + 1) {
      if constexpr (!T::counts) find_tiles<T>(args, ring.found.inputs, 0);
      wait_for_previous_kernel();
      global_memory_to_copies();
      let_next_kernel_start();
      copy_tile_inputs<T>(chain, ring, memory);
    } else if (warp == T::warps + 2) {
      if constexpr (T::P.apart()) copy_tile_weights<T, true>(chain, ring, memory);
    } else {
      if constexpr (T::counts) find_tiles_for_all<T>(chain, ring.found);
    }
  } else {
    take_registers<T::registers>();
    wait_for_previous_kernel();
    multiply_tiles<T>(chain, ring, memory);
  }
  if constexpr (T::may_share) sync_cluster();  // no block ends while another one writes to its memory
}

}  // namespace gatefold::cuda
