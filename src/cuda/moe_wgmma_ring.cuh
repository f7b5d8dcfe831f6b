#pragma once
/// \file
/// What a kernel of moe_wgmma.cuh is made for, and how its operands come to shared memory.
///
/// A tile is 8 groups of units (256 rows) by the tokens of an item. Thread blocks take tiles in turn, or as
/// they come to them, in an order in which the items of one expert read the same weights at about the same
/// time, out of the L2 cache. Two rings of stages run ahead of the multiplies: weights, the next one or two
/// steps of each group of a tile, and activations, the next 128 columns of the tokens, which lie in memory as
/// the multiply reads them.

#include "cuda/decode_bytes.h"
#include "cuda/moe_wgmma_tiles.cuh"
#include "cuda/wgmma.cuh"

namespace gatefold::cuda {

inline constexpr int kSharedBytes = 232448;              ///< of a thread block
inline constexpr int kWarpgroupRows = 4 * kUnitRows;     ///< of a unit of each of its warps
inline constexpr int kEndBytes = kWarpgroupRows * 2;     ///< of a token's results: 16 bits each
inline constexpr int kUnitEndBytes = 2 * kUnitRows * 4;  ///< UnitEnds (moe_wgmma_finish.cuh)

/// `kMany`: for items of more than kFewTokensOfTile, whose sums leave registers for two warpgroups of two
/// units a warp, not for four of one.
template <class SchemeTag, InputKind kInput, bool kMany>
struct WarpgroupTraits {
  using Plain = GemmTraits<SchemeTag, kInput, 1>;
  static constexpr PackedFormat P = Plain::P;
  static constexpr Format M = Plain::M;
  static constexpr bool bytes = false, few = !kMany;
  static constexpr bool may_share = false, counts = true, of_tensors = false, reads_codes = false;
  /// Operands that one multiply can take.
  static constexpr bool possible = !Plain::split_inputs && !Plain::split_weights;
  /// Sums of a group of columns are kept by themselves, or are brought from one group's scale to the next,
  /// unless scales are multiplied into weights.
  static constexpr bool record_scales = Plain::record_scales;
  static constexpr bool rounds_products = cuda::rounds_products(P, M);
  static constexpr bool scaled_groups = Plain::scaled_groups && !record_scales && !rounds_products;
  static_assert(!(record_scales && rounds_products));
  using Sum = float;  ///< of a tile
  static constexpr int record_bytes = Plain::record_bytes, step_bytes = Plain::step_bytes;
  static constexpr int step_extra_bytes = Plain::step_extra_bytes, extra_stride = Plain::extra_stride;

  /// The most of an item; and for how many there are loops: experts often have a few more than a power of
  /// two.
  static constexpr int tokens = record_scales || (!kMany && P.banded) ? kFewTokensOfBytes
                                : !kMany                              ? kFewTokensOfTile
                                : P.value.bits == 16                  ? 128
                                                                      : kManyTokensOfTile;
  static constexpr TokenLoops loops =
      kMany ? TokenLoops{{64, 80, 96, 128, 144, 160}}.up_to(tokens)
            : TokenLoops{{kTileTokens, 16, 24, 32, 40, 48, 64, 80}}.up_to(tokens);
  static constexpr int token_step = kMany ? kTokenStepOfTile : 16;
  static constexpr int units = kMany ? 2 : 1;  ///< of a warp
  static constexpr int warps = 16 / units;     ///< that multiply
  static constexpr int threads = (warps + 4) * 32;
  static constexpr int groups = warps * units / kGroupUnits;  ///< of a tile
  /// Of the threads that multiply, and of those that fill the rings.
  static constexpr int registers = kMany ? 232 : 104, fill_registers = kMany ? 40 : 64;

  /// Columns of a unit that are decoded before they are multiplied. Where four warpgroups take turns, all of
  /// a step, as every wait for another warp of the group costs time.
  static constexpr int most_of_batch = record_scales ? 32 : kMany ? 64 : kRecordColumns;
  static constexpr int batch = scaled_groups && P.group < most_of_batch ? P.group : most_of_batch;

