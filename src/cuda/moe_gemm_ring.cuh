#pragma once
/// \file
/// What a warp of the multiply (moe_gemm.cuh) is made for, which weights are its own, and how they come.

#include "cuda/moe_gemm.h"
#include "cuda/ptx.cuh"

namespace gatefold::cuda {

/// What a kernel is made for.
template <class SchemeTag, bool kWide, InputKind kInput, int kTileCount>
struct GemmTraits {
  static constexpr PackedFormat P = packed_format(SchemeTag::scheme.weight, kWide);
  static constexpr InputKind input = kInput;
  static constexpr int tiles = kTileCount;
  /// The multiply's type. bf16 with f16: the f16 operand becomes two bf16.
  static constexpr bool f16_inputs = kInput == InputKind::f16;
  static constexpr Format M = f16_inputs && P.value != formats::bf16 ? formats::f16 : formats::bf16;
  static constexpr bool split_inputs = f16_inputs && M == formats::bf16;
  static constexpr bool split_weights = P.value == formats::f16 && M == formats::bf16;
  static constexpr bool record_scales = kInput == InputKind::bf16_record_scales;
  static constexpr bool scaled_groups = (P.scale.stored() && !P.folded) || record_scales;

  static constexpr int record_bytes = P.record_bytes();
  static constexpr int step_bytes = kGroupUnits * record_bytes;  ///< the same columns of all units of a group
  /// As shared memory has room for, or registers: groups of 32 with f32 scales take many.
  static constexpr int warps =
      step_bytes >= 8192 || (P.scale.bits == 32 && P.group == 32 && tiles > 1) ? 8 : 16;
  static constexpr int chunk = step_bytes < 4096 ? 2 : 1;  ///< steps that are copied together
  static constexpr int chunk_bytes = chunk * step_bytes;
  static constexpr int partial_bytes = kGroupUnits * tiles * 4 * 32 * static_cast<int>(sizeof(float));
  static constexpr int stages = 2;  ///< more shared memory would leave L1 too small for the activations
  static constexpr int ring_bytes = stages * (chunk_bytes + 16);
  static constexpr int shared_bytes = warps * (partial_bytes + ring_bytes);
};

/// Sums of a group of units: of each unit and tile the rows lane / 4 and + 8 by two columns.
template <class T>
using Sums = float[kGroupUnits][T::tiles][4];

/// Item i: a part of an expert's tokens, or, without a list of items, all tokens of an expert in use.
__device__ __forceinline__ Item item_at(const GemmArgs& args, int i) {
  if (args.items != nullptr) return args.items[i];
  const int expert = args.active_experts[i], first = args.expert_offsets[expert];
  return {expert, first, args.expert_offsets[expert + 1] - first, 0};
}

/// The steps that a warp multiplies: a run of the sequence of all items' groups' steps.
struct Share {
  int item = 0, group = 0, step = 0;  ///< where it begins
  int steps = 0;
};

__device__ __forceinline__ int split(int total, int parts, int part) {
  const int each = total / parts, rest = total % parts;
  return part * each + min(part, rest);
}

__device__ __forceinline__ Share share_of_warp(const GemmArgs& args, int warp, int warps, int* block_steps) {
  const int groups = *args.item_count * args.groups;
  const int first = split(groups, gridDim.x, blockIdx.x), last = split(groups, gridDim.x, blockIdx.x + 1);
  *block_steps = (last - first) * args.steps;
  const int begin = split(*block_steps, warps, warp);
  const int group = first + begin / args.steps;
  return {group / args.groups, group % args.groups, begin % args.steps,
          split(*block_steps, warps, warp + 1) - begin};
}

/// A warp's steps on their way through shared memory: chunks of some KB, so that reads of DRAM are long.
template <class T>
class Ring {
 public:
  __device__ Ring(const GemmArgs& args, const Share& share, std::byte* memory, int lane)
      : args_(args),
        full_(reinterpret_cast<std::uint64_t*>(memory)),
        chunks_(memory + T::stages * 16),
        lane_(lane),
        left_(share.steps),
        item_(share.item) {
    if (lane < T::stages) init_barrier(full_ + lane);
    publish_barriers();
    __syncwarp();
    if (lane != 0 || left_ == 0) return;
    enter(share.group * args.steps + share.step);
    for (int i = 0; i < T::stages - 1; ++i) load(i);
  }

  /// The next chunk, as soon as it is there; another one begins to be copied into the place of the last.
  __device__ const std::byte* next() {
    __syncwarp();  // all lanes have read the last
    if (lane_ == 0) load(reading_ == 0 ? T::stages - 1 : reading_ - 1);
    wait_barrier(full_ + reading_, parity_);
    const std::byte* chunk = chunks_ + reading_ * T::chunk_bytes;
    if (++reading_ == T::stages) {
      reading_ = 0;
      parity_ ^= 1;
    }
    return chunk;
  }

 private:
  __device__ void enter(int step) {
    const std::int64_t begin = T::P.row_scale ? args_.groups * (kGroupUnits * kUnitRows * 4) : 0;
    const int expert = args_.items != nullptr ? args_.items[item_].expert : args_.active_experts[item_];
    from_ = args_.weights + expert * args_.expert_stride + begin +
            static_cast<std::int64_t>(step) * T::step_bytes;
    item_left_ = args_.groups * args_.steps - step;
  }

  __device__ void load(int stage) {
    int steps = min(T::chunk, left_);
    if (steps == 0) return;
    left_ -= steps;
    expect_bytes(full_ + stage, steps * T::step_bytes);
    for (std::byte* to = chunks_ + stage * T::chunk_bytes; steps > 0;) {
      if (item_left_ == 0) {
        ++item_;
        enter(0);
      }
      const int run = min(steps, item_left_);
      copy_bulk(to, from_, run * T::step_bytes, full_ + stage);
      to += run * T::step_bytes;
      from_ += run * T::step_bytes;
      item_left_ -= run;
      steps -= run;
    }
  }

  const GemmArgs& args_;
  std::uint64_t* full_;
  std::byte* chunks_;
  const std::byte* from_ = nullptr;
  int lane_, left_, item_, item_left_ = 0;
  int reading_ = 0;
  std::uint32_t parity_ = 0;
};

}  // namespace gatefold::cuda
