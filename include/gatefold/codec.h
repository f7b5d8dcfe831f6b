#pragma once
/// \file
/// One constexpr codec for every format, on host and device: `encode<F>(float)` and `decode<F>(code)`.
///
/// encode rounds to nearest, ties to even. Formats of 8 bits and fewer saturate: what is too large, Inf
/// included, becomes the largest finite value of that sign. The 16- and 32-bit formats follow IEEE 754
/// (overflow becomes Inf). Subnormals are kept, -0 stays -0 where the format has a sign. NaN becomes
///   f16, bf16, f32, e5m2, e4m3, ue4m3, ue8m0: the positive NaN with all mantissa bits set (PTX: canonical);
///   e2m1: the largest positive value (PTX satfinite); integers: 0.
/// ue4m3 has no sign: negative values and -0 become 0. ue8m0 has neither sign nor zero: 0 and values below
/// 2^-127 become 2^-127, negative values NaN; halfway between two powers goes to the larger.
///
/// decode is exact. Bits above Format::bits are ignored.
///
/// Every function is branch-free after inlining, so that loops over them vectorize.

#include <bit>
#include <cstdint>

#include "gatefold/format.h"

#if defined(__CUDACC__)
#define GATEFOLD_HD __host__ __device__ __forceinline__
#else
#define GATEFOLD_HD inline __attribute__((always_inline))
#endif

namespace gatefold {
namespace detail {

/// 2^power as a float, for -126 <= power <= 127.
GATEFOLD_HD constexpr float power_of_two(int power) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(power + 127) << 23);
}

/// Rounds |x| <= 2^22 to the nearest integer, ties to even: adding 1.5 * 2^23 leaves no fraction bits.
GATEFOLD_HD constexpr float round_to_integer(float x) {
  constexpr float shift = 12582912.0f;
  return (x + shift) - shift;
}

/// Magnitude (sign bit 0, not NaN) to the code of a narrow float format, saturating.
template <Format F>
GATEFOLD_HD constexpr std::uint32_t encode_magnitude(float magnitude) {
  constexpr int dropped = 23 - F.mantissa_bits;
  constexpr float smallest_normal = power_of_two(1 - F.bias());
  constexpr float limit = static_cast<float>(F.max());
  const float x = magnitude < limit ? magnitude : limit;
  // Normal: add half an ulp less the tie bit's complement, then move the exponent to the new bias.
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = bits + ((1u << (dropped - 1)) - 1) + ((bits >> dropped) & 1);
  const std::uint32_t normal =
      (rounded >> dropped) - (static_cast<std::uint32_t>(127 - F.bias()) << F.mantissa_bits);
  // Subnormal: adding a power of two whose ulp is the format's smallest step lets the FPU round.
  constexpr float shift = power_of_two(1 - F.bias() + dropped);
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(x + shift) - std::bit_cast<std::uint32_t>(shift);
  return x < smallest_normal ? subnormal : normal;
}

template <Format F>
GATEFOLD_HD constexpr std::uint32_t encode_16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  if constexpr (F == formats::bf16) {
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return magnitude > 0x7f800000u ? 0x7fffu : rounded;
  } else {
    // encode_magnitude saturates at 65504; from 65520 on f16 rounds to Inf.
    const std::uint32_t finite = encode_magnitude<F>(std::bit_cast<float>(magnitude));
    const std::uint32_t code = magnitude >= 0x477ff000u ? 0x7c00u : finite;
    return magnitude > 0x7f800000u ? 0x7fffu : (code | sign);
  }
}

}  // namespace detail

/// Code of the value nearest to `value` in the low Format::bits bits; the rest is 0.
template <Format F>
GATEFOLD_HD constexpr std::uint32_t encode(float value) {
  static_assert(F.stored());
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const bool nan = magnitude > 0x7f800000u;
  if constexpr (F == formats::f32) {
    return nan ? 0x7fffffffu : bits;
  } else if constexpr (F.bits == 16) {
    return detail::encode_16<F>(value);
  } else if constexpr (F.is_integer()) {
    constexpr auto high = static_cast<float>(F.max_code());
    constexpr float low = F.kind == Kind::integer ? -high - 1 : 0;
    const float number = nan ? 0.0f : value;
    const float below = number < high ? number : high;
    const float clamped = below > low ? below : low;
    const auto rounded = static_cast<std::int32_t>(detail::round_to_integer(clamped));
    return static_cast<std::uint32_t>(rounded) & ((1u << F.bits) - 1);
  } else if constexpr (F.kind == Kind::exponent) {
    // The nearest power of two; 1.5 * 2^n, halfway, goes up (its only significand bit, the hidden one, is
    // odd). 2^-127 is subnormal in f32.
    const std::uint32_t rounded = (bits + 0x400000u) >> 23;
    const std::uint32_t code = magnitude < 0x00600000u ? 0u : (rounded < 254 ? rounded : 254u);
    const bool negative = (bits >> 31) != 0 && magnitude != 0;
    return nan || negative ? 0xffu : code;
  } else if constexpr (F.kind == Kind::magnitude) {
    const std::uint32_t code = detail::encode_magnitude<F>(value > 0.0f ? value : 0.0f);
    return nan ? (1u << (F.exponent_bits + F.mantissa_bits)) - 1 : code;
  } else {
    const std::uint32_t sign = (bits >> 31) << (F.bits - 1);
    const std::uint32_t finite = detail::encode_magnitude<F>(std::bit_cast<float>(magnitude)) | sign;
    constexpr std::uint32_t nan_code = F.has_nan() ? (1u << (F.bits - 1)) - 1 : F.max_code();
    return nan ? nan_code : finite;
  }
}