  /// Of a stage of weights: copies of less than 4 KB are slow.
  static constexpr int steps = step_bytes < 4096 ? 2 : 1;
  static constexpr int input_steps = kMany ? 1 : steps;  ///< of a stage of activations, which is then small
  static constexpr int group_bytes = steps * step_bytes, group_extra_bytes = steps * step_extra_bytes;
  static constexpr int extras_at = groups * group_bytes,
                       weight_bytes = groups * (group_bytes + group_extra_bytes);
  static constexpr int end_tokens = kMany ? 32 : 16;  ///< whose results are in shared memory together
  static constexpr int ring_bytes = 230400 - warps / 4 * end_tokens * kEndBytes, shared_bytes = 230400 + 1024;
  static constexpr int extra_groups = 1;  ///< of so many groups one's scales and zeros are copied
  static constexpr int most_stages = 8;   ///< of a ring
  static_assert(ring_bytes >= 2 * (weight_bytes + tokens * 256 * input_steps + (record_scales ? 1024 : 0)));
};

/// The stages of both rings, where items have at most so many tokens, a multiple of 8. Activations come
/// first: swizzled rows begin at multiples of 1024 bytes. Of 80 tokens there are few stages: so there is room
/// for as many of weights as beside 64.
template <class T>
struct Stages {
  static constexpr int ends_at = T::ring_bytes;  ///< of results (moe_wgmma_finish.cuh)
  int half;                                      ///< bytes of 64 columns of the tokens
  int input_bytes, inputs, weights_at, weights;

