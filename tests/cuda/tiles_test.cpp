// Tiles of every size, full, and with a token more or less; and calls of very many tokens.
#include "gpu_moe.h"
#include "moe/synthetic.h"

namespace gatefold {
namespace {

class EveryTile : public GpuMoe, public testing::WithParamInterface<SchemeAndType> {
 protected:
  static MoeSpec spec() {
    MoeSpec spec = small_spec(static_cast<SchemeId>(std::get<0>(GetParam())));
    spec.act_dtype = std::get<1>(GetParam());
    return spec;
  }
};

TEST_P(EveryTile, FullAndByOneMoreOrLess) {
  const Layer layer(spec());
  PlanOptions options{.max_tokens = 600, .debug_workspace = true};
  const ExpertWeights weights = layer.weights(options, kGpu);
  const auto plan = MoePlan::create(spec(), options, kGpu);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  for (const CudaCandidate& candidate : plan->candidates(options.max_tokens)) {
    SCOPED_TRACE(describe(candidate.tuning));
    options.cuda_tuning = candidate.tuning;
    for (const int more : {-1, 0, 1})
      expect_close(layer, weights, options, static_cast<std::size_t>(candidate.tuning.tile_tokens + more),
                   Pattern::single);
  }
}

/// Numbers of some rows.
template <class T>
std::vector<T> rows_of(const std::vector<T>& all, const std::vector<std::size_t>& rows, std::size_t width) {
  std::vector<T> some;
  for (const std::size_t row : rows)
    some.insert(some.end(), all.begin() + static_cast<std::ptrdiff_t>(row * width),
                all.begin() + static_cast<std::ptrdiff_t>((row + 1) * width));
  return some;
}

// By every candidate, with equally likely experts and with skewed ones. The oracle has a part of the tokens,
// but for scales that belong to all.
TEST_P(EveryTile, ManyTokens) {
  constexpr std::size_t tokens = 16384, width = 256;
  const Layer layer(spec());
  PlanOptions options{.max_tokens = tokens, .debug_workspace = true};
  const ExpertWeights weights = layer.weights(options, kGpu);
  const auto plan = MoePlan::create(spec(), options, kGpu);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<std::size_t> checked;
  for (std::size_t t = 0; t < tokens; t += scheme(spec().scheme).batch_dependent() ? 1 : 41)
    checked.push_back(t);
  Layer source(layer);
  const std::vector<float> numbers = source.numbers(tokens * width, 1.0f);
  const Hidden x =
      spec().act_dtype == DType::bf16 ? narrow<formats::bf16>(numbers) : narrow<formats::f16>(numbers);
  for (const BenchRouting routing : {BenchRouting::uniform, BenchRouting::skew}) {
    std::mt19937 random(3);
    Routed routed{std::vector<std::int32_t>(tokens * 2), std::vector<float>(tokens * 2, 0.5f)};
    random_routing(spec(), routing, random, routed.ids);
    const std::vector<float> values = rows_of(x.values, checked, width),
                             shares = rows_of(routed.weights, checked, 2);
    std::vector<std::vector<double>> expected;  // as in expect_close: one of two
    for (const bool narrow : {false, true})
      expected.push_back(reference_moe(spec(), options, layer.reference(),
                                       {.hidden = {values.begin(), values.end()},
                                        .topk_ids = rows_of(routed.ids, checked, 2),
                                        .topk_weights = {shares.begin(), shares.end()},
                                        .narrow_intermediate = narrow})
                             .hidden);
    const double allowed =
        tolerance(spec(), options) + one_flip(spec(), options, tokens * 2) + of_inexact_sums(spec(), options);
    for (const CudaCandidate& candidate : plan->candidates(tokens)) {
      SCOPED_TRACE(describe(candidate.tuning));
      options.cuda_tuning = candidate.tuning;
      const std::vector<float> out = rows_of(GpuMoe::run(layer, options, weights, x, routed), checked, width);
      EXPECT_LE(std::min(relative_l2(out, expected[0]), relative_l2(out, expected[1])), allowed);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, EveryTile, every_scheme_and_type(), scheme_and_type);

}  // namespace
}  // namespace gatefold
