#pragma once
/// \file
/// Rotary position embedding.

#include <cstdint>
#include <vector>

#include "gatefold/checkpoint.h"
#include "gatefold/status.h"

namespace gatefold {

class Rope {
 public:
  /// Errors: a head_dim that is odd, parameters that give frequencies which are no numbers.
  static Result<Rope> create(const RopeConfig& config, int head_dim, int max_positions);

  /// cos and sin [tokens, head_dim / 2] of the angles at positions first, first + 1, ..., times the attention
  /// factor. `length` is the sequence's length after the call (for type dynamic).
  void angles(std::int64_t first, std::int64_t tokens, std::int64_t length, float* cos, float* sin) const;

  float attention_factor() const { return attention_factor_; }
  /// [head_dim / 2], in a sequence of that length.
  std::vector<float> inverse_frequencies(std::int64_t length) const;

 private:
  RopeConfig config_;
  int head_dim_ = 0;
  int max_positions_ = 0;
  float attention_factor_ = 1.0f;
};

/// Rotates the pair (x[i], x[i + head_dim / 2]) of one head by angle i.
void rotate(float* x, int head_dim, const float* cos, const float* sin);

}  // namespace gatefold
