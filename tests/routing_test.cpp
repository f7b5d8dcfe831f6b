#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "format/exponential.h"
#include "gatefold/moe.h"

namespace gatefold {
namespace {

struct Chosen {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

Chosen choose(const Routing& routing, int top_k, const std::vector<float>& logits,
              const std::vector<float>& bias = {}) {
  Chosen out{std::vector<std::int32_t>(top_k), std::vector<float>(top_k)};
  route(routing, static_cast<int>(logits.size()), top_k, logits.data(), 1,
        bias.empty() ? nullptr : bias.data(), out.ids.data(), out.weights.data());
  return out;
}

TEST(Routing, SoftmaxThenTopK) {
  const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(5.0f), 0.0f};  // 1 : 2 : 5 : 1
  Chosen plain = choose({.renormalize = false}, 2, logits);
  EXPECT_EQ(plain.ids, (std::vector<std::int32_t>{2, 1}));
  EXPECT_NEAR(plain.weights[0], 5.0 / 9, 1e-6);
  EXPECT_NEAR(plain.weights[1], 2.0 / 9, 1e-6);
  Chosen normal = choose({.renormalize = true, .scaling_factor = 3.0f}, 2, logits);
  EXPECT_NEAR(normal.weights[0], 3 * 5.0 / 7, 1e-6);
  EXPECT_NEAR(normal.weights[1], 3 * 2.0 / 7, 1e-6);
}

TEST(Routing, TiesGoToTheLowestExpert) {
  EXPECT_EQ(choose({}, 3, {1, 1, 1, 1, 1}).ids, (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(choose({.groups = 2, .top_groups = 1}, 2, {1, 1, 1, 1}).ids, (std::vector<std::int32_t>{0, 1}));
}

TEST(Routing, BiasSelectsButDoesNotWeigh) {
  const Routing routing{
      .score = Score::sigmoid, .renormalize = true, .correction_bias = true, .epsilon = 1e-20f};
  const Chosen out = choose(routing, 2, {2, 1, 0, -1}, {0, 0, 0, 1});
  EXPECT_EQ(out.ids, (std::vector<std::int32_t>{3, 0}));
  const double low = 1 / (1 + std::exp(1.0)), high = 1 / (1 + std::exp(-2.0));
  EXPECT_NEAR(out.weights[0], low / (low + high), 1e-6);
  EXPECT_NEAR(out.weights[1], high / (low + high), 1e-6);
}

TEST(Routing, SquareRootOfSoftplus) {
  const Routing routing{
      .score = Score::sqrt_softplus, .renormalize = true, .correction_bias = true, .epsilon = 1e-20f};
  const Chosen out = choose(routing, 2, {2, 100, -100, -1}, {0, 0, 11, 0});
  EXPECT_EQ(out.ids, (std::vector<std::int32_t>{2, 1}));
  EXPECT_NEAR(out.weights[1], 1.0, 1e-6);
  const Chosen plain = choose({.score = Score::sqrt_softplus, .renormalize = false}, 2, {2, -1, -3});
  EXPECT_NEAR(plain.weights[0], std::sqrt(std::log1p(std::exp(2.0))), 1e-6);
  EXPECT_NEAR(plain.weights[1], std::sqrt(std::log1p(std::exp(-1.0))), 1e-6);
}

TEST(Routing, GroupsByTheirTwoBestOrTheirBest) {
  // Best single expert in group 0; best pair in group 1.
  const std::vector<float> logits = {3, -9, 2, 2, 0, 0};
  Routing routing{.score = Score::sigmoid, .groups = 3, .top_groups = 1, .group_score = GroupScore::top2_sum};
  EXPECT_EQ(choose(routing, 2, logits).ids, (std::vector<std::int32_t>{2, 3}));
  routing.group_score = GroupScore::max;
  EXPECT_EQ(choose(routing, 2, logits).ids, (std::vector<std::int32_t>{0, 1}));
  routing.top_groups = 2;
  EXPECT_EQ(choose(routing, 3, logits).ids, (std::vector<std::int32_t>{0, 2, 3}));
}

TEST(Routing, SurvivesNonFiniteLogits) {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(choose({}, 2, {nan, 1, nan, 2}).ids, (std::vector<std::int32_t>{3, 1}));
  EXPECT_EQ(choose({}, 2, {-inf, 1, -inf, 2}).ids, (std::vector<std::int32_t>{3, 1}));
  const Chosen all_nan = choose({.score = Score::sigmoid}, 3, {nan, nan, nan});
  EXPECT_EQ(all_nan.ids, (std::vector<std::int32_t>{0, 1, 2}));
  for (const float weight : all_nan.weights) EXPECT_EQ(weight, 0.0f);
  for (const float weight : choose({}, 2, {inf, 1, 2}).weights) EXPECT_FALSE(std::isnan(weight));
  const Chosen of_softplus = choose({.score = Score::sqrt_softplus}, 2, {inf, 1, nan, 1});
  EXPECT_EQ(of_softplus.ids, (std::vector<std::int32_t>{1, 3}));
  EXPECT_EQ(of_softplus.weights, (std::vector<float>{0.5f, 0.5f}));
  EXPECT_EQ(choose({.correction_bias = true}, 2, {1, 2, 3}, {nan, nan, nan}).ids,
            (std::vector<std::int32_t>{0, 1}));
}

TEST(Routing, ExponentialIsAccurate) {
  EXPECT_EQ(exponential(0.0f), 1.0f);
  EXPECT_EQ(exponential(-0.0f), 1.0f);
  EXPECT_EQ(exponential(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(exponential(std::numeric_limits<float>::infinity()), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(exponential(std::nanf(""))));
  for (float x = -104.0f; x < 89.0f; x += 0.001f) {
    const double exact = std::exp(static_cast<double>(x));
    if (exact > std::numeric_limits<float>::max()) continue;
    ASSERT_NEAR(exponential(x), exact, std::max(exact * 0x1p-22, 0x1p-149)) << x;
  }
}

TEST(Routing, ScoresAreAccurate) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(sqrt_softplus(inf), inf);
  EXPECT_EQ(sqrt_softplus(-inf), 0.0f);
  EXPECT_TRUE(std::isnan(sqrt_softplus(std::nanf(""))));
  for (float y = 0.0f; y <= 1.0f; y += 1.0f / (1 << 20)) {
    const double exact = std::log1p(static_cast<double>(y));
    ASSERT_NEAR(log_of_one_and(y), exact, exact * 0x1p-22) << y;
  }
  for (float x = -87.0f; x < 200.0f; x += 0.001f) {
    const double wide = x, exact = std::sqrt(std::max(wide, 0.0) + std::log1p(std::exp(-std::abs(wide))));
    ASSERT_NEAR(sqrt_softplus(x), exact, exact * 0x1p-22) << x;
    const double share = 1 / (1 + std::exp(-wide));
    ASSERT_NEAR(sigmoid(x), share, share * 0x1p-22) << x;
  }
}

}  // namespace
}  // namespace gatefold
