#pragma once
/// \file
/// What a kernel of the multiply (moe_gemm.cuh) is made for, and how its operands come to shared memory.
///
/// A step is the records of the same 128 columns of a group of units (packed.h). Each thread block takes a
/// run of the groups of all items, as long as those of others, and cuts it into rounds: `groups` groups by
/// `slices` warps each, which take the steps of their group in turn. One or two teams of a block take its
/// rounds as they come to it: eight warps that multiply, and two that fill the team's ring. A stage of the
/// ring is what the team multiplies next: one step a warp, and the activations of these columns.

#include <climits>

#include "cuda/moe_gemm.h"
#include "cuda/ptx.cuh"

namespace gatefold::cuda {

/// What a block keeps of few slots, sorted by expert.
struct FewTables {
  std::uint64_t counts[kFewExperts];  ///< slots that each warp has of an expert: a byte
  std::int32_t offsets[kFewExperts], slots[kFewSlots];
  Item items[kFewSlots];
};

/// What a kernel is made for.
template <class SchemeTag, InputKind kInput, int kTileCount>
struct GemmTraits {
  static constexpr PackedFormat P = packed_format(SchemeTag::scheme, kInput == InputKind::f16);
  static constexpr InputKind input = kInput;
  static constexpr int tiles = kTileCount, tokens = tiles * kTileTokens;
  /// The multiply's type. bf16 with f16: the f16 operand becomes two bf16.
  static constexpr bool f16_inputs = kInput == InputKind::f16;
  static constexpr Format M = f16_inputs && P.value != formats::bf16 ? formats::f16 : formats::bf16;
  static constexpr bool split_inputs = f16_inputs && M == formats::bf16;
  static constexpr bool split_weights = P.value == formats::f16 && M == formats::bf16;
  static constexpr bool record_scales = with_record_scales(kInput);
  static constexpr bool scaled_groups = (P.scale.stored() && !P.folded) || record_scales;

  /// Of activations; rows of two tokens do not share banks.
  static constexpr __host__ __device__ int input_stride(int slices) {
    return slices * kRecordColumns * 2 + 64;
  }
  static constexpr int record_bytes = P.record_bytes();
  static constexpr int step_bytes = kGroupUnits * record_bytes;  ///< the same columns of all units of a group
  /// Of scales and zeros that lie apart; and from those of one unit to the other.
  static constexpr int step_extra_bytes = P.apart() ? kGroupUnits * P.extra_bytes() : 0;
  static constexpr int extra_stride = P.apart() ? P.extra_bytes() : record_bytes;
  static constexpr int warps = 8;  ///< of a team that multiply; two more fill the ring
  static constexpr int threads = (warps + 2) * 32;
  /// Teams of a block, as registers and shared memory allow.
  static constexpr int teams = step_bytes < 8192 && tiles == 1 ? 2 : 1;
  /// A scheduler has a quarter of the registers, and of the warps, rounded up.
  static constexpr int bounds = (teams * threads + 127) / 128 * 128;
  static constexpr int shared_tiles = tiles < 2 ? tiles : 2;  ///< of warps that share a group
  static constexpr int weight_bytes = warps * step_bytes;     ///< of a stage
  static constexpr int extras_at = weight_bytes, inputs_at = extras_at + warps * step_extra_bytes;
  /// Warps that may share a group, where a tile has all its tokens.
  static constexpr int full_slices = tiles == 1 ? 4 : 1;
  static constexpr int input_bytes = tokens * input_stride(full_slices);
  static constexpr int stage_bytes = inputs_at + input_bytes;
  static constexpr int ring_bytes =
      (teams == 2 ? 115712 : 232448) - static_cast<int>(sizeof(FewTables)) - 512;
  static constexpr int stages = ring_bytes / stage_bytes < 6 ? ring_bytes / stage_bytes : 6;
  /// Where they are small, weights are copied by one lane, in fewer instructions (same_in_warp); else lanes
  /// copy a group each.
  static constexpr bool small_copies = step_bytes < 4096;
  static constexpr int team_bytes = stages * stage_bytes, table_bytes = static_cast<int>(sizeof(FewTables));
  static_assert(stages >= 2 && stage_bytes % 128 == 0 &&
                weight_bytes >= warps * kGroupUnits * shared_tiles * 512);
};

/// `groups` groups of units from `group` on, by the tokens of an item: `slices` warps, a power of two, share
/// a group. The stages of a round hold the steps [0, slices), [slices, 2 slices) ..
struct alignas(16) Round {
  std::int16_t groups;  ///< 0: the work is done
  std::uint8_t slices, count;
  std::int32_t expert, first, group;

