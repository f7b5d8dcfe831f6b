#pragma once
/// \file
/// The multiply of the CPU kernels, per instruction set.

#include <cstdint>

#include "format/isa.h"

namespace gatefold {

/// Rows are padded with zeros to a multiple of this many floats.
inline constexpr std::int64_t kPadding = 16;
constexpr std::int64_t padded(std::int64_t k) {
  return (k + kPadding - 1) / kPadding * kPadding;
}

/// out[m][r] = x[m] . w[r] for m < tokens, r < rows; k is padded, w is [rows, k], out has row stride
/// `stride`. The order of the additions depends on k alone, so that a token's result does not depend on its
/// neighbours.
using Multiply = void (*)(const float* const* x, std::int64_t tokens, const float* w, std::int64_t rows,
                          std::int64_t k, float* out, std::int64_t stride);

Multiply multiply(Isa isa);

}  // namespace gatefold
