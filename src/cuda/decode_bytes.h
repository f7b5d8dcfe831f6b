#pragma once
/// \file
/// From packed codes to operands of multiplies in 8 bits, e4m3 or int8, for the device and (emulated) for the
/// host. What comes out is a code's value, or value and folded scale, times 2^-byte_power; exactly, but for
/// small folded scales (byte_table).

#include "cuda/decode.h"

namespace gatefold::cuda {

/// Whether a multiply in M can take the codes' values.
constexpr bool fits_bytes(const PackedFormat& p, Format m) {
  if (p.for_bytes) return m == formats::e4m3;
  if (m == formats::int8) return p.value == formats::int8 || p.value == formats::int4;
  return p.value == formats::e4m3 || p.value == formats::int4;
}

/// value = decoded * 2^byte_power; with folded scales: what decode8 makes of it in bf16.
constexpr int byte_power(const PackedFormat& p, Format m) {
  if (p.for_bytes) return -5;
  return p.value != formats::int4 ? 0 : m == formats::int8 ? -4 : 8;
}

/// What e2m1's magnitudes by a folded scale are as e4m3: a byte each, 0 to 3 in `low`, 4 to 7 in `high`.
struct alignas(8) ByteTable {
  std::uint32_t low, high;
};
/// Of a folded scale as packed (packed.h), of which a row's largest is 254: there, 6 is 384. From 2^-14 of it
/// on products are exact; smaller ones are rounded to multiples of 2^-9, 2^-18 of that 384, which is less
/// than what multiplies keep of a sum. From 2^-19 on they are 0.
inline constexpr int kByteTables = 256;
GATEFOLD_HD constexpr ByteTable byte_table(int scale) {
  ByteTable table = {0, 0};
  if (scale < 254 - 18) return table;
  for (std::uint32_t code = 0; code < 8; ++code) {
    const float product = decode<formats::e2m1>(code) * detail::power_of_two(6 + scale - 254);
    (code < 4 ? table.low : table.high) |= encode<formats::e4m3>(product) << (code % 4 * 8);
  }
  return table;
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

/// 8 codes of a row, neighbours in k: P.value.bits / 4 words to two, in the order of column_of_byte. `table`:
/// of their group, where scales are folded.
template <PackedFormat P, Format M>
GATEFOLD_HD void decode8_bytes(const std::uint32_t* words, const ByteTable& table, std::uint32_t (&out)[2]) {
  static_assert(fits_bytes(P, M));
  if constexpr (P.value.bits == 8) {
    for (int w = 0; w < 2; ++w) out[w] = words[w];
  } else if constexpr (P.for_bytes) {
    select_by_magnitudes(table.low, table.high, words[0], out);
    for (int w = 0; w < 2; ++w) out[w] |= signs_of_bytes(words[0], w);
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
