// model.safetensors.index.json. What is accepted must not lead out of the directory.
#include <cstdint>
#include <cstdlib>
#include <filesystem>

#include "checkpoint/index.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto index =
      gatefold::parse_index(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  if (!index) return 0;
  for (const auto& [tensor, shard] : *index)
    if (std::filesystem::path(shard).filename() != shard || shard == "." || shard == "..") std::abort();
  return 0;
}
