// Which scheme for which layer: the solver against all choices, and whole runs on the small model.
#include "gatefold/recommend.h"

#include <random>
#include <set>

#include "model/least_loss.h"
#include "model_files.h"

namespace gatefold {
namespace {

/// By trying all.
std::optional<std::pair<double, std::uint64_t>> best(const std::vector<std::vector<Option>>& items,
                                                     std::uint64_t budget) {
  std::optional<std::pair<double, std::uint64_t>> found;
  std::vector<std::size_t> at(items.size(), 0);
  for (;;) {
    double loss = 0;
    std::uint64_t size = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
      loss += items[i][at[i]].loss;
      size += items[i][at[i]].size;
    }
    if (size <= budget && (!found || std::pair(loss, size) < *found)) found = {loss, size};
    std::size_t i = 0;
    while (i < items.size() && ++at[i] == items[i].size()) at[i++] = 0;
    if (i == items.size()) return found;
  }
}

TEST(LeastLoss, IsThatOfAllChoices) {
  std::mt19937 random(5);
  int solvable = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<std::vector<Option>> items(1 + random() % 5);
    for (auto& options : items)
      for (std::size_t i = 1 + random() % 5; i > 0;
           --i)  // small integers: sums are exact, and there are ties
        options.push_back({random() % 20, static_cast<double>(random() % 16)});
    const std::uint64_t budget = random() % (20 * items.size());
    const auto expected = best(items, budget);
    const auto chosen = least_loss(items, budget);
    ASSERT_EQ(chosen.has_value(), expected.has_value());
    if (!chosen) continue;
    ++solvable;
    double loss = 0;
    std::uint64_t size = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
      loss += items[i][(*chosen)[i]].loss;
      size += items[i][(*chosen)[i]].size;
    }
    EXPECT_EQ(std::pair(loss, size), *expected);
  }
  EXPECT_GT(solvable, 200);
  EXPECT_TRUE(least_loss({}, 0));
  EXPECT_FALSE(least_loss(std::vector<std::vector<Option>>{{}}, 10));
}

TEST(LeastLoss, NearChoicesAreAllThatDifferInTwo) {
  std::mt19937 random(6);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<Option>> items(1 + random() % 4);
    for (auto& options : items)
      for (std::size_t i = 1 + random() % 4; i > 0; --i)
        options.push_back({random() % 20, static_cast<double>(random() % 16)});
    const std::uint64_t budget = random() % (20 * items.size());
    const auto chosen = least_loss(items, budget);
    if (!chosen) continue;
    std::multiset<double> expected;
    std::vector<std::size_t> at(items.size(), 0);
    const auto sums = [&](const std::vector<std::size_t>& choice) {
      Option sum;
      for (std::size_t i = 0; i < items.size(); ++i) {
        sum.size += items[i][choice[i]].size;
        sum.loss += items[i][choice[i]].loss;
      }
      return sum;
    };
    for (std::size_t i = 0; i < items.size();) {
      int differ = 0;
      for (std::size_t k = 0; k < items.size(); ++k) differ += at[k] != (*chosen)[k];
      if ((differ == 1 || differ == 2) && sums(at).size <= budget) expected.insert(sums(at).loss);
      for (i = 0; i < items.size() && ++at[i] == items[i].size(); ++i) at[i] = 0;
    }
    const auto all = near_choices(items, budget, *chosen, 1000);
    std::vector<double> losses;
    for (const auto& choice : all) {
      EXPECT_LE(sums(choice).size, budget);
      losses.push_back(sums(choice).loss);
    }
    EXPECT_EQ(losses, std::vector<double>(expected.begin(), expected.end()));
    EXPECT_EQ(std::set(all.begin(), all.end()).size(), all.size());
    EXPECT_EQ(near_choices(items, budget, *chosen, 2).size(), std::min<std::size_t>(2, all.size()));
  }
}

