#include "cpu/inputs.h"

#include <bit>
#include <cstdint>

#include "cpu/panel.h"
#include "format/exponential.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

inline std::uint32_t magnitude(float x) {
  return std::bit_cast<std::uint32_t>(x) & 0x7fffffff;
}

void fixed_point(const float* x, std::int64_t k, std::int64_t chunk, std::int64_t block, std::int8_t* limbs,
                 float* scales, std::int32_t* sums) {
  constexpr std::uint32_t kMost = 127 * 256 + 127;
  constexpr auto kEnd = static_cast<std::int32_t>(kMost);
  for (std::int64_t begin = 0; begin < k; begin += chunk, ++scales) {
    const std::int64_t end = begin + chunk < k ? begin + chunk : k;
    std::uint32_t largest = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint32_t bits = magnitude(x[i]);
      largest = bits > largest ? bits : largest;
    }
    // amax = m * 2^e with 1 <= m < 2: the unit is 2^(e - 14), or twice that if amax came to more than kMost
    // units. Chunks of tiny numbers use the smallest unit that is safe to invert; Inf and NaN make the scale
    // NaN.
    std::int32_t exponent = static_cast<std::int32_t>(largest >> 23) - 14;
    const bool tight = (largest & 0x7fffff) > (kMost - (1 << 14)) << 9;
    exponent += tight ? 1 : 0;
    exponent = exponent < 1 ? 1 : exponent;
    const float unit = std::bit_cast<float>(static_cast<std::uint32_t>(exponent) << 23);
    const float units = std::bit_cast<float>(static_cast<std::uint32_t>(254 - exponent) << 23);
    *scales = largest < 0x7f800000 ? unit : std::bit_cast<float>(0x7fc00000u);
    std::int32_t codes[kPanelChunk];
    for (std::int64_t i = begin; i < end; ++i) {
      const auto n = static_cast<std::int32_t>(detail::round_to_integer(x[i] * units));
      codes[i - begin] = n > kEnd ? kEnd : n < -kEnd ? -kEnd : n;
    }
    for (std::int64_t first = begin; first < end;) {
      const std::int64_t turn = (first / kLimbColumns + 1) * kLimbColumns, last = turn < end ? turn : end;
      std::int8_t* high = limbs + first / kLimbColumns * (2 * kLimbColumns) + first % kLimbColumns;
      for (std::int64_t i = 0; i < last - first; ++i) {
        const std::int32_t code = codes[first - begin + i], top = (code + 128) >> 8;
        high[i] = static_cast<std::int8_t>(top);
        high[kLimbColumns + i] = static_cast<std::int8_t>(code - top * 256);
      }
      first = last;
    }
    for (std::int64_t b = 0; b < end - begin; b += block) {
      std::int32_t sum = 0;  // blocks are multiples of kLeastPanelBlock
      for (std::int64_t first = b; first < b + block; first += kLeastPanelBlock)
        for (std::int64_t i = 0; i < kLeastPanelBlock; ++i) sum += codes[first + i];
      *sums++ = sum;
    }
  }
}

void to_bytes(const float* x, std::int64_t k, std::int64_t block, float factor, std::int8_t* bytes,
              std::int32_t* sums) {
  for (std::int64_t b = 0; b < k; b += block) {
    std::int32_t sum = 0;
    for (std::int64_t i = b; i < b + block; ++i) {
      const auto code = static_cast<std::int32_t>(x[i] * factor);
      bytes[i] = static_cast<std::int8_t>(code);
      sum += code;
    }
    *sums++ = sum;
  }
}

void swiglu(const float* gate, const float* up, std::int64_t stride, std::int64_t rows, std::int64_t count,
            float alpha, float beta, float limit, float* y, std::int64_t y_stride) {
  for (std::int64_t row = 0; row < rows; ++row, gate += stride, up += stride, y += y_stride)
    for (std::int64_t i = 0; i < count; ++i) {
      const float g = gate[i] > limit ? limit : gate[i];  // NaN stays
      const float bounded = up[i] > limit ? limit : up[i];
      const float u = bounded < -limit ? -limit : bounded;
      y[i] = g / (1.0f + exponential(-alpha * g)) * (u + beta);
    }
}

void combine(const float* const* x, const float* weights, std::int64_t count, std::int64_t k, float* sum) {
  constexpr std::int64_t kRun = 64;
  for (std::int64_t begin = 0; begin < k; begin += kRun) {
    const std::int64_t run = k - begin < kRun ? k - begin : kRun;
    float part[kRun] = {};
    for (std::int64_t s = 0; s < count; ++s) {
      const float weight = weights[s];
      const float* row = x[s] + begin;
      if (run == kRun)
        for (std::int64_t i = 0; i < kRun; ++i) part[i] += weight * row[i];
      else
        for (std::int64_t i = 0; i < run; ++i) part[i] += weight * row[i];
    }
    for (std::int64_t i = 0; i < run; ++i) sum[begin + i] = part[i];
  }
}

template <Format F>
void round(float* x, std::int64_t k) {
  for (std::int64_t i = 0; i < k; ++i) x[i] = round_to<F>(x[i]);
}

}  // namespace

extern const InputKernels input_kernels;
const InputKernels input_kernels{
    round<formats::bf16>, round<formats::f16>, fixed_point, to_bytes, swiglu, combine};

}  // namespace gatefold::GATEFOLD_ISA