  /// The group and the slice of a warp.
  __device__ __forceinline__ int row(int warp) const {
    return warp >> (31 - __clz(static_cast<int>(slices)));
  }
  __device__ __forceinline__ int slice(int warp) const { return warp & (slices - 1); }
};

/// The items of a call, and the slots of their tokens.
struct Items {
  const Item* few = nullptr;  ///< that this block has found; nullptr: GemmArgs::items, or all positions
                              ///< belong to expert 0, or to each part
  const std::int32_t* slots = nullptr;  ///< [positions], nullptr: the same
  int count = 0;

  __device__ __forceinline__ Item at(const GemmArgs& args, int i) const {
    if (few != nullptr) return few[i];
    if (args.items != nullptr) return args.items[i];
    const int each = args.whole_items, first = i % each * args.tile_tokens;
    return {static_cast<std::int16_t>(i / each),
            static_cast<std::int16_t>(min(args.tile_tokens, args.slots - first)), first};
  }
  __device__ __forceinline__ int slot(int position) const {
    return slots == nullptr ? position : slots[position];
  }
};

__device__ __forceinline__ int split(int total, int parts, int part) {
  const int each = total / parts, rest = total % parts;
  return part * each + min(part, rest);
}

/// Where the runs of blocks begin and end: after multiples of `together` groups of an item. Single groups
/// suit one tile of tokens: all warps can share one.
template <class T>
struct Runs {
  int together = 1, per_item, total;

  __device__ Runs(int items, int groups) : per_item(groups), total(items * groups) {
    if constexpr (T::tiles > 1) {
      int least = INT_MAX;
#pragma unroll 1
      for (int count = T::warps; count > 0; count /= 2) {
        const int parts = (groups + count - 1) / count, time = longest(items * parts, count);
        if (time < least) least = time, together = count, per_item = parts;
      }
      total = items * per_item;
    }
  }
  /// The first group of a block's run, among those of all items.
  __device__ int first(int groups, int block) const {
    const int at = split(total, gridDim.x, block);
    return T::tiles == 1 ? at : at / per_item * groups + min(at % per_item * together, groups);
  }

 private:
  /// A measure of the longest run's time: six parts for its bytes, one for its rounds.
  __device__ static int longest(int parts, int count) {
    const int blocks = static_cast<int>(gridDim.x), most = (parts + blocks - 1) / blocks * count;
    return 6 * most + max(time_of(most), parts % blocks == 0 ? 0 : time_of(most - count));
  }
  /// The time of rounds; those that leave warps idle take as long as the shortest that does not.
  __device__ static int time_of(int groups) {
    int time = groups / T::warps * T::warps;
#pragma unroll
    for (int part = T::warps / 2; part > 0; part /= 2)
      if (groups & part) time += max(part, T::warps / T::full_slices);
    return time;
  }
};

/// The rounds of a block, one after the other. What they are does not depend on the team that takes them.
template <class T>
struct Rounds {
  int item, group, left;  ///< the next round's first group; groups of the block
  Round round;
  int index = 0;  ///< of the round; groups 0: there are no more

  __device__ void begin(const GemmArgs& args, const Items& items) {
    const Runs<T> runs(items.count, args.groups);
    const int first = runs.first(args.groups, blockIdx.x);
    left = runs.first(args.groups, blockIdx.x + 1) - first;
    item = first / args.groups;
    group = first % args.groups;
    find_round(args, items);
  }