TEST(LeastLoss, ManyLayers) {
  std::vector<std::vector<Option>> items;
  for (std::uint64_t layer = 0; layer < 94; ++layer) {
    items.emplace_back();
    for (std::uint64_t bits : {257, 264, 267, 272, 276, 288, 296, 512, 513, 520, 544})
      items.back().push_back({bits, 1.0 / static_cast<double>(bits * (1 + layer % 7))});
  }
  const auto chosen = least_loss(items, 94 * 288);
  ASSERT_TRUE(chosen);
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < items.size(); ++i) size += items[i][(*chosen)[i]].size;
  EXPECT_LE(size, 94u * 288);
  EXPECT_GT(size, 94u * 288 - 8);
}

class RecommendTest : public testing::Test {
 protected:
  const Checkpoint source_ = open_checkpoint(tiny_moe);

  std::vector<std::int32_t> text(const std::string& name, std::size_t count) const {
    return *text_tokens(source_, read_file(tiny_moe + "/" + name).substr(0, count));
  }
  Recommendation run(const RecommendOptions& options, std::size_t tokens) const {
    const auto found = recommend(source_, text("calibration.txt", tokens), options);
    if (!found) throw std::runtime_error(found.status().message());
    return *found;
  }
  std::string error(const RecommendOptions& options, std::size_t tokens = 1024) const {
    const auto found = recommend(source_, text("calibration.txt", tokens), options);
    EXPECT_FALSE(found);
    return found.status().message();
  }
};

TEST_F(RecommendTest, LosesLessThanAnyOneScheme) {
  RecommendOptions options;
  options.schemes = {SchemeId::uint4_g32, SchemeId::uint4_g64, SchemeId::int4_g32,
                     SchemeId::nvfp4,     SchemeId::int4_g128, SchemeId::fp8_block};
  options.whole = 0;
  std::int64_t calls = 0;
  options.progress = [&](std::int64_t done, std::int64_t total) {
    EXPECT_EQ(done, ++calls);
    EXPECT_EQ(total, 24);
  };
  const Recommendation found = run(options, 4096);
  EXPECT_EQ(calls, 24);
  ASSERT_EQ(found.measured.size(), 24u);
  double kl = 0, bits = 0;
  std::map<SchemeId, double> uniform;
  for (const Sensitivity& row : found.measured) {
    EXPECT_GT(row.kl, 0);
    if (row.bits_per_weight <= 4.5) uniform[row.scheme] += row.kl;
    if (!row.chosen) continue;
    kl += row.kl;
    bits += row.bits_per_weight / 4;
  }
  EXPECT_DOUBLE_EQ(found.kl, kl);
  EXPECT_DOUBLE_EQ(found.bits_per_weight, bits);
  EXPECT_LE(bits, 4.5);
  EXPECT_EQ(uniform.size(), 4u);

  CompareOptions rows_options;
  for (const auto& [id, sum] : uniform) {
    EXPECT_LE(kl, sum);
    rows_options.schemes.push_back(id);
  }
  const auto written = parse_recipe(recipe_text(found.recipe), "r.json");
  ASSERT_TRUE(written) << written.status().message();
  rows_options.recipes = {*written};
  const auto rows = compare(source_, text("valid.txt", 16384), rows_options);
  ASSERT_TRUE(rows) << rows.status().message();
  EXPECT_DOUBLE_EQ(rows->back().bits_per_weight, bits);
  for (std::size_t i = 0; i + 1 < rows->size(); ++i)
    EXPECT_LT(rows->back().kl, (*rows)[i].kl) << (*rows)[i].name;
  EXPECT_NEAR(rows->back().kl, found.kl, 0.5 * found.kl);  // another text, and sums of single layers
}

