// Routing on the GPU has the ids, weights and slots of the CPU, bit for bit.
#include "cuda/routing.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "gatefold/codec.h"
#include "gatefold/moe.h"
#include "gpu.h"

namespace gatefold {
namespace {

using Ints = std::vector<std::int32_t>;

struct Slots {
  Ints ids;
  std::vector<float> weights;
  Ints offsets, positions, sorted;
};

/// Sorts the slots of ids as the CPU does (LayerThread::sort_slots); those outside the range get no position.
void sort(int experts, int first, int end, Slots& slots) {
  slots.offsets.assign(static_cast<std::size_t>(experts) + 1, 0);
  slots.positions.assign(slots.ids.size(), -1);
  for (int e = 0; e < experts; ++e) {
    slots.offsets[e] = static_cast<std::int32_t>(slots.sorted.size());
    for (std::size_t s = 0; s < slots.ids.size(); ++s)
      if (slots.ids[s] == e && e >= first && e < end) {
        slots.positions[s] = static_cast<std::int32_t>(slots.sorted.size());
        slots.sorted.push_back(static_cast<std::int32_t>(s));
      }
  }
  slots.offsets[experts] = static_cast<std::int32_t>(slots.sorted.size());
}

struct Case {
  int tokens, experts, top_k;
  Routing routing = {};
  std::vector<float> logits = {}, bias = {};
  Ints given_ids = {};
  int first = 0, end = -1;  // -1: all experts
  int most_tokens = 0;      // the launch is for more tokens, and finds the number on the device
};

void same_as_on_the_cpu(const Case& test) {
  SCOPED_TRACE(testing::Message() << test.tokens << " tokens, " << test.top_k << " of " << test.experts
                                  << " experts, " << test.routing.groups << " groups");
  const int end = test.end < 0 ? test.experts : test.end;
  const auto count = static_cast<std::size_t>(test.tokens * test.top_k);
  Slots expected;
  expected.ids = test.given_ids;
  const bool given = !test.given_ids.empty();
  if (!given) {
    expected.ids.resize(count);
    expected.weights.resize(count);
    route(test.routing, test.experts, test.top_k, test.logits.data(), test.tokens,
          test.bias.empty() ? nullptr : test.bias.data(), expected.ids.data(), expected.weights.data());
  }
  sort(test.experts, test.first, end, expected);

  const DeviceVector<float> logits(test.logits), bias(test.bias);
  const DeviceVector<std::int32_t> given_ids(test.given_ids), tokens(Ints{test.tokens});
  const auto experts = static_cast<std::size_t>(test.experts);
  const int most_tokens = std::max(test.tokens, test.most_tokens);
  const DeviceVector<std::int32_t> scratch(cuda::route_scratch_words(most_tokens, test.experts));
  for (int run = 0; run < 2; ++run) {
    const DeviceVector<std::int32_t> ids(count), offsets(experts + 1), position(count), sorted(count);
    const DeviceVector<float> weights(count);
    const cuda::RouteArgs args{.tokens = most_tokens,
                               .experts = test.experts,
                               .top_k = test.top_k,
                               .routing = test.routing,
                               .logits = given ? nullptr : logits.data(),
                               .correction_bias = test.bias.empty() ? nullptr : bias.data(),
                               .given_ids = given ? given_ids.data() : nullptr,
                               .first_expert = test.first,
                               .end_expert = end,
                               .token_count = test.most_tokens == 0 ? nullptr : tokens.data(),
                               .out = {.topk_ids = ids.data(),
                                       .topk_weights = weights.data(),
                                       .expert_offsets = offsets.data(),
                                       .slot_position = position.data(),
                                       .sorted_slots = sorted.data()},
                               .block_counts = scratch.data()};
    const Status status = cuda::route(args, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(offsets.host(), expected.offsets);
    ASSERT_EQ(position.host(), expected.positions);
    Ints all_sorted = expected.sorted;
    all_sorted.resize(count, -1);  // the poison
    ASSERT_EQ(sorted.host(), all_sorted);
    if (given) continue;
    const auto same_choice = [&](const DeviceVector<std::int32_t>& chosen,
                                 const DeviceVector<float>& shares) {
      ASSERT_EQ(chosen.host(), expected.ids);
      const std::vector<float> got = shares.host();
      for (std::size_t s = 0; s < count; ++s)
        ASSERT_EQ(std::bit_cast<std::uint32_t>(got[s]), std::bit_cast<std::uint32_t>(expected.weights[s]))
            << "slot " << s << ": " << got[s] << ", not " << expected.weights[s];
    };
    same_choice(ids, weights);
    if (most_tokens == 0) continue;
    // Without sorting.
    const DeviceVector<std::int32_t> ids_alone(count);
    const DeviceVector<float> weights_alone(count);
    cuda::RouteArgs alone = args;
    alone.out = {.topk_ids = ids_alone.data(), .topk_weights = weights_alone.data()};
    ASSERT_EQ(cuda::launch_choose(alone, nullptr), cudaSuccess);
    same_choice(ids_alone, weights_alone);
  }
}

constexpr int kTokens[] = {0, 1, 2, 3, 7, 8, 9, 16, 33, 64, 65, 129, 512, 513, 1000, 4096, 6000};

enum class Kind { normal, ties, extreme };

std::vector<float> make_logits(int tokens, int experts, Kind kind, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  constexpr float inf = std::numeric_limits<float>::infinity();
  const float special[] = {inf,   -inf,   std::nanf(""), -std::nanf(""), 0.0f,   -0.0f,
                           1e38f, -1e38f, 1e-40f,        88.7f,          -88.7f, -103.9f};
  std::vector<float> logits(static_cast<std::size_t>(tokens) * experts);
  for (float& x : logits) {
    x = normal(random);
    if (kind == Kind::ties) x = std::round(x);
    if (kind == Kind::extreme && random() % 3 == 0) x = special[random() % std::size(special)];
  }
  return logits;
}

const Routing kRoutings[] = {
    {},
    {.renormalize = false, .scaling_factor = 2.5f},
    {.score = Score::sigmoid, .epsilon = 1e-20f},
    {.score = Score::sigmoid,
     .groups = 8,
     .top_groups = 4,
     .correction_bias = true,
     .scaling_factor = 2.5f,
     .epsilon = 1e-20f},
    {.renormalize = false,
     .groups = 8,
     .top_groups = 3,
     .group_score = GroupScore::max,
     .scaling_factor = 16.0f},
    {.score = Score::sqrt_softplus, .correction_bias = true, .scaling_factor = 2.5f, .epsilon = 1e-20f},
};

class CudaRouting : public GpuTest {};

// Many candidates: the best experts belong to the same lane, or all are equal, or too few are selectable.
TEST_F(CudaRouting, BestExpertsOfOneLane) {
  for (const int experts : {33, 64, 96, 256, 512, 1000})
    for (const int top_k : {1, 8, 32}) {
      std::vector<float> logits = make_logits(2, experts, Kind::normal, 4);
      for (int e = 0; e < experts; ++e) {
        if (e % 32 == 5) logits[e] = 10 + static_cast<float>(e % 7);
        logits[experts + e] = 1;
      }
      same_as_on_the_cpu({.tokens = 2, .experts = experts, .top_k = top_k, .logits = logits});
      same_as_on_the_cpu({.tokens = 2,
                          .experts = experts,
                          .top_k = top_k,
                          .routing = {.score = Score::sigmoid, .correction_bias = true},
                          .logits = logits,
                          .bias = make_logits(1, experts, Kind::extreme, 4)});
    }
}

TEST_F(CudaRouting, AllTokenCountsAndKinds) {
  for (const Routing& routing : kRoutings)
    for (const int tokens : kTokens)
      for (const Kind kind : {Kind::normal, Kind::ties, Kind::extreme}) {
        const std::vector<float> bias =
            routing.correction_bias ? make_logits(1, 256, Kind::normal, 5) : std::vector<float>();
        same_as_on_the_cpu({.tokens = tokens,
                            .experts = 256,
                            .top_k = 8,
                            .routing = routing,
                            .logits = make_logits(tokens, 256, kind, static_cast<unsigned>(tokens)),
                            .bias = bias});
      }
}

TEST_F(CudaRouting, AllExpertCounts) {
  for (const int experts : {1, 2, 8, 31, 32, 33, 60, 64, 128, 384, 512, 1000, 1024})
    for (const int top_k : {1, 2, 4, 6, 8, 10, 16, 32}) {
      if (top_k > experts) continue;
      for (const int tokens : {3, 64, 100})
        same_as_on_the_cpu(
            {.tokens = tokens,
             .experts = experts,
             .top_k = top_k,
             .logits = make_logits(tokens, experts, Kind::ties, static_cast<unsigned>(experts))});
    }
}

TEST_F(CudaRouting, GroupsOfAllSizes) {
  for (const int groups : {2, 5, 16, 32, 33, 40, 64})
    for (const Kind kind : {Kind::normal, Kind::ties, Kind::extreme}) {
      const Routing routing{.score = Score::sigmoid, .groups = groups, .top_groups = groups / 2 + 1};
      same_as_on_the_cpu({.tokens = 40,
                          .experts = groups * 6,
                          .top_k = 6,
                          .routing = routing,
                          .logits = make_logits(40, groups * 6, kind, 1)});
    }
}

TEST_F(CudaRouting, BiasesThatAreNotNumbers) {
  const std::vector<float> none(16, std::nanf(""));
  std::vector<float> some = none;
  some[3] = some[15] = 0.5f;
  some[7] = -std::numeric_limits<float>::infinity();
  for (const auto& bias : {none, some})
    same_as_on_the_cpu({.tokens = 9,
                        .experts = 16,
                        .top_k = 4,
                        .routing = {.score = Score::sigmoid, .correction_bias = true},
                        .logits = make_logits(9, 16, Kind::normal, 1),
                        .bias = bias});
}

TEST_F(CudaRouting, GivenIds) {
  std::mt19937 random(3);
  for (const int tokens : kTokens)
    for (int kind = 0; kind < 4;
         ++kind) {  // any (some twice in a token), one for all, few, some that do not exist
      Ints ids(static_cast<std::size_t>(tokens) * 6);
      for (std::int32_t& id : ids)
        id = kind == 1   ? 17
             : kind == 2 ? static_cast<std::int32_t>(random() % 3)
                         : static_cast<std::int32_t>(random() % 64);
      if (kind == 3 && tokens > 0) ids[0] = -1, ids[1] = 64, ids.back() = INT32_MAX;
      if (tokens > 0) same_as_on_the_cpu({.tokens = tokens, .experts = 64, .top_k = 6, .given_ids = ids});
      if (tokens > 0)
        same_as_on_the_cpu(
            {.tokens = tokens, .experts = 64, .top_k = 6, .given_ids = ids, .first = 16, .end = 24});
    }
}

// A kernel must be allowed what it takes of shared memory, when it first takes more than all may.
TEST_F(CudaRouting, EveryAmountOfSharedMemory) {
  for (int tokens = 16; tokens <= 1024; tokens += 48) {
    Ints ids;
    for (int s = 0; s < tokens * 8; ++s) ids.push_back((s * 7 + s / 8) % 128);
    same_as_on_the_cpu({.tokens = tokens, .experts = 128, .top_k = 8, .given_ids = ids});
  }
  for (int experts = 32; experts <= 1024; experts += 32)
    same_as_on_the_cpu({.tokens = 128,
                        .experts = experts,
                        .top_k = 16,
                        .logits = make_logits(128, experts, Kind::normal, 6)});
}

TEST_F(CudaRouting, RangesOfExpertsAndTokensCountedOnTheDevice) {
  for (const int tokens : {5, 100}) {
    const std::vector<float> logits = make_logits(tokens, 96, Kind::normal, 2);
    for (const auto& [first, end] : {std::pair{0, 12}, {84, 96}, {40, 41}, {10, 10}})
      same_as_on_the_cpu(
          {.tokens = tokens, .experts = 96, .top_k = 8, .logits = logits, .first = first, .end = end});
    same_as_on_the_cpu({.tokens = tokens, .experts = 96, .top_k = 8, .logits = logits, .most_tokens = 3000});
    same_as_on_the_cpu({.tokens = tokens, .experts = 96, .top_k = 8, .logits = logits, .most_tokens = 5000});
    same_as_on_the_cpu(
        {.tokens = tokens, .experts = 96, .top_k = 8, .logits = logits, .most_tokens = tokens + 1});
  }
}

// What one call allows a kernel is enough for another one that is about to be made.
TEST_F(CudaRouting, ThreadsAtOnce) {
  const auto run = [](int tokens) {
    Ints ids(static_cast<std::size_t>(tokens) * 8);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 37 % 256);
    const std::vector<float> logits = make_logits(tokens / 8, 256, Kind::normal, 4);
    for (int i = 0; i < 50; ++i) {
      same_as_on_the_cpu({.tokens = tokens, .experts = 256, .top_k = 8, .given_ids = ids});
      same_as_on_the_cpu({.tokens = tokens / 8, .experts = 256, .top_k = 8, .logits = logits});
    }
  };
  std::vector<std::thread> threads;
  for (const int tokens : {512, 960, 1024}) threads.emplace_back(run, tokens);
  for (std::thread& thread : threads) thread.join();
}

/// Hidden states of `tokens` tokens in a 16-bit type or f32, and what they are then.
struct Hidden {
  DType dtype;
  std::vector<std::byte> bytes;
  std::vector<float> values;

