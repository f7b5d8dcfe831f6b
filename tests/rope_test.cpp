#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace gatefold {
namespace {

using Type = RopeConfig::Type;

// Frequencies of transformers' own implementation, for every type (tests/golden/make_rope.py).
TEST(Rope, MatchesTransformers) {
  const std::map<std::string, Type> types = {{"default", Type::standard},
                                             {"linear", Type::linear},
                                             {"dynamic", Type::dynamic},
                                             {"llama3", Type::llama3},
                                             {"yarn", Type::yarn}};
  std::ifstream file(GATEFOLD_SOURCE_DIR "/tests/golden/rope.txt");
  ASSERT_TRUE(file);
  int cases = 0;
  for (std::string line; std::getline(file, line);) {
    if (line[0] == '#') continue;
    SCOPED_TRACE(line.substr(0, 100));
    std::istringstream in(line);
    std::string type;
    RopeConfig config;
    int head_dim = 0, max_positions = 0, length = 0;
    double truncate = 0;
    float attention_factor = 0;
    in >> type >> config.theta >> config.factor >> config.original_max_positions >> config.low_freq_factor >>
        config.high_freq_factor >> config.beta_fast >> config.beta_slow >> config.attention_factor >>
        config.mscale >> config.mscale_all_dim >> truncate >> head_dim >> max_positions >> length >>
        attention_factor;
    ASSERT_TRUE(in);
    config.type = types.at(type);
    config.truncate = truncate != 0;
    const auto rope = Rope::create(config, head_dim, max_positions);
    ASSERT_TRUE(rope) << rope.status().message();
    EXPECT_FLOAT_EQ(rope->attention_factor(), attention_factor);
    const std::vector<float> frequencies = rope->inverse_frequencies(length);
    ASSERT_EQ(frequencies.size(), static_cast<std::size_t>(head_dim / 2));
    for (const float frequency : frequencies) {
      float expected = 0;
      ASSERT_TRUE(in >> expected);
      // pow is not correctly rounded everywhere.
      EXPECT_NEAR(frequency, expected, 5e-7f * expected);
    }
    ++cases;
  }
  EXPECT_EQ(cases, 10);
}

TEST(Rope, AnglesAndRotation) {
  const auto rope = Rope::create({.theta = 100.0}, 4, 16);
  ASSERT_TRUE(rope);
  float cos[4], sin[4];
  rope->angles(3, 2, 5, cos, sin);
  for (int t = 0; t < 2; ++t) {
    for (int i = 0; i < 2; ++i) {
      const double angle = (3 + t) * (i == 0 ? 1.0 : 0.1);
      EXPECT_NEAR(cos[2 * t + i], std::cos(angle), 1e-6);
      EXPECT_NEAR(sin[2 * t + i], std::sin(angle), 1e-6);
    }
  }
  float x[4] = {1, 2, 3, 4};
  rotate(x, 4, cos, sin);
  EXPECT_FLOAT_EQ(x[0], 1 * cos[0] - 3 * sin[0]);
  EXPECT_FLOAT_EQ(x[1], 2 * cos[1] - 4 * sin[1]);
  EXPECT_FLOAT_EQ(x[2], 3 * cos[0] + 1 * sin[0]);
  EXPECT_FLOAT_EQ(x[3], 4 * cos[1] + 2 * sin[1]);
}

TEST(Rope, RefusesWhatHasNoFrequencies) {
  const auto odd = Rope::create({}, 7, 16);
  EXPECT_EQ(odd.status().code(), Code::unsupported);
  EXPECT_NE(odd.status().message().find("head_dim 7"), std::string::npos);
  EXPECT_FALSE(Rope::create({.type = Type::dynamic, .factor = 2}, 2, 16).ok());
  const auto zero = Rope::create({.theta = 0}, 8, 16);
  EXPECT_EQ(zero.status().code(), Code::bad_file);
  EXPECT_NE(zero.status().message().find("theta 0"), std::string::npos);
  EXPECT_FALSE(Rope::create({.type = Type::linear, .factor = 0}, 8, 16).ok());
}

}  // namespace
}  // namespace gatefold
