#pragma once
/// \file
/// The softmax of attention, one block of keys at a time.

#include <cstdint>
#include <limits>

#include "format/isa.h"

namespace gatefold {

/// Keys and values are stored in whole blocks of this many positions.
inline constexpr std::int64_t key_block = 64;

/// One query: the largest score so far, and the sum of exp(score - highest).
struct SoftmaxRow {
  float highest = std::numeric_limits<float>::lowest();
  float sum = 0.0f;
};

/// Turns key_block scores into weights exp(score - highest), where `highest` now includes them, and scales
/// what was summed under the former `highest`: row.sum, and sums [count]. A block of -inf changes nothing.
using AbsorbScores = void (*)(SoftmaxRow& row, float* scores, float* sums, std::int64_t count);

/// For the instruction set that runs here; the bits are the same for all.
AbsorbScores absorb_scores();
AbsorbScores absorb_scores(Isa isa);

}  // namespace gatefold
