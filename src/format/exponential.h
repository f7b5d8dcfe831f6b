#pragma once
/// \file
/// e^x, which vectorizes, and scores that are made of it, with the same bits on every CPU and GPU, so that
/// routing chooses the same experts everywhere.

#include <bit>
#include <cmath>
#include <cstdint>

#include "gatefold/codec.h"

namespace gatefold {

/// Within 2 ulp for normal results; exactly 1 at 0; 0 below -104, Inf above 89, NaN of NaN.
GATEFOLD_HD float exponential(float x) {
  const float low = x > -104.0f ? x : -104.0f;
  const float bounded = low < 89.0f ? low : 89.0f;
  const float n = detail::round_to_integer(bounded * 1.44269504f);
  // ln 2 in two parts, so that n times the first is exact.
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // 2^n in two steps, as n may be -150 and 128.
  const auto power = static_cast<std::int32_t>(n);
  const std::int32_t half = power >> 1;
  const float result = p * detail::power_of_two(half) * detail::power_of_two(power - half);
  return x == x ? result : x;
}

/// log(1 + y) of a y in [0, 1], within 2 ulp: 2 artanh(s), whose series in s = y / (2 + y) <= 1/3 ends where
/// its terms are less than half an ulp.
GATEFOLD_HD float log_of_one_and(float y) {
  const float s = y / (2.0f + y), s2 = s * s;
  float p = 1.0f / 15;
  p = p * s2 + 1.0f / 13;
  p = p * s2 + 1.0f / 11;
  p = p * s2 + 1.0f / 9;
  p = p * s2 + 1.0f / 7;
  p = p * s2 + 1.0f / 5;
  p = p * s2 + 1.0f / 3;
  return 2.0f * (p * s2 * s + s);
}

/// 1 / (1 + e^-x).
GATEFOLD_HD float sigmoid(float x) {
  return 1.0f / (1.0f + exponential(-x));
}

/// The square root of log(1 + e^x) = max(x, 0) + log(1 + e^-|x|).
GATEFOLD_HD float sqrt_softplus(float x) {
  return std::sqrt((x > 0.0f ? x : 0.0f) + log_of_one_and(exponential(-std::fabs(x))));
}

/// A sum is kept in this many parts: number i goes to part i % 32. Then part i takes part i + 16, i + 8, i +
/// 4, i + 2, i + 1: a warp does the same.
inline constexpr int kSumParts = 32;

inline float add_parts(float (&parts)[kSumParts]) {
  for (int distance = kSumParts / 2; distance > 0; distance /= 2)
    for (int i = 0; i < distance; ++i) parts[i] += parts[i + distance];
  return parts[0];
}

}  // namespace gatefold
