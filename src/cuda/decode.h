#pragma once
/// \file
/// From packed codes to pairs of 16-bit numbers, the operands of the matrix multiply: one function for each
/// kind of format, and the same source for the device and (emulated) for the host.
///
/// What comes out is exact: a code's value, or value and group scale where 16 bits hold the product
/// (PackedFormat::folded), times 2^-decoded_power. Other scales are applied to the f32 sum of a group, not
/// to the weights: bf16 would round int4 * scale, which costs a relative error of 1.5e-3 per multiply; on
/// sums a scale costs 4 FMA per 2 to 8 multiplies of a warp. Sums of warpgroups cost more: see
/// rounds_products.
///
/// Most sequences rest on one fact: bits placed at the right end of a 16-bit float are a multiple of its
/// smallest subnormal, and bits placed with an exponent field at its end are off by a power of two only. A
/// multiply-add by a power of two makes numbers of them, exactly.

#include "cuda/packed.h"

namespace gatefold::cuda {

/// Two numbers of M, bf16 or f16; the first is in the low half.
using Pair = std::uint32_t;

template <Format M>
constexpr Pair both(float value) {
  return encode<M>(value) * 0x10001u;
}

/// a * b + c, each half rounded once.
template <Format M>
GATEFOLD_HD Pair multiply_add(Pair a, Pair b, Pair c) {
#ifdef __CUDA_ARCH__
  Pair d;
  if constexpr (M == formats::bf16)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  Pair d = 0;
  for (int shift = 0; shift < 32; shift += 16) {  // exact in double, for the numbers of this file
    const double product =
        static_cast<double>(decode<M>(a >> shift & 0xffff)) * decode<M>(b >> shift & 0xffff);
    d |= encode<M>(static_cast<float>(product + decode<M>(c >> shift & 0xffff))) << shift;
  }
  return d;
#endif
}

template <Format M>
GATEFOLD_HD Pair multiply(Pair a, Pair b) {
  return multiply_add<M>(a, b, 0x80008000u);  // -0 keeps the sign of a product that is 0
}

/// (word & mask) | or_bits, in one instruction.
GATEFOLD_HD constexpr std::uint32_t select(std::uint32_t word, std::uint32_t mask, std::uint32_t or_bits) {
  return (word & mask) | or_bits;
}

/// Four bytes of low and high, which the low nibbles of `selector` name; those with their highest bit set:
/// copies of the byte's sign.
GATEFOLD_HD std::uint32_t select_bytes(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  std::uint32_t selected = 0;
#ifdef __CUDA_ARCH__
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(selected) : "r"(low), "r"(high), "r"(selector));
#else
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t at = selector >> (4 * i) & 15, word = at % 8 < 4 ? low : high;
    const std::uint32_t byte = word >> (at % 4 * 8) & 0xff;
    selected |= (at < 8 ? byte : byte < 0x80 ? 0 : 0xff) << (8 * i);
  }
#endif
  return selected;
}

/// The upper byte of each half, as its lower one.
GATEFOLD_HD std::uint32_t upper_bytes(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  return __byte_perm(word, 0, 0x4341);
#else
  return word >> 8 & 0x00ff00ffu;
#endif
}

/// The lower byte of each half, the only one, as its upper one. Not a mask of a shifted word, as compilers
/// would have it: another mask would come first.
GATEFOLD_HD std::uint32_t to_upper_bytes(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  std::uint32_t upper;
  asm("shl.b32 %0, %1, 8;" : "=r"(upper) : "r"(word));
  return upper;
#else
  return word << 8;
#endif
}

/// Sign and fields from where bf16 has them to where M has them: f16's exponent is three bits further left.
template <Format M>
GATEFOLD_HD Pair fields_of_bf16(Pair pair) {
  if constexpr (M == formats::bf16) return pair;
  return select(pair, 0x80008000u, (pair & 0x0fff0fffu) << 3);
}

/// Whether decode8 takes folded scales as packed; smaller ones than kLeastScale count as that.
template <PackedFormat P, Format M>
constexpr bool takes_scales() {
  return P.for_bytes && M == formats::f16;
}
inline constexpr std::uint32_t kLeastScale = 254 - 26;  ///< a row's largest is 254

