#pragma once
/// \file
/// Rows of numbers: widen, range, encode, decode. For *.isa.cpp files only: everything is in an unnamed
/// namespace, so that each instruction set has its own copy, and is written so that the compiler vectorizes
/// it.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "format/scale_rule.h"
#include "gatefold/codec.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

template <class T>
T load(const std::byte* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof(T));
  return value;
}

/// `count` elements of a 16- or 32-bit float format to f32. No alignment is needed.
template <Format F>
void widen(const std::byte* in, std::int64_t count, float* out) {
  using Code = std::conditional_t<F.bits == 32, std::uint32_t, std::uint16_t>;
  for (std::int64_t i = 0; i < count; ++i) out[i] = decode<F>(load<Code>(in + i * sizeof(Code)));
}

/// Calls f(begin, count) for each group of a row. The short groups of the common formats get a constant
/// count (std::integral_constant), so that their loops become straight vector code.
template <class Function>
GATEFOLD_HD void for_each_group(std::int64_t k, std::int64_t group, Function&& f) {
  if (group == 16 && k % 16 == 0) {
    for (std::int64_t begin = 0; begin < k; begin += 16) f(begin, std::integral_constant<std::int64_t, 16>{});
  } else if (group == 32 && k % 32 == 0) {
    for (std::int64_t begin = 0; begin < k; begin += 32) f(begin, std::integral_constant<std::int64_t, 32>{});
  } else {
    for (std::int64_t begin = 0; begin < k; begin += group) f(begin, begin + group < k ? group : k - begin);
  }
}

/// Widens ranges[g] by the least and greatest number of each group. Returns false if a number is NaN or Inf;
/// those count as 0. Works on integers in float order (the other bits of a negative float flipped): the
/// compiler vectorizes integer minima, and no float ones.
inline bool ranges(const float* x, std::int64_t k, std::int64_t group, GroupRange* out) {
  std::int32_t worst = 0;
  for_each_group(
      k, group, [&](std::int64_t begin, auto count) __attribute__((always_inline)) {
        std::int32_t low = 0, high = 0;
        for (std::int64_t i = 0; i < count; ++i) {
          const auto bits = std::bit_cast<std::int32_t>(x[begin + i]);
          const std::int32_t magnitude = bits & 0x7fffffff;
          worst = magnitude > worst ? magnitude : worst;
          const std::int32_t finite = magnitude < 0x7f800000 ? bits : 0;
          const std::int32_t ordered = finite ^ ((finite >> 31) & 0x7fffffff);
          low = ordered < low ? ordered : low;
          high = ordered > high ? ordered : high;
        }
        const float least = std::bit_cast<float>(low ^ ((low >> 31) & 0x7fffffff));
        const float greatest = std::bit_cast<float>(high);
        if (least < out->low) out->low = least;
        if (greatest > out->high) out->high = greatest;
        ++out;
      });
  return worst < 0x7f800000;
}

/// Codes go through a small buffer, one byte (16-bit formats: two) each, so that the loops over numbers know
/// nothing of packing.
inline constexpr std::int64_t kChunk = 256;

template <Format F>
using CodeType = std::conditional_t<F.bits == 16, std::uint16_t, std::uint8_t>;

template <Format F>
void pack(const CodeType<F>* codes, std::int64_t count, std::byte* out) {
  if constexpr (F.bits == 4) {
    for (std::int64_t i = 0; i < count / 2; ++i)
      out[i] = static_cast<std::byte>(codes[2 * i] | codes[2 * i + 1] << 4);
  } else {
    __builtin_memcpy(out, codes, static_cast<std::size_t>(count) * sizeof(CodeType<F>));
  }
}

template <Format F>
void unpack(const std::byte* in, std::int64_t count, CodeType<F>* codes) {
  if constexpr (F.bits == 4) {
    for (std::int64_t i = 0; i < count / 2; ++i) {
      const auto both = static_cast<std::uint8_t>(in[i]);
      codes[2 * i] = both & 15;
      codes[2 * i + 1] = both >> 4;
    }
  } else {
    __builtin_memcpy(codes, in, static_cast<std::size_t>(count) * sizeof(CodeType<F>));
  }
}

