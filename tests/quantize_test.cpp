#include "gatefold/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "format/isa.h"
#include "format/matrix.h"
#include "format/row_kernels.h"
#include "gatefold/codec.h"
#include "moe/reference.h"

namespace gatefold {
namespace {

std::vector<float> numbers(std::size_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> out(count);
  for (float& x : out) x = round_to<formats::bf16>(normal(random) * (random() % 50 == 0 ? 20.0f : 1.0f));
  return out;
}

MatrixView view(const std::vector<float>& w, std::int64_t n, std::int64_t k) {
  return {w.data(), DType::f32, n, k};
}

QuantizedMatrix quantized(SchemeId id, const std::vector<float>& w, std::int64_t n, std::int64_t k,
                          const QuantizeOptions& options = {}) {
  Result<QuantizedMatrix> matrix = quantize(id, view(w, n, k), options);
  EXPECT_TRUE(matrix.ok()) << matrix.status().message();
  return std::move(*matrix);
}

int code_at(const QuantizedMatrix& matrix, std::int64_t n, std::int64_t k) {
  const QuantizedLayout layout = matrix.layout();
  const int bits = scheme(matrix.scheme).weight.value.bits;
  if (bits == 8) return static_cast<int>(matrix.values[n * layout.row_bytes + k]);
  return static_cast<int>(matrix.values[n * layout.row_bytes + k / 2]) >> (k % 2 * 4) & 15;
}

float scale_at(const QuantizedMatrix& matrix, std::int64_t at) {
  float scale = 0;
  load_scales(matrix.scale_format, matrix.scales.data(), at, 1, &scale);
  return scale;
}

class EveryScheme : public testing::TestWithParam<std::size_t> {
 protected:
  SchemeId id() const { return static_cast<SchemeId>(GetParam()); }
};

// The formulas of quantize.h, once more, one weight at a time.
TEST_P(EveryScheme, FollowsTheRule) {
  const std::int64_t n = 130, k = 256;
  const std::vector<float> w = numbers(n * k);
  const QuantizedMatrix matrix = quantized(id(), w, n, k);
  const Operand& o = scheme(id()).weight;
  std::vector<float> back(w.size());
  dequantize(matrix, back.data());
  if (!o.quantized()) {
    for (std::size_t i = 0; i < w.size(); ++i) EXPECT_EQ(back[i], round_to(o.value, w[i]));
    return;
  }
  const std::int64_t gn = o.group.n == 0 ? n : o.group.n, gk = o.group.k == 0 ? k : o.group.k;
  float matrix_amax = 0;
  for (const float x : w) matrix_amax = std::max(matrix_amax, std::abs(x));
  const float t = matrix_amax / static_cast<float>(o.value.max() * 448.0);
  for (std::int64_t row = 0; row < n; row += gn)
    for (std::int64_t col = 0; col < k; col += gk) {
      float low = 0, high = 0;
      for (std::int64_t r = row; r < std::min(n, row + gn); ++r)
        for (std::int64_t c = col; c < col + gk; ++c) {
          low = std::min(low, w[r * k + c]);
          high = std::max(high, w[r * k + c]);
        }
      const float amax = std::max(-low, high), limit = static_cast<float>(o.value.max());
      float scale = amax / limit, zero = 0;
      if (o.zero_point.stored()) {
        scale = round_to(o.scale, (high - low) / 15.0f);
        zero = std::nearbyint(-low / scale);
      } else if (o.scale == formats::ue8m0) {
        scale = std::exp2(std::floor(std::log2(amax)) - static_cast<float>(o.value.max_exponent()));
      } else if (o.scale == formats::ue4m3) {
        scale = round_to<formats::e4m3>(amax / limit / t);
      } else {
        scale = round_to(o.scale, scale);
      }
      const QuantizedLayout layout = matrix.layout();
      ASSERT_EQ(scale_at(matrix, row / gn * layout.scale_cols + col / gk), scale);
      const float divisor = o.tensor_scale.stored() ? scale * t : scale;
      for (std::int64_t r = row; r < std::min(n, row + gn); ++r)
        for (std::int64_t c = col; c < col + gk; ++c) {
          const float scaled = w[r * k + c] / divisor;
          const int code = code_at(matrix, r, c);
          if (o.value.is_integer()) {
            const float least = o.value.kind == Kind::integer ? -limit - 1 : 0;
            const float expected = std::clamp(std::nearbyint(scaled) + zero, least, limit);
            ASSERT_EQ(code, static_cast<int>(expected) & ((1 << o.value.bits) - 1));
          } else {
            const auto expected = with_format(o.value, [&]<Format F>() { return encode<F>(scaled); });
            ASSERT_EQ(code, static_cast<int>(expected));
          }
        }
    }
  const std::vector<double> exact = reference_dequantize(matrix);
  for (std::size_t i = 0; i < w.size(); ++i) EXPECT_NEAR(back[i], exact[i], std::abs(exact[i]) * 3e-7);
}

TEST_P(EveryScheme, EveryInstructionSetDecodesAndEncodesAlike) {
  const std::int64_t k = 640;
  const Format format = scheme(id()).weight.value;
  const std::vector<float> x = numbers(k, 3);
  for (const std::int64_t group : {16, 32, 128, 640}) {
    const std::vector<float> scales(static_cast<std::size_t>(k / group), 0.013f), zeros(scales.size(), 0.0f);
    std::vector<std::byte> expected;
    for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
      if (!missing(isa).empty()) continue;
      const auto& kernels = row_kernels(isa)[format];
      std::vector<std::byte> codes(static_cast<std::size_t>(k * format.bits / 8));
      kernels.encode(x.data(), k, group, scales.data(), zeros.data(), codes.data());
      if (expected.empty()) expected = codes;
      EXPECT_EQ(codes, expected) << name(isa);
      std::vector<float> back(x.size());
      kernels.decode(codes.data(), k, group, scales.data(), zeros.data(), back.data());
      for (std::int64_t i = 0; i < k; ++i) {
        const std::uint32_t code = format.bits == 4
                                       ? static_cast<std::uint32_t>(codes[i / 2]) >> (i % 2 * 4) & 15
                                   : format.bits == 8 ? static_cast<std::uint32_t>(codes[i])
                                                      : static_cast<std::uint32_t>(codes[2 * i]) |
                                                            static_cast<std::uint32_t>(codes[2 * i + 1]) << 8;
        const float value = with_format(format, [&]<Format F>() { return decode<F>(code) * 0.013f; });
        ASSERT_EQ(back[i], value) << name(isa) << " " << i;
      }
    }
  }
}

TEST_P(EveryScheme, ZerosStayZero) {
  const std::vector<float> w(256 * 4, 0.0f);
  const QuantizedMatrix matrix = quantized(id(), w, 4, 256);
  std::vector<float> back(w.size(), 1.0f);
  dequantize(matrix, back.data());
  EXPECT_EQ(back, w);
  const Operand& o = scheme(id()).weight;
  if (o.quantized()) {
    EXPECT_EQ(scale_at(matrix, 0), o.scale == formats::ue4m3 ? 0.0f : 1.0f);
  }
}

TEST_P(EveryScheme, TinyAndHugeWeightsStayFinite) {
  for (const float size : {1e-45f, 1e-40f, 1e-38f, 1e-20f, 1e20f, 3e38f}) {
    std::vector<float> w(256 * 2);
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = i % 3 == 0 ? size : i % 3 == 1 ? -size : size / 7;
    if (scheme(id()).weight.value == formats::f16 && size > 1e10f) continue;  // 65504 is its end
    const QuantizedMatrix matrix = quantized(id(), w, 2, 256);
    std::vector<float> back(w.size());
    dequantize(matrix, back.data());
    for (std::size_t i = 0; i < w.size(); ++i) {
      ASSERT_TRUE(std::isfinite(back[i])) << size;
      ASSERT_LE(std::abs(back[i] - w[i]), size * 1.01f) << size;
    }
  }
}

TEST_P(EveryScheme, SearchIsNeverWorse) {
  const std::vector<float> w = numbers(128 * 256, 9);
  const auto error = [&](const QuantizeOptions& options) {
    std::vector<float> back(w.size());
    dequantize(quantized(id(), w, 128, 256, options), back.data());
    double sum = 0;
    for (std::size_t i = 0; i < w.size(); ++i) sum += std::pow(static_cast<double>(back[i]) - w[i], 2);
    return sum;
  };
  const double plain = error({}), searched = error({.scale_search = true});
  EXPECT_LE(searched, plain * 1.0001);
  if (scheme(id()).weight.value.bits == 4) {
    EXPECT_LT(searched, plain * 0.99);
  }
}

TEST_P(EveryScheme, NamesNonFiniteWeights) {
  std::vector<float> w = numbers(64 * 256);
  w[3 * 256 + 17] = std::nanf("");
  Result<QuantizedMatrix> matrix = quantize(id(), view(w, 64, 256));
  ASSERT_FALSE(matrix);
  EXPECT_EQ(matrix.status().message(), "NaN at [3, 17]");
  w[3 * 256 + 17] = -std::numeric_limits<float>::infinity();
  matrix = quantize(id(), view(w, 64, 256));
  ASSERT_FALSE(matrix);
  EXPECT_EQ(matrix.status().message(), "Inf at [3, 17]");

  const QuantizedMatrix allowed = quantized(id(), w, 64, 256, {.allow_nonfinite = true});
  w[3 * 256 + 17] = 0;
  const QuantizedMatrix without = quantized(id(), w, 64, 256);
  EXPECT_EQ(allowed.scales, without.scales);
}

TEST_P(EveryScheme, SizesFollowFromTheTable) {
  const QuantizedMatrix matrix = make_matrix(id(), 256, 512);
  const QuantizedLayout layout = matrix.layout();
  EXPECT_EQ(matrix.values.size(), 256u * 512 * scheme(id()).weight.value.bits / 8);
  EXPECT_NEAR(bits_per_weight(scheme(id()), 256, 512),
              8.0 * static_cast<double>(layout.total()) / (256 * 512), 1e-9);
}

INSTANTIATE_TEST_SUITE_P(Table, EveryScheme, testing::Range<std::size_t>(0, all_schemes().size()),
                         [](const auto& info) { return std::string(all_schemes()[info.param].name); });

TEST(Quantize, WorkedNumbers) {
  // amax 7 * 0.5: scale 0.5 exactly; -4 saturates the int4 range.
  std::vector<float> w(32, 0.0f);
  w[0] = 3.5f, w[1] = -3.5f, w[2] = 0.75f, w[3] = 0.25f, w[4] = -0.75f;
  const QuantizedMatrix matrix = quantized(SchemeId::int4_g32, w, 1, 32);
  EXPECT_EQ(scale_at(matrix, 0), 0.5f);
  const int expected[] = {7, 9, 2, 0, 14, 0};  // 1.5 -> 2, 0.5 -> 0, -1.5 -> -2: ties to even
  for (int i = 0; i < 6; ++i) EXPECT_EQ(code_at(matrix, 0, i), expected[i]) << i;

  // amax 13: exponent 3 - 2 = 1; 13 / 2 saturates at 6.
  w.assign(32, 0.0f);
  w[0] = 13.0f, w[1] = -5.0f;
  const QuantizedMatrix mx = quantized(SchemeId::mxfp4, w, 1, 32);
  EXPECT_EQ(static_cast<int>(mx.scales[0]), 128);
  EXPECT_EQ(code_at(mx, 0, 0), 7);
  EXPECT_EQ(code_at(mx, 0, 1), 8 | 4);  // -2.5 -> -2

  // Zero points: 0 is exact.
  w.assign(32, 0.0f);
  w[0] = -0.5f, w[1] = 1.0f;
  const QuantizedMatrix u = quantized(SchemeId::uint4_g32, w, 1, 32);
  EXPECT_EQ(scale_at(u, 0), round_to<formats::bf16>(0.1f));
  EXPECT_EQ(static_cast<int>(u.zero_points[0]), 5);
  EXPECT_EQ(code_at(u, 0, 2), 5);
  EXPECT_EQ(code_at(u, 0, 0), 0);
  EXPECT_EQ(code_at(u, 0, 1), 15);
}

TEST(Quantize, ShapesThatDoNotFit) {
  EXPECT_EQ(check_shape(SchemeId::int4_g128, 8, 96).message(),
            "k = 96 is not a multiple of group 128 of scheme int4_g128; int4_g32 would fit");
  EXPECT_EQ(check_shape(SchemeId::nvfp4, 8, 40).message(),
            "k = 40 is not a multiple of group 16 of scheme nvfp4; fp8_tensor would fit");
  EXPECT_FALSE(check_shape(SchemeId::int4_channel, 8, 97).ok());
  EXPECT_TRUE(check_shape(SchemeId::fp8_block, 130, 97).ok());
  EXPECT_FALSE(check_shape(SchemeId::int8, 0, 96).ok());
  EXPECT_FALSE(check_shape(SchemeId::int8, 8, -1).ok());
  EXPECT_FALSE(check_shape(SchemeId::int8, std::int64_t{1} << 40, 8).ok());
  const std::vector<float> w(8 * 96);
  EXPECT_FALSE(quantize(SchemeId::int4_g128, view(w, 8, 96)).ok());
  EXPECT_NE(quantize(SchemeId::int8, {w.data(), DType::i32, 8, 96}).status().message().find("I32"),
            std::string::npos);
}

}  // namespace
}  // namespace gatefold
