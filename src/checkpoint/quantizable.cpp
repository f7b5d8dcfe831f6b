#include "checkpoint/quantizable.h"

#include <fmt/format.h>

namespace gatefold {

Status check_unquantized(const Checkpoint& checkpoint) {
  const auto refuse = [&](const std::string& what, std::string_view how) -> Status {
    return {Code::invalid_argument,
            fmt::format("{}: {} quantized already ({}, {}); quantize the unquantized model instead",
                        checkpoint.directory().string(), what, checkpoint.convention(), how)};
  };
  const auto stored = checkpoint.stored_scheme();
  if (!stored) return refuse("its experts are", stored.status().message());
  if (scheme(*stored).weight.quantized()) return refuse("its experts are", scheme(*stored).name);
  const auto others = checkpoint.other_quantized_layers();
  if (!others.empty())
    return refuse(others.front().module + " is", fmt::format("{} such layers", others.size()));
  const auto cache = checkpoint.fp8_kv_cache();
  if (!cache) return refuse("its KV cache is", cache.status().message());
  return *cache ? refuse("its KV cache is", "fp8_e4m3") : Status();
}

}  // namespace gatefold
