#pragma once
/// \file
/// Activations to what a multiply takes (inputs.h): scales from the numbers of a row or group, and numbers to
/// the values of their codes. The rules of scale_rule.h and codec.h, bit for bit.

#include <cstdint>

#include "cuda/elements.cuh"
#include "cuda/encode.cuh"
#include "cuda/inputs.h"
#include "cuda/ptx.cuh"
#include "format/scale_rule.h"

namespace gatefold::cuda {

/// The activation operand of a row of the table, as a type.
template <SchemeId kScheme>
struct ActivationOf {
  static constexpr Operand operand = scheme(kScheme).activation;
};

/// Several rows of the table round activations alike: the first of them has the kernels.
constexpr SchemeId first_with_activation(const Operand& activation) {
  std::size_t i = 0;
  while (!(operands::table[i].activation == activation)) ++i;
  return static_cast<SchemeId>(i);
}

/// The largest of a number >= 0 over the threads of a row, for all of them. All threads of the block must
/// come.
__device__ __forceinline__ float row_max(float x) {
  const std::uint32_t warp = __reduce_max_sync(0xffffffffu, __float_as_uint(x));
  if (blockDim.x == 32) return __uint_as_float(warp);
  __shared__ std::uint32_t warps[32];
  const unsigned per_row = blockDim.x / 32, first = threadIdx.y * per_row;
  if (threadIdx.x % 32 == 0) warps[first + threadIdx.x / 32] = warp;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  return __uint_as_float(__reduce_max_sync(0xffffffffu, lane < per_row ? warps[first + lane] : 0u));
}

/// The largest of a number >= 0 over aligned groups of kLanes lanes.
template <int kLanes>
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

/// Scales of a row: `whole` for one scale a row or tensor, `two_level` beside block scales.
struct RowScales {
  float whole = 1.0f;
  TensorScale two_level;

  /// The row's amax, or that of its tensor.
  template <class Activation>
  __device__ __forceinline__ static RowScales of_amax(float amax) {
    constexpr Operand a = Activation::operand;
    return of_whole(a.tensor_scale.stored() ? tensor_scale(a, amax) : whole_scale<formats::f32>(a, amax));
  }
  __device__ __forceinline__ static RowScales of_whole(float scale) { return {scale, {scale, false}}; }
  __device__ __forceinline__ static RowScales of_static(const TensorScale& scale) {
    return {scale.apply(1.0f), scale};
  }
  /// Those of a lane. By whole warps.
  __device__ __forceinline__ RowScales of_lane(int lane) const {
    return {
        __shfl_sync(~0u, whole, lane),
        {__shfl_sync(~0u, two_level.value, lane), __shfl_sync(~0u, two_level.divides ? 1 : 0, lane) != 0}};
  }
  __device__ __forceinline__ bool operator==(const RowScales& other) const {
    return whole == other.whole && two_level.value == other.two_level.value;
  }
};

/// What numbers are divided by before they become codes, and what a code's value is multiplied by; `record`
/// lies beside the numbers.
struct GroupFactors {
  float divisor = 1.0f, fold = 1.0f, record = 1.0f;

  template <class Activation>
  __device__ __forceinline__ static GroupFactors of(const RowScales& row, float amax) {
    constexpr Operand a = Activation::operand;
    if constexpr (!a.quantized()) {
      return {};
    } else if constexpr (a.group.k == 0) {
      return {row.whole, 1.0f, 1.0f};
    } else {
      const float block = group_scale<a.scale>(a, {0, amax}, row.two_level).scale;
      if constexpr (has_record_scales(a)) return {block, 1.0f, block};
      return {a.tensor_scale.stored() ? row.two_level.apply(block) : block, block, 1.0f};
    }
  }
};

/// The values of the codes of two finite numbers.
template <Format F>
__device__ __forceinline__ float2 round_pair(float low, float high) {
  if constexpr (F == formats::e4m3) {
    std::uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
        : "=r"(halves)
        : "h"(static_cast<std::uint16_t>(encode_pair<F>(low, high))));
    return {f32_of_f16(halves, 0), f32_of_f16(halves, 1)};
  } else if constexpr (F == formats::int8) {
    const auto round = [](float x) { return fminf(fmaxf(rintf(x), -128.0f), 127.0f); };
    return {round(low), round(high)};
  } else {
    // Added to 2^22 times the power of two below it, or below 1, a number is rounded to halves of that power.
    static_assert(F == formats::e2m1);
    const auto round = [](float x) {
      const float magnitude = fminf(fabsf(x), 6.0f);
      const float large =
          __uint_as_float(max(__float_as_uint(magnitude) & 0x7f800000u, 0x3f800000u) + (22u << 23));
      return copysignf(magnitude + large - large, x);
    };
    return {round(low), round(high)};
  }
}
/// x as its code has it.
__device__ __forceinline__ float over(float x, const GroupFactors& factors) {
  return x / (factors.divisor > 0 ? factors.divisor : __int_as_float(0x7f800000));
}