/// value = decoded * 2^decoded_power.
template <PackedFormat P, Format M>
constexpr int decoded_power() {
  if (M.bits == 8) return 0;
  if (P.value.is_integer()) return 9;
  if (takes_scales<P, M>()) return -12;
  if (P.folded) return P.scale == formats::ue4m3 ? 11 : 0;
  if (P.value == formats::e4m3 && M == formats::f16) return 8;
  return 0;
}

/// What decode8 takes beside the codes of a row: a zero point, or a folded scale.
template <PackedFormat P, Format M>
GATEFOLD_HD Pair zero_term(std::uint32_t zero) {
  constexpr Pair minus = both<M>(M == formats::bf16 ? -0x1p124f : -0x1p15f);
  return multiply<M>(zero * 0x10001u, minus);
}
/// A folded scale from halves with its byte below the one of folded_upper: ue4m3 times 2^115 (bf16) or 2^3
/// (f16); of ue8m0 the row's largest is 2^127 or 2^15.
template <PackedFormat P, Format M>
GATEFOLD_HD constexpr std::uint32_t folded_upper() {
  return P.scale == formats::ue4m3 && M == formats::bf16 ? 7 : 0;
}
template <PackedFormat P, Format M>
GATEFOLD_HD Pair folded_pair(Pair halves) {
  if constexpr (P.scale == formats::ue4m3) return halves << (M == formats::bf16 ? 4 : 7);
  if constexpr (M == formats::bf16) return halves << 7;
  const std::uint32_t exponent = halves & 0xff;
  return exponent > 224 ? (exponent - 224) * 0x04000400u : 0;
}
template <PackedFormat P, Format M>
GATEFOLD_HD Pair folded_term(std::uint32_t repacked) {
  if constexpr (takes_scales<P, M>()) return repacked < kLeastScale ? kLeastScale : repacked;
  return folded_pair<P, M>((repacked | folded_upper<P, M>() << 8) * 0x10001u);
}

/// Integers that count from 0: the low bits of a half are subnormals, and so are the next ones, times 16.
/// `low` and `high` are the factors of both, to which `start` is added.
template <PackedFormat P, Format M>
GATEFOLD_HD void scale_integers(const std::uint32_t* words, Pair low, Pair high, Pair start, Pair* out) {
  if constexpr (P.value.bits == 8) {
    for (int w = 0; w < 2; ++w) {
      const std::uint32_t codes = words[w] ^ 0x80808080u;  // which count from 0
      out[2 * w] = multiply_add<M>(codes & 0x00ff00ffu, low, start);
      out[2 * w + 1] = multiply_add<M>(upper_bytes(codes), low, start);
    }
  } else {
    const std::uint32_t upper = words[0] >> 8;
    out[0] = multiply_add<M>(words[0] & 0x000f000fu, low, start);
    out[1] = multiply_add<M>(words[0] & 0x00f000f0u, high, start);
    out[2] = multiply_add<M>(upper & 0x000f000fu, low, start);
    out[3] = multiply_add<M>(upper & 0x00f000f0u, high, start);
  }
}
template <PackedFormat P, Format M>
GATEFOLD_HD void decode_integers(const std::uint32_t* words, Pair term, Pair* out) {
  constexpr float unit = M == formats::bf16 ? 0x1p124f : 0x1p15f;  // smallest subnormal to 2^-9
  constexpr Pair low = both<M>(unit), high = both<M>(unit / 16);
  constexpr Pair offset = both<M>(-0x1p-9f * static_cast<float>(1 << (P.value.bits - 1)));
  scale_integers<P, M>(words, low, high, P.zeros ? term : offset, out);
}

/// e4m3 and e5m2: sign and fields where M has them, to numbers.
template <PackedFormat P, Format M>
GATEFOLD_HD Pair scale_bytes(Pair moved, Pair term) {
  if constexpr (P.folded) return multiply<M>(moved, term);
  if constexpr (M == formats::f16) return moved;  // decoded_power
  constexpr Pair power = both<M>(detail::power_of_two(M.bias() - P.value.bias()));
  return multiply<M>(moved, power);
}