// The best recipe as a whole is the one that the comparison of all of them finds.
TEST_F(RecommendTest, MeasuresWholeRecipes) {
  RecommendOptions options;
  options.schemes = {SchemeId::uint4_g64, SchemeId::nvfp4, SchemeId::int4_g128};
  options.whole = 0;
  const Recommendation predicted = run(options, 4096);
  EXPECT_FALSE(predicted.whole_kl);
  options.whole = 5;
  int calls = 0;
  options.progress = [&](std::int64_t, std::int64_t total) {
    ++calls;
    EXPECT_EQ(total, 12 + 5);
  };
  Recommendation measured = run(options, 4096);
  EXPECT_EQ(calls, 12 + 5);
  ASSERT_TRUE(measured.whole_kl);
  measured.recipe.name = "measured";
  CompareOptions rows_options;
  rows_options.recipes = {predicted.recipe, measured.recipe};
  rows_options.schemes = {SchemeId::nvfp4};
  const auto rows = compare(source_, text("calibration.txt", 4096), rows_options);
  ASSERT_TRUE(rows) << rows.status().message();
  for (const auto& row : *rows) {
    if (row.name == "measured") {
      EXPECT_NEAR(*measured.whole_kl, row.kl, 0.03 * row.kl);
    }
    EXPECT_LE(*measured.whole_kl, 1.03 * row.kl) << row.name;
  }
}

// A layer by itself, measured through the decoder.
TEST_F(RecommendTest, MeasuresOneLayer) {
  RecommendOptions options;
  options.budget = 5;
  options.schemes = {SchemeId::int4_g128};
  const Recommendation found = run(options, 4096);
  for (const Sensitivity& row : found.measured) {
    CompareOptions rows_options;
    rows_options.schemes = {SchemeId::bf16};
    Recipe recipe{.name = "one", .rules = {}, .fp8_kv_cache = false, .comment = {}};
    recipe.rules = {{source_.experts_pattern(std::to_string(row.layer)), SchemeId::int4_g128}};
    rows_options.recipes = {recipe};
    const auto rows = compare(source_, text("calibration.txt", 4096), rows_options);
    ASSERT_TRUE(rows) << rows.status().message();
    EXPECT_NEAR(row.kl, (*rows)[1].kl, 0.03 * row.kl) << row.layer;
  }
}

TEST_F(RecommendTest, WithCalibration) {
  RecommendOptions options;
  options.schemes = {SchemeId::int4_g32, SchemeId::mxfp4};
  const Recommendation nearest = run(options, 4096);
  options.method = Method::gptq;
  const Recommendation gptq = run(options, 4096);
  ASSERT_EQ(nearest.measured.size(), gptq.measured.size());
  double before = 0, after = 0;
  for (std::size_t i = 0; i < gptq.measured.size(); ++i) {
    before += nearest.measured[i].kl;
    after += gptq.measured[i].kl;
  }
  EXPECT_LT(after, 0.95 * before);
  EXPECT_NE(gptq.recipe.comment.find("gptq"), std::string::npos);
}

TEST_F(RecommendTest, AwqFolds) {
  RecommendOptions options;
  options.schemes = {SchemeId::int4_g128};
  const double nearest = run(options, 4096).kl;
  options.method = Method::awq;
  EXPECT_LT(run(options, 4096).kl, nearest);
}

TEST_F(RecommendTest, Errors) {
  RecommendOptions options;
  options.schemes = {SchemeId::mxfp4, SchemeId::int8};
  options.budget = 3;
  EXPECT_NE(error(options).find("4.25"), std::string::npos);
  options.budget = 4.5;
  EXPECT_NE(error(options, 100).find("100 tokens"), std::string::npos);
  options.method = Method::gptq;
  EXPECT_NE(error(options, 512).find("512 tokens"), std::string::npos);
  options.method = Method::smoothquant;
  EXPECT_NE(error(options).find("mxfp4"), std::string::npos);
  options.method = {};
  options.schemes = {SchemeId::bf16};
  EXPECT_NE(error(options).find("bf16"), std::string::npos);
  options.schemes = {SchemeId::mxfp4};
  options.calibrate.cancelled = [] { return true; };
  EXPECT_NE(error(options).find("interrupted"), std::string::npos);
}

}  // namespace
}  // namespace gatefold
