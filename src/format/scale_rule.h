#pragma once
/// \file
/// From the range of a group of numbers to its scale: the round-to-nearest rules of quantize.h, once, for
/// weights and activations, quantizer and reference, host and device (constexpr for the latter's sake).

#include <bit>
#include <cstdint>
#include <limits>

#include "gatefold/codec.h"
#include "gatefold/quantize.h"
#include "gatefold/scheme.h"

namespace gatefold {

/// Whether the rules below cover an operand. The table is checked with it at compile time.
constexpr bool can_quantize(const Operand& o) {
  using namespace formats;
  if (!o.quantized())
    return (o.value == bf16 || o.value == f16) && !o.zero_point.stored() && !o.tensor_scale.stored();
  const bool value = o.value.is_integer() || o.value.kind == Kind::floating;
  const bool narrow = o.value.bits == 8 || o.value.bits == 4;
  const bool real_scale = o.scale == f32 || o.scale == bf16 || o.scale == f16;
  const bool scale = o.value.is_integer() ? real_scale : real_scale || o.scale == ue8m0 || o.scale == ue4m3;
  // A zero point is stored in the value's own format, and unsigned codes cannot do without.
  const bool zero = o.zero_point.stored() == (o.value.kind == Kind::unsigned_integer) &&
                    (!o.zero_point.stored() || o.zero_point == o.value);
  // An 8-bit block scale has no range of its own: it goes with an f32 per matrix, and nothing else does.
  const bool two_level =
      (o.scale == ue4m3) == (o.tensor_scale == f32) && (o.tensor_scale.stored() == (o.scale == ue4m3));
  const bool group = o.group.n >= 0 && o.group.k >= 0 && (o.group.n != 0 || o.group.k == 0) &&
                     (o.value.bits == 8 || o.group.k % 2 == 0);
  return value && narrow && scale && zero && two_level && group;
}

/// Activations: the same, or the model's own type. One row is one token; zero points are for weights only.
constexpr bool can_quantize_activation(const Operand& o) {
  if (!o.value.stored()) return o == Operand{};
  return o.quantized() && can_quantize(o) && !o.zero_point.stored() && o.group.n <= 1;
}

/// f32 stored in `format` and read back.
inline float round_to(Format format, float value) {
  return with_format(format, [&]<Format F>() { return round_to<F>(value); });
}

/// Scale and zero point of one group.
struct GroupScale {
  float scale = 1.0f;  ///< as stored (without the matrix's own scale)
  float zero = 0.0f;
};

/// Range of a group with 0 in it: low <= 0 <= high.
struct GroupRange {
  float low = 0.0f;
  float high = 0.0f;
  constexpr float amax() const { return -low > high ? -low : high; }
};

/// amax / limit. The device leaves out the special cases of division: limits are integers below 2^9, so that
/// no quotient comes near the middle of two floats, and one Newton step rounds it correctly.
GATEFOLD_HD constexpr float over_limit(float amax, float limit) {
#if defined(__CUDA_ARCH__)
  const float reciprocal = 1.0f / limit;
  const float q = amax * reciprocal;
  return fmaf(fmaf(-q, limit, amax), reciprocal, q);
#else
  return amax / limit;
#endif
}

/// The f32 of a two-level operand (one per matrix or token) from its amax.
GATEFOLD_HD constexpr float tensor_scale(const Operand& o, float amax) {
  const float scale = amax / static_cast<float>(o.value.max() * o.scale.max());
  return scale > 0 ? scale : 1.0f;
}

/// The scale of a group of a two-level operand, before it is rounded to the operand's scale format.
GATEFOLD_HD constexpr float block_scale(const Operand& o, float amax, const TensorScale& two_level) {
  if (o.rule == ScaleRule::modelopt && !two_level.divides) {
    const float scale = amax / (static_cast<float>(o.value.max()) * two_level.value);
    return scale > 0x1p-9f ? scale : 0x1p-9f;
  }
  const float block = over_limit(amax, static_cast<float>(o.value.max()));
  return two_level.divides ? block * two_level.value : block / two_level.value;
}

/// The scale of a group, in format S, which is o.scale. `two_level` is the f32 of a two-level operand, in
/// either direction. Zero points are of format Z (a parameter because nvcc loses constants in a template's
/// arguments).
template <Format S, Format Z = formats::uint4>
GATEFOLD_HD constexpr GroupScale group_scale(const Operand& o, GroupRange range,
                                             const TensorScale& two_level) {
  const auto limit = static_cast<float>(o.value.max());
  const float amax = range.amax();
  if constexpr (S == formats::ue4m3) {
    return {round_to<S>(block_scale(o, amax, two_level)), 0};
  } else if constexpr (S == formats::ue8m0) {
    if (amax == 0) return {};
    // compressed-tensors rounds amax to the mantissa bits of e2m1, whatever the values are.
    const bool up = o.rule == ScaleRule::compressed_tensors &&
                    (std::bit_cast<std::uint32_t>(amax) & 0x7fffff) >= 0x600000;
    const int exponent = floor_log2(amax) + (up ? 1 : 0) - o.value.max_exponent();
    return {exponent < -126 ? 0x1p-127f : detail::power_of_two(exponent), 0};
  } else {
    if (amax == 0) return {};
    if (!o.zero_point.stored()) {
      const bool half_range = o.rule == ScaleRule::compressed_tensors && o.value.is_integer();
      const float scale = round_to<S>(half_range ? amax / (limit + 0.5f) : over_limit(amax, limit));
      return scale == 0 ? GroupScale{} : GroupScale{scale, 0};
    }
    const float width = range.high - range.low;
    const float step =
        width > std::numeric_limits<float>::max() ? range.high / limit - range.low / limit : width / limit;
    const float scale = round_to<S>(step);
    if (scale == 0) return {};
    return {scale, round_to<Z>(-range.low / scale)};
  }
}

/// The same for `count` groups.
inline void group_scales(const Operand& o, const GroupRange* ranges, std::size_t count,
                         const TensorScale& two_level, GroupScale* out) {
  with_format(o.scale, [&]<Format S>() {
    for (std::size_t g = 0; g < count; ++g) out[g] = group_scale<S>(o, ranges[g], two_level);
  });
}

inline GroupScale group_scale(const Operand& o, GroupRange range, const TensorScale& two_level) {
  GroupScale group;
  group_scales(o, &range, 1, two_level, &group);
  return group;
}

/// Searches of scales try ranges times these factors, the plain rule first. Those above 1 matter where a
/// format's steps grow with the value (amax on 4 instead of 6).
inline constexpr int search_steps = 47;
GATEFOLD_HD constexpr float search_factor(int step) {
  return step == 0 ? 1.0f : 0.6f + 0.02f * static_cast<float>(step);
}

/// The value nearest to x in format F under a scale and zero point.
template <Format F>
GATEFOLD_HD constexpr float nearest(float x, float scale, float zero) {
  if (!(scale > 0)) return 0;
  if constexpr (F.kind == Kind::unsigned_integer) {
    const float code = x / scale, low = code > -1e6f ? code : -1e6f;
    return (round_to<F>(detail::round_to_integer(low < 1e6f ? low : 1e6f) + zero) - zero) * scale;
  } else {
    return round_to<F>(x / scale) * scale;
  }
}

/// The scale of a whole row or tensor of activations: e4m3 with f32 scales has a floor of 1 / (448 * 512), as
/// other libraries have it.
template <Format S>
GATEFOLD_HD constexpr float whole_scale(const Operand& o, float amax) {
  const float scale = group_scale<S>(o, {0, amax}, {}).scale;
  constexpr float floor = 1.0f / (448.0f * 512.0f);
  constexpr Format floored = formats::e4m3;  // a copy: device code cannot refer to the host's constant
  return o.value == floored && S == formats::f32 && amax > 0 && scale < floor ? floor : scale;
}
inline float whole_scale(const Operand& o, float amax) {
  return with_format(o.scale, [&]<Format S>() { return whole_scale<S>(o, amax); });
}

}  // namespace gatefold
