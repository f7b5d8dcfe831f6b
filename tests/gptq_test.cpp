// GPTQ and its refinement against the error that they minimize, computed in double.
#include "quantize/gptq.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "quantize/grid.h"

namespace gatefold {
namespace {

using Floats = std::vector<float>;

struct Problem {
  std::int64_t n, k;
  Floats weights, hessian;
};

/// Inputs with a few large channels and correlations, as activations have them.
Problem make_problem(std::int64_t n, std::int64_t k, int seed = 1) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  Problem p{n, k, Floats(static_cast<std::size_t>(n * k)), Floats(static_cast<std::size_t>(k * k))};
  for (float& w : p.weights) w = normal(random) * (random() % 50 == 0 ? 0.2f : 0.04f);
  Floats x(static_cast<std::size_t>(k));
  for (std::int64_t row = 0; row < 3 * k; ++row) {
    const float common = normal(random);
    for (std::int64_t j = 0; j < k; ++j) x[j] = (normal(random) + common) * (j % 17 == 0 ? 8.0f : 1.0f);
    for (std::int64_t i = 0; i < k; ++i)
      for (std::int64_t j = 0; j < k; ++j) p.hessian[i * k + j] += x[i] * x[j];
  }
  return p;
}

/// trace((W - Q) H (W - Q)^T)
double error_of(const Problem& p, const Floats& values) {
  double sum = 0;
  for (std::int64_t row = 0; row < p.n; ++row)
    for (std::int64_t i = 0; i < p.k; ++i) {
      double line = 0;
      for (std::int64_t j = 0; j < p.k; ++j)
        line +=
            static_cast<double>(p.hessian[i * p.k + j]) * (p.weights[row * p.k + j] - values[row * p.k + j]);
      sum += line * (p.weights[row * p.k + i] - values[row * p.k + i]);
    }
  return sum;
}

Floats values_of(const QuantizedMatrix& matrix) {
  Floats out(static_cast<std::size_t>(matrix.n * matrix.k));
  dequantize(matrix, out.data());
  return out;
}

QuantizedMatrix gptq_of(SchemeId id, const Problem& p, const GptqOptions& options = {}) {
  auto matrix = gptq(id, p.n, p.k, p.weights.data(), p.hessian, options);
  if (!matrix) throw std::runtime_error(matrix.status().message());
  return *matrix;
}

Floats rounded(SchemeId id, const Problem& p, bool search) {
  QuantizeOptions options;
  options.scale_search = search;
  auto matrix = quantize(id, {p.weights.data(), DType::f32, p.n, p.k}, options);
  if (!matrix) throw std::runtime_error(matrix.status().message());
  return values_of(*matrix);
}

class EveryScheme : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Schemes, EveryScheme, testing::Range<std::size_t>(0, all_schemes().size()),
                         [](const auto& info) { return std::string(all_schemes()[info.param].name); });

TEST_P(EveryScheme, LosesLessThanRounding) {
  const auto id = static_cast<SchemeId>(GetParam());
  if (!scheme(id).weight.quantized()) GTEST_SKIP() << "not quantized";
  const Problem p = make_problem(136, 256);  // a partial block of rows
  const double nearest = error_of(p, rounded(id, p, false)), searched = error_of(p, rounded(id, p, true));
  const double plain = error_of(p, values_of(gptq_of(id, p, {.refinements = 0})));
  const double refined = error_of(p, values_of(gptq_of(id, p)));
  EXPECT_LT(plain, 0.8 * std::min(nearest, searched));
  EXPECT_LT(refined, plain);
}

TEST(Gptq, NoSingleCodeCanBeBetter) {
  const Problem p = make_problem(8, 64);
  const QuantizedMatrix matrix = gptq_of(SchemeId::int4_g32, p, {.damping = 1e-6, .refinements = 8});
  const Floats values = values_of(matrix);
  Floats scales(16);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    std::uint16_t code = 0;
    std::memcpy(&code, matrix.scales.data() + 2 * i, 2);
    scales[i] = decode<formats::bf16>(code);
  }
  const double best = error_of(p, values);
  for (std::int64_t row = 0; row < p.n; ++row)
    for (std::int64_t j = 0; j < p.k; ++j)
      for (const float step : {-1.0f, 1.0f}) {
        const float scale = scales[row * 2 + j / 32];
        Floats changed = values;
        float& value = changed[row * p.k + j];
        value += step * scale;
        if (std::fabs(value) > 7.5f * scale) continue;
        EXPECT_GE(error_of(p, changed), best * (1 - 1e-5)) << row << ", " << j << ", " << step;
      }
}

TEST(Gptq, WithoutInputsItRoundsToNearest) {
  Problem p = make_problem(16, 128);
  std::fill(p.hessian.begin(), p.hessian.end(), 0.0f);
  const Floats got = values_of(gptq_of(SchemeId::int4_g128, p));
  const Floats wanted = rounded(SchemeId::int4_g128, p, true);
  double ours = 0, theirs = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    ours += std::pow(static_cast<double>(got[i]) - p.weights[i], 2);
    theirs += std::pow(static_cast<double>(wanted[i]) - p.weights[i], 2);
  }
  EXPECT_LE(ours, theirs * 1.0001);
}

TEST(Gptq, SingularHessianAndZeroWeights) {
  Problem p = make_problem(16, 128);
  for (std::int64_t i = 0; i < p.k; ++i)  // two channels that are never in use
    for (const std::int64_t dead : {3, 70}) p.hessian[i * p.k + dead] = p.hessian[dead * p.k + i] = 0;
  for (const float value : values_of(gptq_of(SchemeId::nvfp4, p, {.damping = 0})))
    EXPECT_TRUE(std::isfinite(value));
  std::fill(p.weights.begin(), p.weights.end(), 0.0f);
  for (const SchemeId id : {SchemeId::nvfp4, SchemeId::mxfp4, SchemeId::uint4_g32, SchemeId::fp8_block})
    for (const float value : values_of(gptq_of(id, p))) EXPECT_EQ(value, 0.0f);
}

TEST(Gptq, Errors) {
  const Problem p = make_problem(16, 96);
  const auto group = gptq(SchemeId::int4_g128, p.n, p.k, p.weights.data(), p.hessian);
  ASSERT_FALSE(group);
  EXPECT_NE(group.status().message().find("k = 96 is not a multiple of group 128"), std::string::npos);
  const auto plain = gptq(SchemeId::bf16, p.n, p.k, p.weights.data(), p.hessian);
  ASSERT_FALSE(plain);
  EXPECT_NE(plain.status().message().find("bf16"), std::string::npos);
  Floats negative = p.hessian;
  negative[0] = -1e30f;
  EXPECT_FALSE(gptq(SchemeId::int4_g32, p.n, p.k, p.weights.data(), negative));
}

}  // namespace
}  // namespace gatefold
