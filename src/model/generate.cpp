#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <vector>

#include "gatefold/decoder.h"
#include "model/loss.h"

namespace gatefold {
namespace {

// splitmix64: the standard library's distributions differ between implementations.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  /// In [0, 1).
  double next() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }

 private:
  std::uint64_t state_;
};

std::int64_t sample(const std::vector<float>& logits, double temperature, Random& random) {
  const auto count = static_cast<std::int64_t>(logits.size());
  const std::int64_t best = argmax(logits.data(), count);
  if (temperature == 0) return best;
  const auto weight = [&](std::int64_t i) {
    return std::exp((static_cast<double>(logits[i]) - logits[best]) / temperature);
  };
  double total = 0;
  for (std::int64_t i = 0; i < count; ++i) total += weight(i);
  double left = random.next() * total;
  for (std::int64_t i = 0; i < count; ++i) {
    left -= weight(i);
    if (left < 0) return i;
  }
  return best;
}

}  // namespace

Result<GenerateResult> generate(const Decoder& decoder, std::span<const std::int32_t> prompt,
                                const GenerateOptions& options) {
  if (prompt.empty()) return Status(Code::invalid_argument, "the prompt is empty: nothing to continue");
  if (options.tokens < 0)
    return Status(Code::invalid_argument, fmt::format("cannot generate {} tokens", options.tokens));
  if (!std::isfinite(options.temperature) || options.temperature < 0)
    return Status(Code::invalid_argument,
                  fmt::format("temperature = {}: it must be finite and not negative", options.temperature));

  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  GenerateResult result;
  Random random(options.seed);
  Sequence sequence = decoder.new_sequence();
  std::vector<float> logits(decoder.config().vocab);
  auto start = Clock::now();
  for (int i = 0; i < options.tokens; ++i) {
    const auto input = i == 0 ? prompt : std::span<const std::int32_t>(&result.tokens.back(), 1);
    if (Status status = decoder.forward(input, sequence, logits); !status.ok()) return status;
    if (i == 0) {
      result.prompt_seconds = since(start);
      start = Clock::now();
    }
    result.tokens.push_back(static_cast<std::int32_t>(sample(logits, options.temperature, random)));
    if (options.on_token && !options.on_token(result.tokens.back())) break;
  }
  if (!result.tokens.empty()) result.seconds = since(start);
  return result;
}

}  // namespace gatefold