/// Two bf16 numbers that f16 has as well.
__device__ __forceinline__ std::uint32_t f16_of_bf16(std::uint32_t pair) {
  return narrow_pair(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u), false);
}

/// x as its operand has it: the value of its code, in 16 bits.
template <class Activation>
__device__ __forceinline__ std::uint32_t encode_input(float x, const GroupFactors& factors) {
  return encode<formats::bf16>(round_to<Activation::operand.value>(over(x, factors)) * factors.fold);
}

/// The same for numbers of one group, two in a word. `fits`: as below.
template <class Activation, Format kInput, int kCount>
__device__ __forceinline__ void encode_inputs(const Elements<kInput, kCount>& x, const GroupFactors& factors,
                                              const typename Elements<kInput, kCount>::Range& range,
                                              bool fits, std::uint32_t (&words)[kCount / 2]) {
  constexpr Format value = Activation::operand.value;
  if constexpr (value == kInput) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) words[i] = x.words[i];
  } else if constexpr (!Activation::operand.quantized()) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i)
      words[i] = encode<value>(x[2 * i]) | encode<value>(x[2 * i + 1]) << 16;
  } else if (const FastDivider divider(factors.divisor); fits || (range.finite && divider.fits(range.amax))) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 rounded = round_pair<value>(divider.quotient(x[2 * i]), divider.quotient(x[2 * i + 1]));
      words[i] = narrow_pair(rounded.x * factors.fold, rounded.y * factors.fold, true);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kCount / 2; ++i) {
      float low = 0, high = 0;  // without indices that are not constant
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j)
        if (i == j) low = x[2 * j], high = x[2 * j + 1];
      const std::uint32_t word =
          encode_input<Activation>(low, factors) | encode_input<Activation>(high, factors) << 16;
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j)
        if (i == j) words[j] = word;
    }
  }
}

/// x / scale as codes of F, a word at a time; encode(quotients, word).
template <Format F, class Divider, Format kInput, int kCount, class Encode>
__device__ __forceinline__ void encode_quotients(const Elements<kInput, kCount>& x, const Divider& divider,
                                                 std::uint32_t (&packed)[2], Encode&& encode) {
  constexpr int per_word = 32 / F.bits;
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    float quotients[per_word];
#pragma unroll
    for (int i = 0; i < per_word; ++i) quotients[i] = divider.quotient(x[word * per_word + i]);
    packed[word] = encode(quotients, word);
  }
}

/// x / scale as codes. `fits`: whether x and scale are known to be what FastDivider takes.
template <Format F, Format kInput, int kCount>
__device__ __forceinline__ void encode_elements(const Elements<kInput, kCount>& x, float scale,
                                                const typename Elements<kInput, kCount>::Range& range,
                                                bool fits, std::uint32_t (&packed)[2]) {
  using Quotients = float[32 / F.bits];
  const FastDivider divider(scale);
  fits = fits || (range.finite && divider.fits(range.amax));
  if (F == formats::e2m1 && kInput.bits == 16 && fits && range.amax < 6.875f * scale)
    encode_quotients<F>(x, divider, packed, [&](const Quotients& quotients, int word) {
      return encode_e2m1_word_below_7(quotients, x.words + word * 4);
    });
  else if (fits)
    encode_quotients<F>(x, divider, packed,
                        [](const Quotients& quotients, int) { return encode_word<F>(quotients); });
  else
    encode_quotients<F>(x, AnyDivider(scale), packed,
                        [](const Quotients& quotients, int) { return encode_word<F>(quotients); });
}

}  // namespace gatefold::cuda