  __device__ void find_round(const GemmArgs& args, const Items& items) {
    round.groups = 0;
    if (left == 0) return;
    const Item tokens = items.at(args, item);
    const int most = min(left, args.groups - group);
    int groups = T::warps, slices = 1;
    while (groups > most) groups /= 2, slices *= 2;
    // The last rounds of several teams are short, so that these end together, but no shorter than 8 stages.
    constexpr int least = T::tiles == 1 ? 1 : T::warps / T::full_slices;
    if (T::teams > 1)
      while (groups > least && 2 * groups > left && args.steps >= 16 * slices) groups /= 2, slices *= 2;
    while (slices > 1 && (tokens.count > T::shared_tiles * kTileTokens ||
                          tokens.count * T::input_stride(slices) > T::input_bytes))
      slices /= 2;
    round = {static_cast<std::int16_t>(groups),
             static_cast<std::uint8_t>(slices),
             static_cast<std::uint8_t>(tokens.count),
             tokens.expert,
             tokens.first,
             group};
    left -= groups;
    group += groups;
    if (group == args.groups) group = 0, ++item;
  }

  __device__ void go_to(const GemmArgs& args, const Items& items, int to) {
    for (; index < to && round.groups != 0; ++index) find_round(args, items);
  }
};

/// The place of a stage, and the parity of its phase.
template <class T>
struct Place {
  int index = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index < T::stages) return;
    index = 0;
    parity ^= 1;
  }
};

/// A team's stages in shared memory. `known`: that rounds says what will be there.
template <class T>
struct RingState {
  std::uint64_t full[T::stages], empty[T::stages], known[T::stages];
  Round rounds[T::stages];

  /// By all threads of a team, a stage's barriers by a warp.
  __device__ void init(int thread) {
    static_assert(T::threads / 32 >= T::stages);
    const int stage = same_in_warp(thread / 32);
    if (stage >= T::stages || !one_of_warp()) return;
    init_barrier(full + stage, 1 + 32);
    init_barrier(empty + stage, T::warps);
    init_barrier(known + stage, 1);
    publish_barriers();
  }
  /// What a stage belongs to.
  __device__ __forceinline__ Round round_of(const Place<T>& place) const {
    return read_by_lane_0(rounds[place.index]);
  }
  /// This warp has read a stage.
  __device__ __forceinline__ void release(const Place<T>& place) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty + place.index);
  }
};

/// Copies weights to the ring, a stage as soon as it has been read; by one warp. `taken`: rounds of the
/// block.
template <class T>
__device__ void copy_weights(const GemmArgs& args, const Items& items, RingState<T>& ring, std::byte* memory,
                             int* taken) {
  const int lane = threadIdx.x % 32;
  const std::int64_t begin = T::P.row_scale ? args.groups * (kGroupUnits * kUnitRows * 4) : 0;
  Rounds<T> rounds;
  rounds.begin(args, items);
  const Round& round = rounds.round;
  int filled = 0, step = 0;
  const std::byte *from = nullptr, *extras = nullptr;  // of this lane's group
  for (Place<T> place;; place.advance()) {
    if (step == 0) {
      int next = 0;
      if (lane == 0) next = atomicAdd_block(taken, 1);
      rounds.go_to(args, items, __shfl_sync(~0u, next, 0));
      const std::int64_t at =
          static_cast<std::int64_t>(round.group + lane) * args.all_steps + round.expert * args.part_steps;
      const std::byte* weights = args.weights + round.expert * args.expert_stride + begin;
      from = weights + at * T::step_bytes;
      if constexpr (T::P.apart())
        extras = weights + static_cast<std::int64_t>(args.groups) * args.all_steps * T::step_bytes +
                 at * T::step_extra_bytes;
    }
    if (++filled > T::stages) wait_barrier(ring.empty + place.index, place.parity ^ 1);
    std::uint64_t* full = ring.full + place.index;
    const int steps = min(static_cast<int>(round.slices), args.steps - step);
    if (lane == 0) {
      ring.rounds[place.index] = round;
      arrive(ring.known + place.index);
      expect_bytes(full, steps * round.groups * (T::step_bytes + T::step_extra_bytes));
    }
    __syncwarp();
    if (round.groups == 0) return;
    if (lane < round.groups) {
      std::byte* to = memory + place.index * T::stage_bytes;
      copy_bulk_once(to + lane * round.slices * T::step_bytes, from, steps * T::step_bytes, full);
      if constexpr (T::P.apart())
        copy_bulk_once(to + T::extras_at + lane * round.slices * T::step_extra_bytes, extras,
                       steps * T::step_extra_bytes, full);
    }
    from += steps * T::step_bytes;
    if constexpr (T::P.apart()) extras += steps * T::step_extra_bytes;
    step += round.slices;
    if (step >= args.steps) step = 0;
  }
}