/// The value of a code, exactly.
template <Format F>
GATEFOLD_HD constexpr float decode(std::uint32_t code) {
  static_assert(F.stored());
  if constexpr (F == formats::f32) {
    return std::bit_cast<float>(code);
  } else if constexpr (F == formats::bf16) {
    return std::bit_cast<float>(code << 16);
  } else if constexpr (F.kind == Kind::integer) {
    // Move the sign bit to the top, then shift it back arithmetically.
    return static_cast<float>(static_cast<std::int32_t>(code << (32 - F.bits)) >> (32 - F.bits));
  } else if constexpr (F.kind == Kind::unsigned_integer) {
    return static_cast<float>(static_cast<std::int32_t>(code & ((1u << F.bits) - 1)));
  } else if constexpr (F.kind == Kind::exponent) {
    const std::uint32_t biased = code & 0xffu;
    const std::uint32_t bits = biased == 0 ? 0x00400000u : biased << 23;  // 2^-127 is subnormal in f32
    return std::bit_cast<float>(biased == 0xff ? 0x7fc00000u : bits);
  } else {
    // Put exponent and mantissa where f32 has them; the product with 2^(127 - bias) fixes the bias and
    // normalizes subnormals, exactly.
    constexpr int shift = 23 - F.mantissa_bits;
    constexpr std::uint32_t magnitude_mask = (1u << (F.exponent_bits + F.mantissa_bits)) - 1;
    const std::uint32_t magnitude = code & magnitude_mask;
    const float scaled = std::bit_cast<float>(magnitude << shift) * detail::power_of_two(127 - F.bias());
    std::uint32_t bits = std::bit_cast<std::uint32_t>(scaled);
    if constexpr (F.specials == Specials::ieee) {
      constexpr std::uint32_t inf = magnitude_mask - ((1u << F.mantissa_bits) - 1);
      const std::uint32_t special = 0x7f800000u | ((magnitude & ~inf) << shift);
      bits = magnitude >= inf ? special : bits;
    } else if constexpr (F.specials == Specials::nan_only) {
      bits = magnitude == magnitude_mask ? 0x7fc00000u : bits;
    }
    if constexpr (F.kind == Kind::floating) bits |= (code >> (F.bits - 1) & 1) << 31;
    return std::bit_cast<float>(bits);
  }
}

/// `value` rounded to the format and back.
template <Format F>
GATEFOLD_HD constexpr float round_to(float value) {
  return decode<F>(encode<F>(value));
}

/// floor(log2(x)) of a positive, finite x (subnormals included).
GATEFOLD_HD constexpr int floor_log2(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (bits < 0x00800000u) return std::bit_width(bits) - 150;
  return static_cast<int>(bits >> 23) - 127;
}

/// Calls `f.template operator()<F>()` for the runtime value of `format`; one place turns data into types.
/// `format` must be one of formats::all.
template <class Function>
constexpr auto with_format(Format format, Function&& f) {
#define GATEFOLD_CASE(id) \
  if (format == formats::id) return f.template operator()<formats::id>();
  GATEFOLD_CASE(bf16)
  GATEFOLD_CASE(f16)
  GATEFOLD_CASE(e4m3)
  GATEFOLD_CASE(e5m2)
  GATEFOLD_CASE(e2m1)
  GATEFOLD_CASE(ue8m0)
  GATEFOLD_CASE(ue4m3)
  GATEFOLD_CASE(int8)
  GATEFOLD_CASE(int4)
  GATEFOLD_CASE(uint4)
#undef GATEFOLD_CASE
  return f.template operator()<formats::f32>();
}

}  // namespace gatefold
