#pragma once
/// \file
/// Integer weights as GPTQ, AWQ and compressed-tensors hold them, to a QuantizedMatrix of a row of the table.
/// The row may have more bits and smaller groups than the checkpoint: codes fit, and scales are repeated, so
/// nothing is lost.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/convention.h"
#include "gatefold/quantize.h"

namespace gatefold {

/// What a config says of integer weights.
struct IntegerFormat {
  int bits = 4;
  bool symmetric = true;   ///< the zero point is 2^(bits-1) everywhere, and is not needed
  std::int64_t group = 0;  ///< columns that share a scale; 0: all

  std::int64_t groups(std::int64_t k) const { return group == 0 ? 1 : (k + group - 1) / group; }
  std::uint32_t middle() const { return 1u << (bits - 1); }
};

/// The row of the table that holds such weights of every matrix of the model's experts: of those with these
/// activations, enough bits, and groups that divide the checkpoint's and each `k`, the one with the fewest
/// bits and the largest groups. Error: Code::unsupported.
Result<SchemeId> integer_row(const IntegerFormat& format, const Operand& activation,
                             std::span<const std::int64_t> k);

/// One matrix [n, k] in the checkpoint's own terms.
struct IntegerSource {
  IntegerFormat format;
  Format scale_format;
  std::vector<std::byte> scales;       ///< [n, groups] of scale_format
  std::vector<std::uint8_t> zeros;     ///< [n, groups]; empty: symmetric
  std::vector<std::int32_t> group_of;  ///< [k] (g_idx); empty: column / group
  /// Codes [count, k], unsigned, of rows first, first + 1, ...
  std::function<void(std::int64_t first, std::int64_t count, std::uint8_t* codes)> rows;
};

/// Errors: a group that does not exist, groups in an order that the row cannot hold.
Result<QuantizedMatrix> integer_matrix(SchemeId row, std::int64_t n, std::int64_t k,
                                       const IntegerSource& source);

/// The order of columns in which those of a group lie side by side; empty if they do so already. Error: a
/// group outside [0, groups).
Result<std::vector<std::int32_t>> column_order(std::span<const std::int32_t> group_of, std::int64_t groups);

/// Code `i` of a sequence of words that hold codes of `bits` bits, lowest first, without gaps (a code may
/// begin in one word and end in the next). Word w is at data + w * stride * 4.
inline std::uint32_t dense_code(const std::byte* data, std::int64_t stride, int bits, std::int64_t i) {
  const auto word = [&](std::int64_t w) {
    std::uint32_t value = 0;
    __builtin_memcpy(&value, data + w * stride * 4, 4);
    return value;
  };
  const std::int64_t bit = i * bits;
  const int shift = static_cast<int>(bit % 32);
  std::uint32_t code = word(bit / 32) >> shift;
  if (shift + bits > 32) code |= word(bit / 32 + 1) << (32 - shift);
  return code & ((1u << bits) - 1);
}

}  // namespace gatefold