/// e4m3, codes 2 i and 2 i + 1 of a word, sign and fields to where M has them: a byte below copies of its
/// sign, which a shift brings there.
template <Format M>
GATEFOLD_HD Pair move_e4m3(std::uint32_t word, int i) {
  const std::uint32_t halves = select_bytes(word, word, i == 0 ? 0xa280 : 0xb391);
  return M == formats::f16 ? halves << 7 & 0xbf80bf80u : halves << 4 & 0x87f087f0u;
}
template <PackedFormat P, Format M>
GATEFOLD_HD void decode_e4m3(std::uint32_t word, Pair term, Pair* out) {
  for (int i = 0; i < 2; ++i) out[i] = scale_bytes<P, M>(move_e4m3<M>(word, i), term);
}

/// e5m2, a word.
template <PackedFormat P, Format M>
GATEFOLD_HD void decode_e5m2(std::uint32_t word, Pair term, Pair* out) {
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t upper = i == 0 ? word << 8 : word;
    const Pair moved =
        M == formats::f16 ? upper & 0xff00ff00u : select(upper, 0x80008000u, upper >> 3 & 0x0fe00fe0u);
    out[i] = scale_bytes<P, M>(moved, term);
  }
}

/// Magnitudes in the nibbles of a word that is for bytes: 8 bytes of `low` and `high`, which have 8 each.
GATEFOLD_HD void select_by_magnitudes(std::uint32_t low, std::uint32_t high, std::uint32_t word,
                                      std::uint32_t (&out)[2]) {
  const std::uint32_t magnitudes = word & 0x77777777u;
  out[0] = select_bytes(low, high, magnitudes);
  out[1] = select_bytes(low, high, magnitudes >> 16);
}
/// Its signs, as those of four bytes each.
GATEFOLD_HD constexpr std::uint32_t signs_of_bytes(std::uint32_t word, int i) {
  return (i == 0 ? word : word << 4) & 0x80808080u;
}

/// e2m1 for bytes, by a folded scale: f16 has all of such a product in its upper byte, where a power of two
/// counts 4. So the tables are those of kLeastScale, and 4 more for each power above it, but for magnitude 0.
template <PackedFormat P>
GATEFOLD_HD void decode_to_upper_bytes(std::uint32_t word, std::uint32_t scale, Pair* out) {
  constexpr std::uint32_t low = 0x04040400u, high = 0x04040404u;
  std::uint32_t bytes[2];
  select_by_magnitudes(scale * low + (0x0a080400u - kLeastScale * low),
                       scale * high + (0x12100e0cu - kLeastScale * high), word, bytes);
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t all = bytes[i] | signs_of_bytes(word, i), even = all & 0x00ff00ffu;
    out[2 * i] = to_upper_bytes(even);
    out[2 * i + 1] = all - even;
  }
}

/// e2m1, sign and fields to where bf16 has them: see code_bit.
template <PackedFormat P>
GATEFOLD_HD void move_e2m1(std::uint32_t word, Pair (&moved)[4]) {
  if constexpr (P.for_bytes) {
    std::uint32_t low[2], high[2];
    select_by_magnitudes(0xc0804000u, 0xc0804000u, word, low);
    select_by_magnitudes(0, 0x01010101u, word, high);
    for (int i = 0; i < 4; ++i)
      moved[i] =
          select_bytes(low[i / 2], high[i / 2] | signs_of_bytes(word, i / 2), i % 2 == 0 ? 0x6240 : 0x7351);
  } else {
    constexpr std::uint32_t mask = 0x81c081c0u;
    moved[0] = word & mask;
    moved[1] = word << 6 & mask;
    moved[2] = (word >> 6 | word << 26) & mask;
    moved[3] = select(word << 4, 0x81808180u, word >> 4 & 0x00400040u);
  }
}
template <PackedFormat P, Format M>
GATEFOLD_HD void decode_e2m1(std::uint32_t word, Pair term, Pair* out) {
  if constexpr (takes_scales<P, M>()) return decode_to_upper_bytes<P>(word, term, out);
  constexpr Pair power = both<M>(detail::power_of_two(M.bias() - 1));
  Pair moved[4];
  move_e2m1<P>(word, moved);
  for (int i = 0; i < 4; ++i) out[i] = multiply<M>(fields_of_bf16<M>(moved[i]), P.folded ? term : power);
}

