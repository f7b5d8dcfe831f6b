#pragma once
/// \file
/// From packed codes to operands of multiplies in 8 bits, e4m3 or int8, for the device and (emulated) for the
/// host. What comes out is exact: a code's value times 2^-byte_power.

#include "cuda/decode.h"

namespace gatefold::cuda {

/// Whether a multiply in M can take the codes' values.
constexpr bool fits_bytes(Format value, Format m) {
  if (m == formats::int8) return value == formats::int8 || value == formats::int4;
  return value == formats::e4m3 || value == formats::int4;
}

/// value = decoded * 2^byte_power.
constexpr int byte_power(Format value, Format m) {
  return value != formats::int4 ? 0 : m == formats::int8 ? -4 : 8;
}

/// |a - b| of each byte.
GATEFOLD_HD std::uint32_t byte_distances(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDA_ARCH__
  return __vabsdiffu4(a, b);
#else
  std::uint32_t distances = 0;
  for (int shift = 0; shift < 32; shift += 8) {
    const std::uint32_t x = a >> shift & 0xff, y = b >> shift & 0xff;
    distances |= (x < y ? y - x : x - y) << shift;
  }
  return distances;
#endif
}

/// 8 codes of a row, neighbours in k: P.value.bits / 4 words to two, in the order of column_of_byte.
template <PackedFormat P, Format M>
GATEFOLD_HD void decode8_bytes(const std::uint32_t* words, std::uint32_t (&out)[2]) {
  static_assert(fits_bytes(P.value, M));
  if constexpr (P.value.bits == 8) {
    for (int w = 0; w < 2; ++w) out[w] = words[w];
  } else if constexpr (M == formats::int8) {
    out[0] = (words[0] << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
    out[1] = (words[0] & 0xf0f0f0f0u) ^ 0x80808080u;
  } else {
    // e4m3's bytes up to 16 are multiples of its smallest subnormal. Codes count from 0, and are doubled, so
    // that 4 to 7 are normal numbers: multiplies align products by their exponents, those of subnormals as if
    // they had leading bits.
    constexpr std::uint32_t codes = 0x1e1e1e1eu, zeros = 0x10101010u, signs = 0x80808080u;
    out[0] = byte_distances(words[0] << 1 & codes, zeros) | (~(words[0] << 4) & signs);
    out[1] = byte_distances(words[0] >> 3 & codes, zeros) | (~words[0] & signs);
  }
}

}  // namespace gatefold::cuda