/// The same where copies are small. (With one function for both, kernels of 8 bits would spill registers.)
template <class T>
requires(T::small_copies) __device__ void copy_weights(const GemmArgs& args, const Items& items,
                                                       RingState<T>& ring, std::byte* memory, int* taken) {
  const int lane = threadIdx.x % 32;
  const std::int64_t begin = T::P.row_scale ? args.groups * (kGroupUnits * kUnitRows * 4) : 0;
  Rounds<T> rounds;
  rounds.begin(args, items);
  const Round& round = rounds.round;
  const std::int64_t extras_at = static_cast<std::int64_t>(args.groups) * args.all_steps * T::step_bytes;
  int filled = 0, step = 0, groups = 0, slices = 0;
  int at = 0;                            // of all steps of an expert's groups
  const std::byte* of_expert = nullptr;  // its steps
  for (Place<T> place;; place.advance()) {
    if (step == 0) {
      int next = 0;
      if (lane == 0) next = atomicAdd_block(taken, 1);
      rounds.go_to(args, items, __shfl_sync(~0u, next, 0));
      groups = same_in_warp(round.groups);
      slices = same_in_warp(round.slices);
      const int expert = same_in_warp(round.expert);
      at = same_in_warp(round.group) * args.all_steps + expert * args.part_steps;
      of_expert = args.weights + expert * args.expert_stride + begin;
    }
    if (++filled > T::stages) wait_barrier(ring.empty + place.index, place.parity ^ 1);
    std::uint64_t* full = ring.full + place.index;
    const int steps = min(slices, args.steps - step);
    if (one_of_warp()) {
      ring.rounds[place.index] = round;
      arrive(ring.known + place.index);
      expect_bytes(full, steps * groups * (T::step_bytes + T::step_extra_bytes));
      std::byte* to = memory + place.index * T::stage_bytes;
#pragma unroll 1
      for (int group = 0; group < groups; ++group) {
        const std::int64_t from = at + group * args.all_steps;
        copy_bulk_once(to + group * slices * T::step_bytes, of_expert + from * T::step_bytes,
                       steps * T::step_bytes, full);
        if constexpr (T::P.apart())
          copy_bulk_once(to + T::extras_at + group * slices * T::step_extra_bytes,
                         of_expert + extras_at + from * T::step_extra_bytes, steps * T::step_extra_bytes,
                         full);
      }
    }
    if (groups == 0) return;
    at += steps;
    step += slices;
    if (step >= args.steps) step = 0;
  }
}

/// The same of activations: half a warp copies 128 columns of a row.
template <class T>
__device__ void copy_inputs(const GemmArgs& args, const Items& items, RingState<T>& ring, std::byte* memory) {
  const int half = threadIdx.x % 32 / 16, column = threadIdx.x % 16 * 8;
  const GemmInputs& in = args.inputs;
  const std::uint16_t* rows[T::tokens / 2];  // of every second token
  Round round;
  int step = 0;
  for (Place<T> place;; place.advance()) {
    wait_barrier(ring.known + place.index, place.parity);
    if (step == 0) {
      round = ring.round_of(place);
      if (round.groups != 0)
#pragma unroll
        for (int i = 0; i < T::tokens / 2; ++i) {
          const int token = min(2 * i + half, round.count - 1);
          rows[i] = in.rows + items.slot(round.first + token) / in.slots_of_row * in.stride + column +
                    round.expert * args.part_steps * kRecordColumns;
        }
    }
    std::byte* to = memory + place.index * T::stage_bytes + T::inputs_at +
                    half * T::input_stride(round.slices) + column * 2;
    const int steps = round.groups == 0 ? 0 : min(static_cast<int>(round.slices), args.steps - step);
    for (int slice = 0; slice < steps; ++slice)
#pragma unroll
      for (int i = 0; i < T::tokens / 2; ++i)
        if (2 * i + half < round.count)
          copy_16_bytes(to + 2 * i * T::input_stride(round.slices) + slice * kRecordColumns * 2,
                        rows[i] + (step + slice) * kRecordColumns);
    arrive_after_copies(ring.full + place.index);
    if (round.groups == 0) return;
    step += round.slices;
    if (step >= args.steps) step = 0;
  }
}

}  // namespace gatefold::cuda
