#include "model/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "model/softmax.h"

namespace gatefold {
namespace {

struct Data {
  AttentionShape shape;
  std::int64_t positions;
  std::vector<float> queries, keys, values;

  Data(const AttentionShape& shape, std::int64_t positions) : shape(shape), positions(positions) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const std::int64_t padded = (positions + key_block - 1) / key_block * key_block;
    queries.resize(positions * shape.heads * shape.head_dim);
    keys.resize(padded * shape.kv_heads * shape.head_dim);
    values.resize(keys.size());
    for (auto* vector : {&queries, &keys, &values})
      for (float& value : *vector) value = 2 * normal(random);
  }

  std::vector<float> run(std::int64_t split, int threads) const {
    const std::int64_t row = shape.heads * shape.head_dim;
    std::vector<float> out(queries.size(), NAN);
    for (std::int64_t t = 0; t < positions; t += split)
      attention(shape,
                {.queries = queries.data() + t * row,
                 .keys = {.values = keys.data()},
                 .values = {.values = values.data()},
                 .first = t,
                 .tokens = std::min(split, positions - t)},
                out.data() + t * row, threads);
    return out;
  }

  std::vector<double> reference() const {
    const int d = shape.head_dim;
    std::vector<double> out(queries.size());
    for (std::int64_t t = 0; t < positions; ++t) {
      for (int head = 0; head < shape.heads; ++head) {
        const int kv_head = head / (shape.heads / shape.kv_heads);
        const auto at = [&](std::int64_t p) { return (p * shape.kv_heads + kv_head) * d; };
        const float* query = queries.data() + (t * shape.heads + head) * d;
        const std::int64_t oldest =
            shape.sliding_window > 0 ? std::max<std::int64_t>(0, t - shape.sliding_window + 1) : 0;
        std::vector<double> weights;
        double total = 0;
        for (std::int64_t p = oldest; p <= t; ++p) {
          double score = 0;
          for (int i = 0; i < d; ++i) score += double{query[i]} * keys[at(p) + i];
          weights.push_back(std::exp(score / std::sqrt(d)));
          total += weights.back();
        }
        for (std::int64_t p = oldest; p <= t; ++p)
          for (int i = 0; i < d; ++i)
            out[(t * shape.heads + head) * d + i] += weights[p - oldest] / total * values[at(p) + i];
      }
    }
    return out;
  }
};

const AttentionShape shapes[] = {
    {.heads = 4, .kv_heads = 2, .head_dim = 64},
    {.heads = 3, .kv_heads = 3, .head_dim = 32, .sliding_window = 40},
    {.heads = 10, .kv_heads = 2, .head_dim = 16, .sliding_window = 1},
    {.heads = 20, .kv_heads = 1, .head_dim = 8, .sliding_window = 100},
};

TEST(Attention, MatchesDoubleReference) {
  for (const AttentionShape& shape : shapes) {
    const Data data(shape, 150);
    const std::vector<double> expected = data.reference();
    const std::vector<float> out = data.run(150, 2);
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      error += (out[i] - expected[i]) * (out[i] - expected[i]);
      norm += expected[i] * expected[i];
    }
    EXPECT_LT(std::sqrt(error / norm), 1e-6) << shape.heads << " heads";
  }
}

TEST(Attention, SameBitsForEverySplit) {
  for (const AttentionShape& shape : shapes) {
    const Data data(shape, 150);
    const std::vector<float> whole = data.run(150, 1);
    for (const int threads : {1, 2, 3})
      for (const std::int64_t split : {1, 7, 64, 100})
        EXPECT_EQ(std::memcmp(whole.data(), data.run(split, threads).data(), whole.size() * sizeof(float)), 0)
            << shape.heads << " heads, split " << split << ", threads " << threads;
  }
}

// The softmax's exp, over its whole range, and its bits on every instruction set that runs here.
TEST(Attention, SoftmaxOfEveryInstructionSet) {
  for (float low = -120; low < 0; low += 0.37f) {
    float scores[key_block], expected[key_block] = {};
    for (int j = 0; j < key_block; ++j) scores[j] = low * static_cast<float>(j) / key_block;
    for (const Isa isa : all_isas) {
      if (!missing(isa).empty()) continue;
      SoftmaxRow row{-1.0f, 2.0f};
      float weights[key_block], sums[2] = {3, 4};
      std::copy_n(scores, key_block, weights);
      absorb_scores(isa)(row, weights, sums, 2);
      EXPECT_EQ(row.highest, 0);
      double total = 2 * std::exp(-1.0);
      for (int j = 0; j < key_block; ++j) {
        const double exact = std::exp(static_cast<double>(scores[j]));
        EXPECT_NEAR(weights[j], exact, 0x1p-22 * exact + 0x1p-149) << scores[j];
        total += exact;
        if (isa == all_isas[0] || expected[j] == 0) expected[j] = weights[j];
        EXPECT_EQ(weights[j], expected[j]);
      }
      EXPECT_NEAR(row.sum, total, 1e-5 * total);
      EXPECT_NEAR(sums[1], 4 * std::exp(-1.0), 1e-6);
    }
  }
}

// Scores far apart and beyond exp's range.
TEST(Attention, ExtremeScores) {
  Data data({.heads = 1, .kv_heads = 1, .head_dim = 8}, 3);
  std::fill(data.queries.begin(), data.queries.end(), 100.0f);
  for (int p = 0; p < 3; ++p)
    for (int i = 0; i < 8; ++i) {
      data.keys[p * 8 + i] = p == 1 ? 100.0f : -100.0f;
      data.values[p * 8 + i] = static_cast<float>(p);
    }
  const std::vector<float> out = data.run(3, 1);
  EXPECT_EQ(out[0], 0.0f);
  EXPECT_EQ(out[8], 1.0f);
  EXPECT_EQ(out[16], 1.0f);
}

}  // namespace
}  // namespace gatefold
