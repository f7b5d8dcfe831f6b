#pragma once
/// \file
/// What a kernel of moe_wgmma.cuh is made for, and how its operands come to shared memory.
///
/// A tile is 8 or 6 groups of units (256 or 192 rows) by the tokens of an item. Thread blocks take tiles in
/// turn, in an order in which the items of one expert read the same weights at about the same time, out of
/// the L2 cache. Two rings of stages run ahead of the multiplies: weights, the next one or two steps of each
/// group of a tile, and activations, the next 128 columns of the tokens in rows of 64, swizzled for the
/// multiply.

#include "cuda/moe_gemm_ring.cuh"
#include "cuda/wgmma.cuh"

namespace gatefold::cuda {

/// `kMany`: for items of more than kFewTokensOfTile, whose sums leave registers for three warpgroups, not
/// four.
template <class SchemeTag, bool kWide, InputKind kInput, bool kMany>
struct WarpgroupTraits {
  using Plain = GemmTraits<SchemeTag, kWide, kInput, 1>;
  static constexpr PackedFormat P = Plain::P;
  static constexpr Format M = Plain::M;
  /// Operands that one multiply can take.
  static constexpr bool possible = !Plain::split_inputs && !Plain::split_weights;
  static constexpr bool record_scales = Plain::record_scales, scaled_groups = Plain::scaled_groups;
  static constexpr int record_bytes = Plain::record_bytes, step_bytes = Plain::step_bytes;
  static constexpr int step_extra_bytes = Plain::step_extra_bytes, extra_stride = Plain::extra_stride;

  /// The most of an item. Registers do not hold the sums of 128 tokens beside those of a group of columns.
  static constexpr int tokens = !kMany ? kFewTokensOfTile : scaled_groups ? 104 : 128;
  static constexpr int warps = kMany ? 12 : 16;  ///< that multiply, a unit each
  static constexpr int threads = (warps + 4) * 32, input_threads = 3 * 32;
  static constexpr int groups = warps / kGroupUnits;  ///< of a tile
  /// Of the threads that multiply, and of those that fill the rings.
  static constexpr int registers = kMany ? 152 : 104, fill_registers = kMany ? 56 : 64;

  /// Of a stage of weights: copies of less than 4 KB are slow.
  static constexpr int steps = step_bytes < 4096 ? 2 : 1;
  static constexpr int group_bytes = steps * step_bytes, group_extra_bytes = steps * step_extra_bytes;
  static constexpr int extras_at = groups * group_bytes,
                       weight_bytes = groups * (group_bytes + group_extra_bytes);
  /// Of a warp that stores sums: 16 tokens of a unit, without bank conflicts.
  static constexpr int sums_stride = kUnitRows + 4, sums_bytes = 16 * sums_stride * 4;
  static constexpr int rest_bytes = warps * sums_bytes + static_cast<int>(sizeof(FewTables));
  static constexpr int ring_bytes = (229376 - rest_bytes) / 1024 * 1024;
  static constexpr int shared_bytes = ring_bytes + rest_bytes + 1024;
  static constexpr int most_stages = 8;  ///< of a ring
};

/// The stages of both rings, where items have at most so many tokens. Activations come first: swizzled rows
/// begin at multiples of 1024 bytes.
template <class T>
struct Stages {
  int half;  ///< bytes of 64 columns of the tokens
  int input_bytes, inputs, weights_at, weights;

  Stages() = default;
  __device__ explicit Stages(int tokens)
      : half(tokens * 128),
        input_bytes(2 * half + (T::record_scales ? 1024 : 0)),
        inputs(min(tokens <= 32                 ? 6
                   : tokens <= kFewTokensOfTile ? 4
                                                : 3,
                   (T::ring_bytes - 2 * T::weight_bytes) / input_bytes)),
        weights_at(inputs * input_bytes),
        weights(min(T::most_stages, (T::ring_bytes - weights_at) / T::weight_bytes)) {}
};

/// A tile of an item; of no tokens: there are no more.
struct alignas(16) Tile {
  std::int16_t expert = 0, count = 0;
  std::int32_t first = 0, first_group = 0, unused = 0;
};

/// Tile i of all, or none. Bands of so many items are multiplied tile by tile.
template <class T>
__device__ __forceinline__ Tile tile_at(const GemmArgs& args, const Items& items, int i) {
  constexpr int band_items = 8;
  const int per_item = (args.groups + T::groups - 1) / T::groups;
  if (i >= items.count * per_item) return {};
  const int band = i / (band_items * per_item), rest = i % (band_items * per_item);
  const int width = min(band_items, items.count - band * band_items);
  const Item item = items.at(args, band * band_items + rest % width);
  return {item.expert, item.count, item.first, rest / width * T::groups};
}

/// The place of a stage, and the parity of its phase.
struct StagePlace {
  int index = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++index < stages) return;
    index = 0;
    parity ^= 1;
  }
};

/// What belongs to the stages in shared memory.
template <class T>
struct WarpgroupRing {
  std::uint64_t weights_full[T::most_stages], weights_empty[T::most_stages];
  std::uint64_t inputs_full[T::most_stages], inputs_empty[T::most_stages];
  Tile tiles[T::most_stages];  ///< of stages of weights
  Stages<T> stages;
  std::uint32_t rows[128];  ///< of the tile whose activations are being copied, in 16 bytes

