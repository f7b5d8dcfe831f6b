// The header of a safetensors file. What is accepted must fit into the file.
#include <cstdint>
#include <cstdlib>

#include "checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto header = gatefold::parse_safetensors_header(bytes, size, "fuzz");
  if (!header) return 0;
  std::uint64_t total = 0;
  for (const gatefold::TensorEntry& entry : header->tensors) {
    if (entry.begin > entry.end || entry.end > size) std::abort();
    total += entry.bytes();
  }
  if (total > size) std::abort();
  return 0;
}
