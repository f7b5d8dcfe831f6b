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
  return value == formats::int4 && m == formats::int8 ? -4 : 0;
}

/// e4m3 of first .. first + 3.
constexpr std::uint32_t e4m3_of_four(int first) {
  std::uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= encode<formats::e4m3>(static_cast<float>(first + i)) << (8 * i);
  return word;
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
    // Tables of those below 0 (codes 0 to 7) and of the others; multiples of e4m3's smallest subnormal would
    // need none, but multiplies align products by their exponents, as if they had leading bits.
    constexpr std::uint32_t below[2] = {e4m3_of_four(-8), e4m3_of_four(-4)},
                            above[2] = {e4m3_of_four(0), e4m3_of_four(4)};
    const std::uint32_t shifted = words[0] << 4, places = words[0] & 0x77777777u;
    for (int w = 0; w < 2; ++w)
      out[w] = merge(select_bytes(above[0], above[1], places >> (16 * w)),
                     select_bytes(below[0], below[1], places >> (16 * w)),
                     select_bytes(shifted, words[0], w == 0 ? 0xd9c8 : 0xfbea));
  }
}

}  // namespace gatefold::cuda
