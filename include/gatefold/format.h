#pragma once
/// \file
/// Number formats as data. A `Format` says everything that the codec (codec.h) needs, so that a new eXmY or
/// intN is one line here. All types are structural: a Format can be a template argument.
///
/// Sources: OCP Microscaling Formats v1.0 (e4m3, e5m2, e2m1, ue8m0), IEEE 754 (f16, f32), NVIDIA PTX ISA
/// (satfinite conversions, ue4m3 block scales of NVFP4).

#include <cstdint>
#include <string_view>

namespace gatefold {

enum class Kind : std::uint8_t {
  none,       ///< nothing is stored
  floating,   ///< sign, exponent, mantissa
  magnitude,  ///< exponent and mantissa; the sign bit is always 0 (ue4m3)
  exponent,   ///< a power of two 2^(code - bias); no zero, no sign (ue8m0)
  integer,    ///< two's complement
  unsigned_integer,
};

/// Which codes at the top of the range are not numbers.
enum class Specials : std::uint8_t {
  none,      ///< every code is a finite number (e2m1, integers)
  ieee,      ///< the highest exponent holds Inf and NaN (f32, f16, bf16, e5m2)
  nan_only,  ///< only the all-ones code is NaN; no Inf (e4m3fn, ue4m3, ue8m0)
};

struct Format {
  Kind kind = Kind::none;
  std::uint8_t bits = 0;  ///< storage bits of one code
  std::uint8_t exponent_bits = 0;
  std::uint8_t mantissa_bits = 0;
  Specials specials = Specials::none;

  friend constexpr bool operator==(const Format&, const Format&) = default;

  constexpr bool stored() const { return kind != Kind::none; }
  constexpr bool is_float() const { return kind == Kind::floating || kind == Kind::magnitude; }
  constexpr bool is_integer() const { return kind == Kind::integer || kind == Kind::unsigned_integer; }
  constexpr bool has_nan() const { return specials != Specials::none; }

  /// Exponent bias, 2^(exponent_bits-1) - 1.
  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }

  /// Code of the largest finite value (sign bit 0).
  constexpr std::uint32_t max_code() const {
    if (kind == Kind::integer) return (1u << (bits - 1)) - 1;
    if (kind == Kind::unsigned_integer) return (1u << bits) - 1;
    const std::uint32_t all_ones = (1u << (exponent_bits + mantissa_bits)) - 1;
    if (specials == Specials::ieee) return all_ones - (1u << mantissa_bits);
    return specials == Specials::nan_only ? all_ones - 1 : all_ones;
  }

  /// Largest finite value.
  constexpr double max() const {
    if (is_integer()) return max_code();
    double value =
        1.0 + static_cast<double>(max_code() & ((1u << mantissa_bits) - 1)) / (1u << mantissa_bits);
    int power = static_cast<int>(max_code() >> mantissa_bits) - bias();
    for (; power > 0; --power) value *= 2;
    for (; power < 0; ++power) value /= 2;
    return value;
  }

  /// Exponent of the largest finite value: floor(log2(max())). The "emax" of the MX scale rule.
  constexpr int max_exponent() const { return static_cast<int>(max_code() >> mantissa_bits) - bias(); }
};

namespace formats {
inline constexpr Format none{};
inline constexpr Format f32{Kind::floating, 32, 8, 23, Specials::ieee};
inline constexpr Format bf16{Kind::floating, 16, 8, 7, Specials::ieee};
inline constexpr Format f16{Kind::floating, 16, 5, 10, Specials::ieee};
inline constexpr Format e4m3{Kind::floating, 8, 4, 3, Specials::nan_only};
inline constexpr Format e5m2{Kind::floating, 8, 5, 2, Specials::ieee};
inline constexpr Format e2m1{Kind::floating, 4, 2, 1, Specials::none};
inline constexpr Format ue8m0{Kind::exponent, 8, 8, 0, Specials::nan_only};
inline constexpr Format ue4m3{Kind::magnitude, 8, 4, 3, Specials::nan_only};
inline constexpr Format int8{Kind::integer, 8, 0, 0, Specials::none};
inline constexpr Format int4{Kind::integer, 4, 0, 0, Specials::none};
inline constexpr Format uint4{Kind::unsigned_integer, 4, 0, 0, Specials::none};

struct Named {
  std::string_view name;
  Format format;
};
inline constexpr Named all[] = {{"f32", f32},   {"bf16", bf16}, {"f16", f16},     {"e4m3", e4m3},
                                {"e5m2", e5m2}, {"e2m1", e2m1}, {"ue8m0", ue8m0}, {"ue4m3", ue4m3},
                                {"int8", int8}, {"int4", int4}, {"uint4", uint4}};
}  // namespace formats

/// "e4m3"; "none" for a format that is not in the list.
constexpr std::string_view name(Format format) {
  for (const auto& entry : formats::all)
    if (entry.format == format) return entry.name;
  return "none";
}

}  // namespace gatefold