  __device__ void init(int tokens) {
    if (threadIdx.x == 0) stages = Stages<T>(tokens);
    if (threadIdx.x >= T::most_stages) return;
    init_barrier(weights_full + threadIdx.x, 1);
    init_barrier(weights_empty + threadIdx.x, T::warps);
    init_barrier(inputs_full + threadIdx.x, T::input_threads);
    init_barrier(inputs_empty + threadIdx.x, T::warps);
    publish_barriers();
  }
};
/// This warp has read a stage.
__device__ __forceinline__ void release_stage(std::uint64_t* empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(empty);
}

/// Copies weights, a stage as soon as it has been read; by one warp.
template <class T>
__device__ void copy_tile_weights(const GemmArgs& args, const Items& items, WarpgroupRing<T>& ring,
                                  std::byte* memory) {
  const Stages<T> stages = ring.stages;
  const int lane = threadIdx.x % 32, group = lane % T::groups;
  const bool extra = lane >= T::groups;
  const std::int64_t begin = T::P.row_scale ? args.groups * (kGroupUnits * kUnitRows * 4) : 0;
  const std::int64_t extras_at = static_cast<std::int64_t>(args.groups) * args.steps * T::step_bytes;
  const int each = extra ? T::step_extra_bytes : T::step_bytes;
  std::byte* to = memory + stages.weights_at +
                  (extra ? T::extras_at + group * T::group_extra_bytes : group * T::group_bytes);
  StagePlace place;
  bool all_filled = false;  // once
  for (int next = static_cast<int>(blockIdx.x);; next += static_cast<int>(gridDim.x)) {
    const Tile tile = tile_at<T>(args, items, next);
    const int groups = min(T::groups, args.groups - tile.first_group);
    const std::byte* from = args.weights + tile.expert * args.expert_stride + begin +
                            (extra ? extras_at : std::int64_t{0}) +
                            static_cast<std::int64_t>(tile.first_group + group) * args.steps * each;
    for (int step = 0; step < args.steps; step += T::steps) {
      if (all_filled) wait_barrier(ring.weights_empty + place.index, place.parity ^ 1);
      std::uint64_t* full = ring.weights_full + place.index;
      const int steps = tile.count == 0 ? 0 : min(T::steps, args.steps - step);
      if (lane == 0) {
        ring.tiles[place.index] = tile;
        expect_bytes(full, groups * steps * (T::step_bytes + T::step_extra_bytes));
      }
      __syncwarp();
      if (tile.count == 0) return;
      if (group < groups && lane < (T::P.apart() ? 2 : 1) * T::groups)
        copy_bulk(to + place.index * T::weight_bytes, from + static_cast<std::int64_t>(step) * each,
                  steps * each, full);
      place.advance(stages.weights);
      all_filled |= place.index == 0;
    }
  }
}

/// A barrier for the threads that copy activations.
template <class T>
__device__ __forceinline__ void sync_inputs() {
  asm volatile("bar.sync 2, %0;" ::"n"(T::input_threads) : "memory");
}

/// The same of activations, by three warps: 16 threads copy 128 columns of a row.
template <class T>
__device__ void copy_tile_inputs(const GemmArgs& args, const Items& items, WarpgroupRing<T>& ring,
                                 std::byte* memory) {
  const Stages<T> stages = ring.stages;
  const GemmInputs& in = args.inputs;
  constexpr int apart = T::input_threads / 16, ahead = 7;
  const int thread = threadIdx.x - (T::threads - T::input_threads), piece = thread % 16, first = thread / 16;
  std::byte* to = memory + piece / 8 * stages.half;
  StagePlace place;
  bool all_filled = false;  // once
  for (int next = static_cast<int>(blockIdx.x);; next += static_cast<int>(gridDim.x)) {
    const Tile tile = tile_at<T>(args, items, next);
    if (tile.count == 0) return;
    sync_inputs<T>();  // all have copied the tile before
    for (int token = thread; token < tile.count; token += T::input_threads)
      ring.rows[token] = static_cast<std::uint32_t>(items.slot(tile.first + token) / in.slots_of_row) *
                         static_cast<std::uint32_t>(in.stride / 8);
    sync_inputs<T>();
    const auto* from = reinterpret_cast<const uint4*>(in.rows) + piece;
    for (int step = 0; step < args.steps; ++step, from += kRecordColumns / 8) {
      if (all_filled) wait_barrier(ring.inputs_empty + place.index, place.parity ^ 1);
      std::byte* stage = to + place.index * stages.input_bytes;
#pragma unroll 1
      for (int begin = first; begin < tile.count; begin += apart * ahead) {
        std::uint32_t rows[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i) rows[i] = ring.rows[min(begin + apart * i, tile.count - 1)];
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
          const int token = begin + apart * i;
          if (token < tile.count)
            copy_16_bytes(stage + token * 128 + ((piece ^ token) % 8) * 16, from + rows[i]);
        }
      }
      if constexpr (T::record_scales)
        for (int token = thread; token < tile.count; token += T::input_threads)
          copy_4_bytes(memory + place.index * stages.input_bytes + 2 * stages.half + token * 4,
                       in.record_scales + ring.rows[token] / (kRecordColumns / 8) + step);
      arrive_after_copies(ring.inputs_full + place.index);
      place.advance(stages.inputs);
      all_filled |= place.index == 0;
    }
  }
}

}  // namespace gatefold::cuda
