#pragma once
/// \file
/// The header of a safetensors file:
///
///   bytes 0..7    N, little-endian
///   bytes 8..8+N  JSON: {"__metadata__": {"key": "value"}, "tensor name": {"dtype": "BF16", "shape": [2, 3],
///                 "data_offsets": [begin, end]}, ...}, offsets from 8 + N
///   the rest      the tensors, row-major, without gaps or overlap

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "gatefold/checkpoint.h"
#include "gatefold/status.h"

namespace gatefold {

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< in file order; offsets count from the start of the file; file = 0
  std::map<std::string, std::string> metadata;
};

inline constexpr std::uint64_t max_safetensors_header = 100'000'000;

/// `bytes` is the file, or as much of its beginning as holds the header; `file_size` its whole size. `file`
/// begins every message. All of what the format demands is checked.
Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> bytes, std::uint64_t file_size,
                                                   const std::string& file);

}  // namespace gatefold
