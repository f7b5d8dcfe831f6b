#pragma once
/// \file
/// Both multiplies of a layer in one launch, by the same items: the second one of what the first one leaves,
/// rounded in between where it reads codes. Thread blocks take the next tile as they come to it.

#include "cuda/inputs.h"
#include "cuda/tensor_map.h"

namespace gatefold::cuda {

/// Whether rows are rounded by what they have themselves, to codes: then a chain does it.
constexpr bool rounds_in_chain(const Operand& activation) {
  return are_bytes(byte_kind(activation)) && activation.group.n != 0;
}
/// The activations of the table that a chain rounds to codes of this kind.
constexpr Operand rounded_in_chain(InputKind kind) {
  Operand found;
  for (const Scheme& scheme : operands::table)
    if (const Operand& a = scheme.activation; rounds_in_chain(a) && byte_kind(a) == kind) found = a;
  return found;
}
static_assert(
    [] {
      for (const Scheme& scheme : operands::table)
        if (const Operand& a = scheme.activation;
            rounds_in_chain(a) && !(rounded_in_chain(byte_kind(a)) == a))
          return false;
      return true;
    }(),
    "a kernel rounds to one operand of each kind");

/// Columns of a row that a warp that rounds has in registers.
constexpr int columns_of_rounding_warp(const Operand& activation) {
  return has_record_scales(activation) ? 512 : 1024;
}

/// Words of a launch's progress before those of items: counters, and the largest number in between
/// (GemmArgs::out_amax).
inline constexpr int kProgressOfAll = 4, kProgressAmax = 3;

/// What kernels by warpgroups multiply: one GemmArgs, or two.
struct GemmChain {
  GemmArgs of[2];
  CUtensorMap boxes = {};  ///< of the first one's inputs, if these are copied so (GemmInputs::box_rows)
  std::int32_t count = 1;
  /// 0 before the launch: how many tiles have been taken; or nullptr, and blocks take them in turn.
  std::int32_t* next_tile = nullptr;
  /// Of two, 0 before the launch: how many pieces to be rounded have been taken; and [tile_rows / 8], of an
  /// item's first row: its tiles that the first multiply has finished, and its pieces that are rounded.
  std::int32_t *next_piece = nullptr, *finished = nullptr;
  /// All tiles that the first multiply has finished, where its results have one scale; or nullptr.
  std::int32_t* finished_of_all = nullptr;
  /// Of two, where the second one reads codes: from the first one's results to its inputs, in pieces of an
  /// item of so many rows (0: nothing is rounded), a row by so many warps.
  InputArgs rounding;
  std::int32_t rounding_rows = 0, rounding_warps = 1;

  /// Of an item of so many tokens.
  GATEFOLD_HD int pieces_of(int tokens) const {
    return rounding_rows == 0 ? 0 : (tokens + rounding_rows - 1) / rounding_rows;
  }
};

/// Whether a layer's multiplies by this kernel can be one launch, and are faster so. rounding: as below.
bool should_chain(const GemmKernel& kernel, const InputArgs* rounding);
/// By a kernel that has one. rounding: nullptr where the second multiply reads 16-bit numbers. progress: 0,
/// kProgressOfAll + tile_rows / 8 of them.
cudaError_t launch_chain(const GemmKernel& kernel, const GemmArgs& first, const GemmArgs& second,
                         const InputArgs* rounding, std::int32_t* progress, int multiprocessors,
                         cudaStream_t stream);

}  // namespace gatefold::cuda
