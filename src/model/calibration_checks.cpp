#include "model/calibration_checks.h"

#include <fmt/format.h>

#include "checkpoint/quantizable.h"
#include "model/eval.h"

namespace gatefold {

Status check_method(const Scheme& scheme, Method method) {
  if (!scheme.weight.quantized())
    return {Code::invalid_argument, fmt::format("{} is not quantized: nothing to calibrate", scheme.name)};
  if (method == Method::smoothquant && !scheme.quantizes_activations())
    return {
        Code::invalid_argument,
        fmt::format("smoothquant balances weights and activations, but {} leaves activations as they are; "
                    "awq is for such schemes",
                    scheme.name)};
  return {};
}

Status check_calibration(const Checkpoint& source, std::span<const std::int32_t> tokens,
                         const CalibrateOptions& options) {
  if (options.min_samples < 0 || options.threads < 0 || !(options.effective_damping() >= 0))
    return {Code::invalid_argument, fmt::format("min_samples {}, threads {}, damping {}", options.min_samples,
                                                options.threads, options.effective_damping())};
  if (Status status = check_windows(tokens, options.window); !status.ok()) return status;
  const int vocab = source.config().vocab;
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab)
      return {Code::invalid_argument, fmt::format("token {} is {}: not in [0, {})", i, tokens[i], vocab)};
  return check_unquantized(source);
}

}  // namespace gatefold
