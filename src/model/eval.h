#pragma once
/// \file
/// Walking a text in windows: what `evaluate` and `compare` share.

#include <cstdint>
#include <functional>
#include <span>

#include "gatefold/decoder.h"

namespace gatefold {

/// Logits of `rows` consecutive predicted tokens. Counts predictions, over all windows: the first is number
/// `first`. targets[r] is the token that row r should predict.
struct Predictions {
  std::int64_t first = 0, rows = 0;
  const float* logits = nullptr;
  const std::int32_t* targets = nullptr;
};

Status check_windows(std::span<const std::int32_t> tokens, int window);

/// Runs all windows of `tokens`. The loss is summed in the order of the text, so that it has the same bits
/// for every thread count.
Result<EvalResult> run_windows(const Decoder& decoder, std::span<const std::int32_t> tokens, int window,
                               const std::function<void(const Predictions&)>& visit,
                               const EvalProgress& progress);

}  // namespace gatefold