  Hidden(DType type, std::vector<float> x) : dtype(type), values(std::move(x)) {
    bytes.resize(values.size() * bits(type) / 8);
    if (type == DType::f32) {
      std::memcpy(bytes.data(), values.data(), bytes.size());
      return;
    }
    auto* codes = reinterpret_cast<std::uint16_t*>(bytes.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      codes[i] = static_cast<std::uint16_t>(type == DType::bf16 ? encode<formats::bf16>(values[i])
                                                                : encode<formats::f16>(values[i]));
      values[i] = type == DType::bf16 ? decode<formats::bf16>(codes[i]) : decode<formats::f16>(codes[i]);
    }
  }
};

/// Logits of tokens [first, first + tokens), where there are `hidden` columns. `skip`: bytes that hidden
/// states begin after an aligned address.
std::vector<float> logits_of(const Hidden& x, int first, int tokens, int hidden, int experts,
                             const DeviceVector<float>& router, const DeviceVector<float>& bias,
                             std::size_t skip = 0, const std::uint16_t* router16 = nullptr) {
  const std::size_t row = static_cast<std::size_t>(hidden) * bits(x.dtype) / 8;
  std::vector<std::byte> bytes(skip + tokens * row);
  std::memcpy(bytes.data() + skip, x.bytes.data() + first * row, tokens * row);
  const DeviceVector<std::byte> input(bytes);
  const DeviceVector<float> logits(static_cast<std::size_t>(tokens) * experts);
  const Status status = cuda::router_logits({.tokens = tokens,
                                             .experts = experts,
                                             .hidden_size = hidden,
                                             .hidden = input.data() + skip,
                                             .dtype = x.dtype,
                                             .router = router.data(),
                                             .router16 = router16,
                                             .bias = bias.data(),
                                             .logits = logits.data()},
                                            nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  return logits.host();
}

TEST_F(CudaRouting, RouterLogits) {
  enum class Router { f32, bf16, as_hidden };
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const Router kind : {Router::f32, Router::bf16, Router::as_hidden})
      for (const int experts : {37, 256})
        for (const int hidden : {16, 37, 272, 2880}) {
          const bool as_hidden = kind == Router::as_hidden;
          if (as_hidden && dtype == DType::f32) continue;
          SCOPED_TRACE(testing::Message() << name(dtype) << " " << experts << " x " << hidden << ", router "
                                          << static_cast<int>(kind));
          const int tokens = as_hidden ? 8300 : 700;  // for the largest tiles
          const Hidden x(dtype, make_logits(tokens, hidden, Kind::normal, 1));
          std::vector<float> matrix = make_logits(experts, hidden, Kind::normal, 2);
          std::vector<std::uint16_t> codes;
          for (float& w : matrix) {
            const bool f16 = as_hidden && dtype == DType::f16;
            codes.push_back(
                static_cast<std::uint16_t>(f16 ? encode<formats::f16>(w) : encode<formats::bf16>(w)));
            if (kind != Router::f32)
              w = f16 ? decode<formats::f16>(codes.back()) : decode<formats::bf16>(codes.back());
          }
          const auto bias = make_logits(1, experts, Kind::normal, 3);
          const DeviceVector<float> router(matrix), offset(bias);
          const DeviceVector<std::uint16_t> router16(codes);
          const auto logits = [&](int first, int count, std::size_t skip) {
            return logits_of(x, first, count, hidden, experts, router, offset, skip,
                             as_hidden ? router16.data() : nullptr);
          };
          const std::vector<float> got = logits(0, tokens, 0);
          // Sums of eight products are added up, for each of the pairs of parts; slices in the end.
          const int additions = (hidden + 511) / 512 * 4 * 3 + 16;
          for (int t = 0; t < tokens; t += tokens / 77)
            for (int e = 0; e < experts; ++e) {
              double sum = bias[e], magnitude = std::abs(bias[e]);
              for (int h = 0; h < hidden; ++h) {
                const double product = static_cast<double>(x.values[t * hidden + h]) * matrix[e * hidden + h];
                sum += product;
                magnitude += std::abs(product);
              }
              ASSERT_NEAR(got[t * experts + e], sum, magnitude * additions * 0x1p-24) << t << ", " << e;
            }
          // A token's bits do not depend on others, nor on where it lies.
          for (const int count : {1, 8, 9, 40, 300, 2100}) {
            if (count > tokens) continue;
            for (const std::size_t skip : {std::size_t{0}, static_cast<std::size_t>(bits(dtype)) / 8}) {
              const int first = tokens - count;
              const std::vector<float> alone = logits(first, count, skip);
              for (std::size_t i = 0; i < alone.size(); ++i)
                ASSERT_EQ(alone[i], got[static_cast<std::size_t>(first) * experts + i])
                    << count << " tokens, logit " << i;
            }
          }
        }
}

TEST_F(CudaRouting, RouterLogitsOfMoreTokensThanAGridHas) {
  constexpr int tokens = 65536 * 16 + 5, hidden = 16, experts = 3;
  const Hidden x(DType::bf16, make_logits(tokens, hidden, Kind::normal, 1));
  const DeviceVector<float> router(make_logits(experts, hidden, Kind::normal, 2)),
      bias(std::vector<float>(experts, 0.5f));
  const std::vector<float> got = logits_of(x, 0, tokens, hidden, experts, router, bias);
  for (const int first : {0, tokens - 9}) {
    const std::vector<float> alone = logits_of(x, first, 9, hidden, experts, router, bias);
    for (std::size_t i = 0; i < alone.size(); ++i)
      ASSERT_EQ(alone[i], got[static_cast<std::size_t>(first) * experts + i]);
  }
}

TEST(CudaRoutingErrors, SayWhatIsWrong) {
  EXPECT_EQ(cuda::route({.tokens = 1, .experts = 2000, .top_k = 8}, nullptr).message(),
            "routing to 8 of 2000 experts: the CUDA backend routes to at most 32 of 1024");
  EXPECT_EQ(cuda::route({.tokens = 1, .experts = 64, .top_k = 33}, nullptr).code(), Code::unsupported);
  EXPECT_EQ(
      cuda::route({.tokens = 1, .experts = 64, .top_k = 8, .first_expert = 60, .end_expert = 65}, nullptr)
          .message(),
      "experts 60 to 65 are not a range of 64");
  EXPECT_EQ(cuda::route({.tokens = 1, .experts = 64, .top_k = 8, .end_expert = 64}, nullptr).code(),
            Code::invalid_argument);
}

}  // namespace
}  // namespace gatefold
