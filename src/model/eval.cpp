#include "model/eval.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>
#include <vector>

#include "model/loss.h"

namespace gatefold {

Status check_windows(std::span<const std::int32_t> tokens, int window) {
  if (window < 2)
    return {
        Code::invalid_argument,
        fmt::format("window = {}: it must be at least 2, since the first token is not predicted", window)};
  if (tokens.size() < static_cast<std::size_t>(window))
    return {Code::invalid_argument,
            fmt::format("the text has {} tokens, less than one window of {}", tokens.size(), window)};
  return {};
}

Result<EvalResult> run_windows(const Decoder& decoder, std::span<const std::int32_t> tokens, int window,
                               const std::function<void(const Predictions&)>& visit,
                               const EvalProgress& progress) {
  if (Status status = check_windows(tokens, window); !status.ok()) return status;
  const auto start = std::chrono::steady_clock::now();
  const std::int64_t vocab = decoder.config().vocab;
  const auto windows = static_cast<std::int64_t>(tokens.size()) / window;
  Sequence sequence = decoder.new_sequence();
  EvalResult result;
  double total = 0;
  std::vector<double> losses;
  for (std::int64_t w = 0; w < windows; ++w) {
    const auto text = tokens.subspan(w * window, window);
    ForwardHooks hooks;
    hooks.logits = [&](std::int64_t first, std::int64_t rows, const float* logits) {
      rows = std::min(rows, window - 1 - first);  // the last token predicts nothing
      const Predictions predictions{w * (window - 1) + first, rows, logits, text.data() + first + 1};
      losses.resize(rows);
#pragma omp parallel for num_threads(decoder.threads())
      for (std::int64_t r = 0; r < rows; ++r)
        losses[r] = log_sum_exp(logits + r * vocab, vocab) -
                    static_cast<double>(logits[r * vocab + predictions.targets[r]]);
      for (const double loss : losses) total += loss;
      if (visit) visit(predictions);
    };
    sequence.clear();
    if (Status status = decoder.forward(text, sequence, hooks); !status.ok())
      return Status(status.code(), fmt::format("window {}: {}", w, status.message()));
    if (progress) progress((w + 1) * window, windows * window);
  }
  result.tokens = windows * (window - 1);
  result.nats_per_token = total / static_cast<double>(result.tokens);
  result.perplexity = std::exp(result.nats_per_token);
  if (decoder.byte_level()) result.bits_per_byte = result.nats_per_token / std::numbers::ln2;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

Result<EvalResult> evaluate(const Decoder& decoder, std::span<const std::int32_t> tokens,
                            const EvalOptions& options) {
  return run_windows(decoder, tokens, options.window, {}, options.progress);
}

}  // namespace gatefold
