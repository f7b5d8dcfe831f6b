#pragma once
/// \file
/// Probabilities from one row of logits, in double.

#include <cmath>
#include <cstdint>

namespace gatefold {

/// log(sum(exp(logits)))
inline double log_sum_exp(const float* logits, std::int64_t count) {
  float highest = logits[0];
  for (std::int64_t i = 1; i < count; ++i) highest = logits[i] > highest ? logits[i] : highest;
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += std::exp(static_cast<double>(logits[i] - highest));
  return highest + std::log(sum);
}

/// The lowest index of the largest number.
inline std::int64_t argmax(const float* logits, std::int64_t count) {
  std::int64_t best = 0;
  for (std::int64_t i = 1; i < count; ++i)
    if (logits[i] > logits[best]) best = i;
  return best;
}

}  // namespace gatefold