/// What to divide by: under a scale of 0 every code is 0.
inline float divisor(float scale) {
  return scale > 0 ? scale : std::numeric_limits<float>::infinity();
}

/// The code of x.
template <Format F>
GATEFOLD_HD std::uint32_t quantized(float x, float divisor, float zero) {
  const float scaled = x / divisor;
  if constexpr (F.kind == Kind::unsigned_integer) {
    // Round before the zero point is added; the clamp keeps the rounding in its range.
    const float low = scaled > -1e6f ? scaled : -1e6f;
    const float bounded = low < 1e6f ? low : 1e6f;
    return encode<F>(detail::round_to_integer(bounded) + zero);
  } else {
    return encode<F>(scaled);
  }
}

/// Calls f(begin, size) for pieces of a row of at most kChunk numbers, which hold whole groups or lie in one.
template <class Function>
GATEFOLD_HD void for_each_chunk(std::int64_t k, std::int64_t group, Function&& f) {
  if (group <= kChunk) {
    const std::int64_t span = kChunk / group * group;
    for (std::int64_t begin = 0; begin < k; begin += span) f(begin, begin + span < k ? span : k - begin);
  } else {
    for_each_group(
        k, group, [&](std::int64_t first, std::int64_t count) __attribute__((always_inline)) {
          for (std::int64_t at = 0; at < count; at += kChunk)
            f(first + at, at + kChunk < count ? kChunk : count - at);
        });
  }
}

/// Row of `k` numbers to packed codes; group g of `group` numbers uses scale[g], zero[g].
template <Format F>
void encode_row(const float* x, std::int64_t k, std::int64_t group, const float* scale, const float* zero,
                std::byte* out) {
  CodeType<F> codes[kChunk];
  for_each_chunk(
      k, group, [&](std::int64_t chunk, std::int64_t size) __attribute__((always_inline)) {
        std::int64_t g = chunk / group;
        for_each_group(
            size, group, [&](std::int64_t begin, auto count) __attribute__((always_inline)) {
              const float d = divisor(scale[g]), z = zero[g];
              ++g;
              for (std::int64_t i = 0; i < count; ++i)
                codes[begin + i] = static_cast<CodeType<F>>(quantized<F>(x[chunk + begin + i], d, z));
            });
        pack<F>(codes, size, out + chunk * F.bits / 8);
      });
}

/// Packed codes to f32: (code - zero[g]) * scale[g].
template <Format F>
void decode_row(const std::byte* in, std::int64_t k, std::int64_t group, const float* scale,
                const float* zero, float* out) {
  CodeType<F> codes[kChunk];
  for_each_chunk(
      k, group, [&](std::int64_t chunk, std::int64_t size) __attribute__((always_inline)) {
        unpack<F>(in + chunk * F.bits / 8, size, codes);
        std::int64_t g = chunk / group;
        for_each_group(
            size, group, [&](std::int64_t begin, auto count) __attribute__((always_inline)) {
              const float s = scale[g], z = zero[g];
              ++g;
              for (std::int64_t i = 0; i < count; ++i) {
                const float value = decode<F>(codes[begin + i]);
                out[chunk + begin + i] = (F.kind == Kind::unsigned_integer ? value - z : value) * s;
              }
            });
      });
}

/// Sum of squared errors of one group under (scale, zero); real = (code - zero) * real_scale. `weight`
/// [count] multiplies each square; nullptr: all are 1.
template <Format F>
double group_error(const float* x, std::int64_t count, float scale, float zero, const float* weight) {
  const float d = divisor(scale);
  double sum = 0;
  const auto add = [&](std::int64_t i, float factor) __attribute__((always_inline)) {
    const float error = x[i] - (decode<F>(quantized<F>(x[i], d, zero)) - zero) * scale;
    sum += static_cast<double>(error) * error * factor;
  };
  if (weight == nullptr)
    for (std::int64_t i = 0; i < count; ++i) add(i, 1.0f);
  else
    for (std::int64_t i = 0; i < count; ++i) add(i, weight[i]);
  return sum;
}

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
