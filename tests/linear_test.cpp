#include "model/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "gatefold/codec.h"

namespace gatefold {
namespace {

std::vector<float> normal(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

// Weights in `dtype`, at an odd address, and what they are as f32.
struct Weights {
  std::vector<std::byte> bytes;
  std::vector<float> values;

  Weights(DType dtype, std::size_t count) : bytes(count * 4 + 1), values(normal(count, 1)) {
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t code = 0;
      const auto round = [&]<Format F>() {
        code = encode<F>(values[i]);
        values[i] = decode<F>(code);
      };
      if (dtype == DType::bf16) round.operator()<formats::bf16>();
      if (dtype == DType::f16) round.operator()<formats::f16>();
      if (dtype == DType::f32) round.operator()<formats::f32>();
      const std::size_t size = bits(dtype) / 8;
      std::memcpy(bytes.data() + 1 + i * size, &code, size);
    }
  }
};

TEST(Linear, MatchesDoubleReference) {
  struct Case {
    DType dtype;
    std::int64_t n, k, tokens;
  };
  for (const auto& [dtype, n, k, tokens] :
       {Case{DType::bf16, 64, 256, 8}, Case{DType::bf16, 100, 300, 13}, Case{DType::f16, 1, 1, 1},
        Case{DType::f32, 65, 513, 300}, Case{DType::bf16, 16, 64, 0}}) {
    const Weights weights(dtype, n * k);
    const DenseLayer layer{{weights.bytes.data() + 1, dtype, n, k}, normal(n, 3)};
    const std::vector<float> x = normal(tokens * k, 2);
    std::vector<float> y(tokens * n, NAN);
    apply(layer, x.data(), 3, tokens, y.data(), 2);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t i = 0; i < n; ++i) {
        double sum = layer.bias[i], magnitude = std::abs(sum);
        for (std::int64_t j = 0; j < k; ++j) {
          const double product = double{x[t * k + j]} * weights.values[i * k + j];
          sum += product;
          magnitude += std::abs(product);
        }
        // f32 sums: k roundings of at most half an ulp of the partial sums.
        ASSERT_NEAR(y[t * n + i], sum, magnitude * (k + 1) * 0x1p-24)
            << n << " " << k << " " << t << " " << i;
      }
    }
  }
}

// The bits of a token do not depend on how many tokens come with it, which, or how many threads run.
TEST(Linear, SameBitsForEverySplit) {
  constexpr std::int64_t n = 200, k = 700, tokens = 300;
  const Weights weights(DType::bf16, n * k);
  const DenseLayer layer{{weights.bytes.data() + 1, DType::bf16, n, k}, {}};
  const std::vector<float> x = normal(tokens * k, 2);
  std::vector<float> whole(tokens * n);
  apply(layer, x.data(), 5, tokens, whole.data(), 1);
  for (const int threads : {1, 2, 3}) {
    for (const std::int64_t split : {1, 3, 8, 29, 257, 300}) {
      std::vector<float> parts(tokens * n, NAN);
      for (std::int64_t t = 0; t < tokens; t += split)
        apply(layer, x.data() + t * k, 5 + t, std::min(split, tokens - t), parts.data() + t * n, threads);
      EXPECT_EQ(std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)), 0)
          << "split " << split << ", threads " << threads;
    }
  }
}

}  // namespace
}  // namespace gatefold