/// 8 codes of a row, neighbours in k: P.value.bits / 4 words to 4 pairs.
template <PackedFormat P, Format M>
GATEFOLD_HD void decode8(const std::uint32_t* words, Pair term, Pair* out) {
  if constexpr (P.value.bits == 16) {
    for (int i = 0; i < 4; ++i) out[i] = words[i];
  } else if constexpr (P.value.is_integer()) {
    decode_integers<P, M>(words, term, out);
  } else if constexpr (P.value.bits == 8) {
    for (int w = 0; w < 2; ++w) {
      if constexpr (P.value == formats::e4m3)
        decode_e4m3<P, M>(words[w], term, out + 2 * w);
      else
        decode_e5m2<P, M>(words[w], term, out + 2 * w);
    }
  } else {
    decode_e2m1<P, M>(words[0], term, out);
  }
}

/// Whether warpgroups multiply products of codes and group scales (multiplies_products), rounded to the
/// multiply's type: where scales have it, too.
constexpr bool rounds_products(const PackedFormat& p, Format m) {
  return multiplies_products(p) && p.scale == m;
}
/// value = product * 2^product_power.
template <PackedFormat P, Format M>
constexpr int product_power() {
  return P.zeros ? 9 : M == formats::bf16 ? 33 : 24;
}
/// 8 codes of a row by their group's scale, which both halves of `scale` have; term: see decode8. Differences
/// from zero points are exact. In bf16 products may overflow from scales of 2^28 on, and those by scales
/// below 2^-93 lose bits; in f16 from 2^16 on (the row's largest is less), and below 2^10 (with zero points
/// 2^-5).
template <PackedFormat P, Format M>
GATEFOLD_HD void decode8_products(const std::uint32_t* words, Pair term, Pair scale, Pair* out) {
  static_assert(rounds_products(P, M));
  if constexpr (P.zeros) {
    decode_integers<P, M>(words, term, out);
    for (int i = 0; i < 4; ++i) out[i] = multiply<M>(out[i], scale);
  } else {  // bf16: smallest subnormal to 2^-33; f16: as they are
    constexpr float unit = M == formats::bf16 ? 0x1p100f : 1;
    constexpr Pair low = both<M>(unit), high = both<M>(unit / 16),
                   offset = both<M>(-8 * detail::power_of_two(-product_power<P, M>()));
    scale_integers<P, M>(words, M == formats::bf16 ? multiply<M>(scale, low) : scale,
                         multiply<M>(scale, high), multiply<M>(scale, offset), out);
  }
}

/// A power of two by which inputs are larger where weights are left too small, or 1: fields of e4m3, where
/// bf16 has them, are numbers 2^120 too small, and products with them would not be normal in f32. Inputs of
/// 2^72 or more become infinite.
template <PackedFormat P, Format M>
constexpr float input_scale() {
  return P.value == formats::e4m3 && !P.folded && M == formats::bf16 ? 0x1p56f : 1;
}
/// By which sums of warpgroups are multiplied: of such inputs, and of weights by decode8_small or
/// decode8_products.
template <PackedFormat P, Format M>
constexpr float sum_scale() {
  if (rounds_products(P, M)) return detail::power_of_two(product_power<P, M>());
  return input_scale<P, M>() != 1 ? 0x1p120f / input_scale<P, M>()
                                  : detail::power_of_two(decoded_power<P, M>());
}
/// decode8, of weights that may be too small.
template <PackedFormat P, Format M>
GATEFOLD_HD void decode8_small(const std::uint32_t* words, Pair term, Pair* out) {
  if constexpr (input_scale<P, M>() == 1)
    decode8<P, M>(words, term, out);
  else
    for (int i = 0; i < 4; ++i) out[i] = move_e4m3<M>(words[i / 2], i % 2);
}

/// f16 as the sum of two bf16, exactly: what a bf16 multiply needs where one operand is f16 and the other is
/// bf16, which f16 cannot hold.
GATEFOLD_HD void split_f16(Pair value, Pair& high, Pair& low) {
  high = low = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const float x = decode<formats::f16>(value >> shift & 0xffff);
    const std::uint32_t first = encode<formats::bf16>(x);
    const float rounded = decode<formats::bf16>(first);
    high |= first << shift;
    low |= encode<formats::bf16>(x == rounded ? 0.0f : x - rounded) << shift;  // Inf has no second part
  }
}

}  // namespace gatefold::cuda
