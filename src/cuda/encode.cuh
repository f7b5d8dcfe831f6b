#pragma once
/// \file
/// f32 to the codes of a narrow format on the device: what codec.h says, faster. Each function has the
/// codec's bits for every finite number; tests/cuda/quantize_test.cu compares them.

#include <cstdint>

#include "gatefold/codec.h"

namespace gatefold::cuda {

/// Two numbers to e4m3 or e5m2, `low` in bits 0..7.
template <Format F>
__device__ __forceinline__ std::uint32_t encode_pair(float low, float high) {
  std::uint16_t codes;
  if constexpr (F == formats::e4m3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

/// The value of an e4m3 or ue4m3 code that is not NaN.
__device__ __forceinline__ float decode_e4m3(std::uint32_t code) {
  std::uint32_t halves;
  float value;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(code)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<std::uint16_t>(halves)));
  return value;
}

/// Sign-extended.
__device__ __forceinline__ std::uint32_t encode_int8(float x) {
  std::uint32_t code;
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(code) : "f"(x));
  return code;
}

/// The e2m1 code of |x| in bits 0..2; the others are anything. Added to 2^22 times the power of two below it
/// (1 at least), a number is rounded to halves of that power, to even; sum bits 0..2 count them, bits 23 and
/// up the power. The 6 makes both start at 0.
__device__ __forceinline__ std::uint32_t encode_e2m1_magnitude(float x) {
  const float magnitude = fminf(fabsf(x), 6.0f);
  const std::uint32_t power = max(__float_as_uint(magnitude) & 0x7f800000u, 0x3f800000u);
  const std::uint32_t sum = __float_as_uint(magnitude + __uint_as_float(power + (22u << 23) + 6));
  return sum + (sum >> 22);
}

/// Eight numbers to e2m1. Codes are shifted in from above, one after the other; then sign bits go over bits
/// 3, 7, ...
__device__ __forceinline__ std::uint32_t encode_e2m1_word(const float* x) {
  std::uint32_t magnitudes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) magnitudes = __funnelshift_r(magnitudes, encode_e2m1_magnitude(x[i]), 4);
  const auto top_bytes = [&](int first) {  // of x[first], x[first + 2], x[first + 4], x[first + 6]
    const auto bits = [&](int i) { return __float_as_uint(x[first + i]); };
    return __byte_perm(__byte_perm(bits(0), bits(2), 0x0073), __byte_perm(bits(4), bits(6), 0x0073), 0x5410);
  };
  const std::uint32_t even = top_bytes(0) >> 4 & 0x08080808u, odd = top_bytes(1) & 0x80808080u;
  return (magnitudes & 0x77777777u) | even | odd;
}

/// Eight numbers below 7 in magnitude to e2m1, faster. Word i of `signs` has the signs of x[2 i] and x[2 i +
/// 1] in bits 15 and 31.
///
/// A code is the smallest of rne(2 |x|), rne(|x|) + 2 and rne(|x| / 2) + 4. Added to 2^22, 2^23 + 2 and 2^24
/// + 8, a number is rounded so, and the count is in the sum's low bits. Two numbers' bits share a word: x[2 i
/// + 1]'s are added above x[2 i]'s, where the first sum's exponent is less than the others' by 0x80 and
/// 0x100.
__device__ __forceinline__ std::uint32_t encode_e2m1_word_below_7(const float* x,
                                                                  const std::uint32_t* signs) {
  const auto counts = [&](int i, float base) {
    return __float_as_uint(fabsf(x[i]) + base) + (__float_as_uint(fabsf(x[i + 1]) + base) << 16);
  };
  std::uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t halves = counts(2 * i, 0x1p22f), ones = counts(2 * i, 0x1p23f + 2),
                        twos = counts(2 * i, 0x1p24f + 8);
    const std::uint32_t least =
        __viaddmin_s16x2(twos, 0xff000000u, __viaddmin_s16x2(ones, 0xff800000u, halves));
    pairs[i] = (least & 0x00070007u) | (signs[i] >> 12 & 0x00080008u);
  }
  // Codes 0, 2, 1, 3 are in the low bits of the bytes.
  const std::uint32_t low = pairs[0] + (pairs[1] << 8), high = pairs[2] + (pairs[3] << 8);
  return __byte_perm(low + (low >> 12), high + (high >> 12), 0x5410);
}