  Stages() = default;
  __device__ explicit Stages(int tokens)
      : half(tokens * 128),
        input_bytes(2 * T::input_steps * half + (T::record_scales ? 1024 : 0)),
        inputs(min((tokens <= 32   ? 6
                    : tokens <= 64 ? 4
                    : T::few       ? 2
                                   : 3) /
                           T::input_steps +
                       (T::input_steps > 1),
                   (T::ring_bytes - 2 * T::weight_bytes) / input_bytes)),
        weights_at(inputs * input_bytes),
        weights(min(T::most_stages, (T::ring_bytes - weights_at) / T::weight_bytes)) {}
};
/// In registers of the warp.
template <class T>
__device__ __forceinline__ Stages<T> reduced_in_warp(Stages<T> stages) {
  for (int* number : {&stages.half, &stages.input_bytes, &stages.inputs, &stages.weights_at, &stages.weights})
    *number = reduced_in_warp(*number);
  return stages;
}

/// Whether what is between both multiplies of a chain has to be rounded.
template <class T>
inline constexpr bool rounds = chains<T>&& T::bytes;
/// threadIdx.x. Where rows are rounded, registers do not hold what comes of it as well.
template <class T>
__device__ __forceinline__ int own_thread() {
  return rounds<T> ? thread_again() : static_cast<int>(threadIdx.x);
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

/// The next stages of both rings.
struct Places {
  StagePlace weights, inputs;
};
/// In registers of the warp.
__device__ __forceinline__ Places reduced_in_warp(Places at) {
  for (StagePlace* place : {&at.weights, &at.inputs}) {
    place->index = reduced_in_warp(place->index);
    place->parity = static_cast<std::uint32_t>(reduced_in_warp(static_cast<int>(place->parity)));
  }
  return at;
}

/// What belongs to the stages in shared memory. Where blocks only take tiles in turn, each warp that copies
/// finds them by itself: with one warp for all, fp8 by fp8 took 2 to 3 % longer.
template <class T>
struct WarpgroupRing {
  std::uint64_t weights_full[T::most_stages], weights_empty[T::most_stages];
  std::uint64_t inputs_full[T::most_stages], inputs_empty[T::most_stages];
  Tile tiles[T::most_stages];  ///< of stages of weights
  struct Ahead {
    TilesAhead weights, extras, inputs;
  };
  std::conditional_t<T::counts, FoundTiles, Ahead> found;
  Stages<T> stages;
  static constexpr bool with_tables = T::bytes && T::P.for_bytes;
  ByteTable tables[with_tables ? kByteTables : 1];

  /// By all threads, a stage's barriers by a warp.
  __device__ void init(const GemmArgs& args) {
    static_assert(T::threads / 32 > T::most_stages);
    if (threadIdx.x == T::threads - 1) stages = Stages<T>(args.tile_tokens);
    if (with_tables && threadIdx.x < kByteTables) tables[threadIdx.x] = byte_table(threadIdx.x);
    const int stage = same_in_warp(threadIdx.x / 32);
    if (stage >= T::most_stages || !one_of_warp()) return;
    init_barrier(weights_full + stage, T::P.apart() ? 2 : 1);  // by each warp that copies
    init_barrier(weights_empty + stage, T::warps);
    init_barrier(inputs_full + stage, 1);
    init_barrier(inputs_empty + stage, T::warps * sharing<T>(args));
    if constexpr (T::counts) {
      static_assert(FoundTiles::kMost == T::most_stages);
      found.init(stage, T::warps);
    }
    publish_barriers();
  }
};

/// Warps that copy.
enum class Filler { weights, extras, inputs };
/// Tile i of this block, or none, for one of them. All lanes come here, for 0, 1, ..; tile 0 in turn has been
/// found for inputs.
template <class T, Filler kBy>
__device__ __forceinline__ Tile tile_of_block(const GemmChain& chain, WarpgroupRing<T>& ring, int i) {
  if constexpr (!T::counts) {
    TilesAhead& ahead = kBy == Filler::weights  ? ring.found.weights
                        : kBy == Filler::extras ? ring.found.extras
                                                : ring.found.inputs;
    if (i % kTilesAhead == 0 && (i > 0 || kBy != Filler::inputs)) find_tiles<T>(chain.of[0], ahead, i);
    return ahead[i % kTilesAhead];
  } else {
    return ring.found.get(i);
  }
}

/// A ring's barriers, by their addresses.
template <class T>
struct RingBarriers {
  std::uint32_t weights_full, inputs_full;
  static constexpr int empty = T::most_stages * 8;  ///< from those of full stages on
  static constexpr int inputs_after = 2 * empty;    ///< from those of weights on

  __device__ explicit RingBarriers(const WarpgroupRing<T>& ring)
      : weights_full(kept(shared_address(ring.weights_full))), inputs_full(weights_full + inputs_after) {}

  /// This warp has read a stage of inputs: the barrier that says that it is full. All blocks that copy to it
  /// are told.
  static __device__ __forceinline__ void release_inputs(const GemmArgs& args, std::uint32_t full) {
    const int lane = threadIdx.x % 32;
    if constexpr (T::may_share) {
      if (lane < args.sharing_blocks) arrive_in_cluster(full + empty, lane);
    } else if (lane == 0) {
      arrive(full + empty);
    }
  }
};

/// Of an item's rows those that this block copies for all that share them: multiples of 8, or none.
template <class T>
struct OwnRows {
  int first, count;

  __device__ __forceinline__ OwnRows(const GemmArgs& args, int rows) : first(0), count(rows) {
    if (sharing<T>(args) == 1) return;
    const int half = rows / 16 * 8;
    const bool second = rank_in_cluster() != 0;
    first = second ? half : 0;
    count = second ? rows - half : half;
  }
};
template <class T>
__device__ __forceinline__ void copy_own(const GemmArgs& args, std::byte* to, const void* from, int bytes,
                                         std::uint64_t* full) {
  if (sharing<T>(args) == 1)
    copy_bulk(to, from, bytes, full);
  else if (bytes > 0)
    copy_bulk_to_pair(to, from, bytes, full);
}

/// When so few stages of a tile are left to be copied, the next tile is looked for.
inline constexpr int kStagesAhead = 6;

/// The most stages of weights that are on their way at a time. Where other kinds of access are waited for as
/// well, they wait behind these: with 160 KB on their way to each multiprocessor, for 5 us.
template <class T>
constexpr int stages_on_their_way() {
  constexpr int most_bytes = 104 * 1024;
  return most_bytes / T::weight_bytes;
}

/// Copies weights' records, or (`kExtras`) their scales and zeros that lie apart, a stage as soon as it has
/// been read; by a warp for each. Lanes copy a group each, in turn: a copy each 90 clocks (same_in_warp). A
/// stage's all at once, by one lane, make layers of many tokens 3 to 10 % slower.
template <class T, bool kExtras>
__device__ void copy_tile_weights(const GemmChain& chain, WarpgroupRing<T>& ring, std::byte* memory) {
  const Stages<T>& stages = ring.stages;  // not kept in registers
  constexpr Filler by = kExtras ? Filler::extras : Filler::weights;
  constexpr int each = kExtras ? T::step_extra_bytes : T::step_bytes;
  const int lane = threadIdx.x % 32, group = kExtras ? lane * T::extra_groups : lane;
  std::byte* to = memory + stages.weights_at +
                  (kExtras ? T::extras_at + group * T::group_extra_bytes : group * T::group_bytes);
  StagePlace place, oldest;  // that is on its way
  int on_their_way = 0;
  bool all_filled = false;  // once
  for (int i = 0;; ++i) {
    const Tile tile = tile_of_block<T, by>(chain, ring, i);
    const GemmArgs& args = multiply_of<T>(chain, tile);
    const std::int64_t begin = T::P.row_scale ? args.groups * (kGroupUnits * kUnitRows * 4) : 0;
    const std::int64_t extras_at = static_cast<std::int64_t>(args.groups) * args.all_steps * T::step_bytes;
    const int first_group = static_cast<int>(tile.first_group),
              groups = max(0, min(T::groups, args.groups - first_group)),
              copies = kExtras ? (groups + T::extra_groups - 1) / T::extra_groups : groups;
    const std::byte* from = args.weights + tile.expert * args.expert_stride + begin +
                            (kExtras ? extras_at : std::int64_t{0}) +
                            (static_cast<std::int64_t>(first_group + group) * args.all_steps +
                             static_cast<int>(tile.part) * args.part_steps) *
                                each;
    const int all_steps = args.steps;
    // Late, so that a block takes no tile that another one could begin.
    const int wants_next_at = max(0, (all_steps - 1) / T::steps - kStagesAhead + 1) * T::steps;
    for (int step = 0; step < all_steps; step += T::steps, from += T::steps * each) {
      if (all_filled) wait_barrier(ring.weights_empty + place.index, place.parity ^ 1);
      if constexpr (rounds<T> && !kExtras) {
        static_assert(stages_on_their_way<T>() <= Stages<T>::weights);
        if (on_their_way == stages_on_their_way<T>()) {
          wait_barrier(ring.weights_full + oldest.index, oldest.parity);
          oldest.advance(stages.weights);
        } else {
          ++on_their_way;
        }
      }
      std::uint64_t* full = ring.weights_full + place.index;
      const int steps = tile.count == 0 ? 0 : min(T::steps, all_steps - step);
      if (lane == 0) {
        if constexpr (!kExtras) ring.tiles[place.index] = tile;
        expect_bytes(full, steps * copies * each);
      }
      __syncwarp();
      if (tile.count == 0) return;
      if (lane < copies) {
        // Of many tokens, several items read the same weights.
        constexpr auto copy = T::few ? copy_bulk_once : copy_bulk;
        copy(to + place.index * T::weight_bytes, from, steps * each, full);
      }
      place.advance(stages.weights);
      all_filled |= place.index == 0;
      if constexpr (T::counts && !kExtras)
        if (lane == 0 && step == wants_next_at) arrive(&ring.found.wanted);
    }
  }
}

/// Waits for what the first multiply of a chain leaves of the item whose first row this is, and until so many
/// of its pieces have been rounded.
template <class T>
__device__ __forceinline__ void wait_for_first_multiply(const GemmChain& chain, int row, int pieces = 0) {
  const int all = tiles_of_item(chain.of[0].groups, T::groups, 1) + pieces;
  for (WaitLimit limit; load_acquire(chain.finished + row / 8) < all; limit.check()) __nanosleep(20);
}
/// Waits for all that the first multiply of a chain leaves.
template <class T>
__device__ __forceinline__ void wait_for_all_of_first_multiply(const GemmChain& chain) {
  const GemmArgs& args = chain.of[0];
  const int all = *args.item_count * tiles_of_item(args.groups, T::groups, 1);
  for (WaitLimit limit; load_acquire(chain.finished_of_all) < all; limit.check()) __nanosleep(20);
}
/// Before a tile's inputs are copied.
template <class T>
__device__ __forceinline__ void wait_for_inputs_of(const GemmChain& chain, const Tile& tile) {
  if (!chains<T> || !tile.second) return;
  wait_for_first_multiply<T>(chain, tile.row, chain.pieces_of(tile.count));
  global_memory_to_copies();
}

/// Copies activations, a stage as soon as it has been read; by one lane, whichever.
template <class T>
__device__ void copy_tile_inputs(const GemmChain& chain, WarpgroupRing<T>& ring, std::byte* memory) {
  const int half_bytes = same_in_warp(ring.stages.half), input_bytes = same_in_warp(ring.stages.input_bytes),
            stages = same_in_warp(ring.stages.inputs);
  StagePlace place;
  bool all_filled = false;  // once
  for (int i = 0;; ++i) {
    const Tile tile = same_in_warp(tile_of_block<T, Filler::inputs>(chain, ring, i));
    if (tile.count == 0) return;
    const GemmArgs& args = multiply_of<T>(chain, tile);
    wait_for_inputs_of<T>(chain, tile);
    const GemmInputs& in = args.inputs;
    const int rows = (tile.count + 7) / 8 * 8, first = static_cast<int>(tile.part) * args.part_steps;
    const OwnRows<T> own(args, rows);
    const std::uint16_t* from =
        in.rows + (tile.row + own.first + std::int64_t{2} * first * in.tile_rows) * 64;
    for (int step = 0; step < args.steps; step += T::input_steps) {
      if (all_filled) wait_barrier(ring.inputs_empty + place.index, place.parity ^ 1);
      std::uint64_t* full = ring.inputs_full + place.index;
      const int halves = 2 * min(T::input_steps, args.steps - step);
      if (one_of_warp()) {
        std::byte* stage = memory + place.index * input_bytes;
        std::byte* to = stage + own.first * 128;
        expect_bytes(full, rows * (halves * 128 + (T::record_scales ? 4 : 0)));
#pragma unroll
        for (int half = 0; half < 2 * T::input_steps; ++half)
          if (half < halves)
            copy_own<T>(args, to + half * half_bytes, from + std::int64_t{64} * half * in.tile_rows,
                        own.count * 128, full);
        if constexpr (T::record_scales)
          copy_own<T>(args, stage + 2 * half_bytes + own.first * 4,
                      in.record_scales + (first + step) * in.tile_rows + tile.row + own.first, own.count * 4,
                      full);
      }
      from += std::int64_t{64} * halves * in.tile_rows;
      place.advance(stages);
      all_filled |= place.index == 0;
    }
  }
}

}  // namespace gatefold::cuda
