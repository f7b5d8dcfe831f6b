#pragma once
/// \file
/// The order of AWQ's "gemm" layout: eight columns in a word, column c in nibble kAwqNibble[c].

#include <cstddef>
#include <cstdint>

namespace gatefold {

inline constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

/// Column `c` of a row of words.
inline std::uint8_t awq_code(const std::byte* row, std::int64_t c) {
  const int nibble = kAwqNibble[c % 8];
  return std::to_integer<std::uint8_t>(row[c / 8 * 4 + nibble / 2] >> (nibble % 2 * 4)) & 15;
}

}  // namespace gatefold