/// Numbers to the codes of 32 bits, the first in the lowest. NaN must be positive.
template <Format F>
__device__ __forceinline__ std::uint32_t encode_word(const float (&x)[32 / F.bits]) {
  if constexpr (F == formats::e2m1) return encode_e2m1_word(x);
  if constexpr (F == formats::e4m3 || F == formats::e5m2)
    return encode_pair<F>(x[0], x[1]) | encode_pair<F>(x[2], x[3]) << 16;
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 32 / F.bits; ++i) {
    if constexpr (F == formats::int8)
      bits |= (encode_int8(x[i]) & 0xff) << (8 * i);
    else
      bits |= encode<F>(x[i]) << (F.bits * i);
  }
  return bits;
}

/// x / scale for many x, near enough for codes of at most 8 bits: rounded as IEEE division does, wherever
/// that decides between two codes.
///
/// With r = 1 / d rounded, q = x * r is off by 2 ulp at most, and after a Newton step the relative error is
/// below 2^-44 before the last rounding. That can only differ from division if x / d lies within 2^-44 of the
/// middle of two floats, one of which is a number m of at most 8 bits, where two codes meet: with integers x,
/// d < 2^24, 128 <= m <= 256 and a small j, x * 2^a = d * (m * 2^17 + 1 or - 1) + j, where a >= 24. For each
/// m and j that leaves one d modulo 2^24: they are few enough to try them all, and none is wrong
/// (encode_test.cu) but where r is not rounded correctly, which is where d = 2^24 - 1; fits() refuses it.
class FastDivider {
 public:
  explicit __device__ __forceinline__ FastDivider(float scale) : scale_(scale) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal_) : "f"(scale));
    reciprocal_ = fmaf(fmaf(-scale, reciprocal_, 1.0f), reciprocal_, reciprocal_);
  }
  /// Whether it may be used for finite numbers up to amax.
  __device__ __forceinline__ bool fits(float amax) const {
    return fmaxf(scale_, amax) < 0x1p60f && scale_ > 0x1p-60f && (~__float_as_uint(scale_) & 0x7fffff) != 0;
  }
  __device__ __forceinline__ float quotient(float x) const {
    const float q = x * reciprocal_;
    return fmaf(-fmaf(q, scale_, -x), reciprocal_, q);  // the signs keep -0
  }

 private:
  float scale_, reciprocal_;
};

/// The same for any x and any scale that is not negative. Under a scale of 0, finite numbers become 0. NaN is
/// positive. Two Newton steps round correctly (Markstein), after scale and x have been moved from where they
/// lose bits.
class AnyDivider {
 public:
  explicit __device__ __forceinline__ AnyDivider(float scale)
      : shift_(scale > 0x1p60f || scale == 0 ? 0x1p-64f : (scale < 0x1p-60f ? 0x1p64f : 1.0f)),
        divisor_(scale == 0 ? 0x1p100f : scale * shift_),
        reciprocal_(1.0f / divisor_),
        zero_(scale == 0) {}

  __device__ __forceinline__ float quotient(float x) const {
    const float shifted = x * shift_;
    const float q = shifted * reciprocal_;
    const float rounded = copysignf(step(step(q, shifted), shifted), x);
    const float other = zero_ || isnan(q) ? __uint_as_float(0x7fffffffu) : q;
    return fabsf(q) < 0x1p100f ? rounded : other;
  }

 private:
  __device__ __forceinline__ float step(float q, float x) const {
    return fmaf(fmaf(-q, divisor_, x), reciprocal_, q);
  }
  float shift_, divisor_, reciprocal_;
  bool zero_;
};

}  // namespace gatefold::cuda
