// quantize_activation, scaled_mm and grouped_gemm against the double-precision oracle, for every scheme.
#include "gatefold/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "format/matrix.h"
#include "moe/reference.h"

namespace gatefold {
namespace {

struct Case {
  std::int64_t rows, n, k;
};
constexpr Case kCases[] = {{1, 16, 128}, {5, 33, 256}, {0, 8, 128}, {7, 130, 384}};

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  return values;
}

std::vector<double> oracle(const std::vector<double>& x, const QuantizedMatrix& w) {
  const std::vector<double> weights = reference_dequantize(w);
  const std::size_t k = static_cast<std::size_t>(w.k), n = static_cast<std::size_t>(w.n), rows = x.size() / k;
  std::vector<double> y(rows * n);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < k; ++j) y[r * n + i] += x[r * k + j] * weights[i * k + j];
  return y;
}

void expect_near(const std::vector<float>& y, const std::vector<double>& expected, const char* what) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    error += (y[i] - expected[i]) * (y[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  EXPECT_LE(std::sqrt(error), 1e-6 * std::sqrt(norm)) << what;
}

TEST(Linear, EverySchemeAgainstTheOracle) {
  for (const Scheme& row : all_schemes()) {
    const SchemeId id = *find_scheme(row.name);
    for (const Case& c : kCases) {
      SCOPED_TRACE(std::string(row.name) + " rows " + std::to_string(c.rows));
      const auto values = random_values(static_cast<std::size_t>(c.n * c.k), 1);
      const auto x = random_values(static_cast<std::size_t>(c.rows * c.k), 2);
      const auto w = quantize(id, {values.data(), DType::f32, c.n, c.k});
      ASSERT_TRUE(w) << w.status().message();
      std::vector<double> rounded(x.begin(), x.end());
      if (row.quantizes_activations()) reference_round(row.activation, nullptr, c.k, rounded);
      const auto expected = oracle(rounded, *w);

      std::vector<float> y(static_cast<std::size_t>(c.rows * c.n), 7.0f);
      const MatrixView in{x.data(), DType::f32, c.rows, c.k};
      const MutableMatrixView out{y.data(), DType::f32, c.rows, c.n};
      const std::int64_t offsets[] = {0, c.rows};
      const QuantizedMatrix* weights[] = {&*w};
      ASSERT_EQ(grouped_gemm(in, offsets, weights, out).message(), "");
      expect_near(y, expected, "grouped_gemm");

      const auto quantized = quantize_activation(id, in);
      ASSERT_EQ(quantized.ok(), row.quantizes_activations());
      if (!quantized) continue;
      const std::vector<float> of_groups = y;
      ASSERT_EQ(scaled_mm(*quantized, *w, out).message(), "");
      expect_near(y, expected, "scaled_mm");
      if (!row.activation.tensor_scale.stored()) {
        EXPECT_EQ(y, of_groups);
      }
    }
  }
}

TEST(Linear, GroupsAreIndependent) {
  const std::int64_t n = 24, k = 128;
  const auto x = random_values(static_cast<std::size_t>(9 * k), 3);
  std::vector<QuantizedMatrix> weights;
  for (unsigned g = 0; g < 3; ++g) {
    const auto values = random_values(static_cast<std::size_t>(n * k), 10 + g);
    weights.push_back(*quantize(SchemeId::int4_g128, {values.data(), DType::f32, n, k}));
  }
  const QuantizedMatrix* all[] = {&weights[0], &weights[1], &weights[2]};
  const std::int64_t offsets[] = {0, 4, 4, 9};  // the second is empty
  std::vector<float> y(static_cast<std::size_t>(9 * n)), alone(y.size());
  ASSERT_TRUE(grouped_gemm({x.data(), DType::f32, 9, k}, offsets, all, {y.data(), DType::f32, 9, n}).ok());
  for (std::int64_t r = 0; r < 9; ++r) {
    const QuantizedMatrix* one[] = {all[r < 4 ? 0 : 2]};
    const std::int64_t whole[] = {0, 1};
    ASSERT_TRUE(grouped_gemm({x.data() + r * k, DType::f32, 1, k}, whole, one,
                             {alone.data() + r * n, DType::f32, 1, n})
                    .ok());
  }
  EXPECT_EQ(y, alone);
}

TEST(Linear, NonFiniteNumbersSaturate) {
  std::vector<float> x(128, 1.0f);
  x[3] = std::numeric_limits<float>::infinity();
  const auto q = quantize_activation(SchemeId::int8_aint8, {x.data(), DType::f32, 1, 128});
  ASSERT_TRUE(q);
  EXPECT_EQ(q->values[3], std::byte{127});
  EXPECT_EQ(q->values[4], std::byte{127});  // amax is that of finite numbers
}

TEST(Linear, BadInput) {
  std::vector<float> x(256, 1.0f), y(64);
  const auto w = *quantize(SchemeId::int8_aint8, {x.data(), DType::f32, 2, 128});
  const auto other = *quantize(SchemeId::mxfp4, {x.data(), DType::f32, 2, 128});
  auto q = *quantize_activation(SchemeId::int8_aint8, {x.data(), DType::f32, 2, 128});
  const MutableMatrixView out{y.data(), DType::f32, 2, 2};
  EXPECT_TRUE(scaled_mm(q, w, out).ok());
  EXPECT_NE(scaled_mm(q, other, out).message().find("mxfp4"), std::string::npos);
  EXPECT_NE(scaled_mm(q, w, {y.data(), DType::f32, 2, 3}).message().find("[2, 3]"), std::string::npos);
  EXPECT_NE(scaled_mm(q, w, {y.data(), DType::i8, 2, 2}).message().find("I8"), std::string::npos);
  q.values.pop_back();
  EXPECT_FALSE(scaled_mm(q, w, out).ok());
  EXPECT_FALSE(quantize_activation(SchemeId::int4_g128, {x.data(), DType::f32, 2, 128}).ok());
  EXPECT_FALSE(quantize_activation(SchemeId::nvfp4_anvfp4, {x.data(), DType::f32, 1, 15}).ok());
  EXPECT_FALSE(quantize_activation(SchemeId::int8_aint8, {x.data(), DType::i32, 1, 16}).ok());

  const QuantizedMatrix* weights[] = {&w, &w};
  const MatrixView in{x.data(), DType::f32, 2, 128};
  const std::int64_t decreasing[] = {0, 3, 2}, short_of[] = {0, 1, 1}, two[] = {0, 2};
  EXPECT_NE(grouped_gemm(in, decreasing, weights, out).message().find("offsets[2] = 2"), std::string::npos);
  EXPECT_FALSE(grouped_gemm(in, short_of, weights, out).ok());
  EXPECT_FALSE(grouped_gemm(in, two, weights, out).ok());
  EXPECT_FALSE(grouped_gemm({x.data(), DType::f32, 2, 64}, two, std::span(weights, 1), out).ok());
}

}  // namespace
}  // namespace gatefold
