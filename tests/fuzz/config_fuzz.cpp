// config.json. What is accepted must be a layer that can be built.
#include <cstdint>
#include <cstdlib>

#include "checkpoint/config.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto config =
      gatefold::parse_config(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  if (!config) return 0;
  const gatefold::ModelConfig& model = config->model;
  const bool good = model.moe.validate().ok() && model.layers > 0 && model.head_dim > 0 &&
                    model.is_moe.size() == static_cast<std::size_t>(model.layers) &&
                    model.heads % model.kv_heads == 0;
  if (!good) std::abort();
  return 0;
}
