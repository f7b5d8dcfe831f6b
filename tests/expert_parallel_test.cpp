// Parts of the experts of a layer on the CPU: what they give adds up to what the layer gives.
#include <gtest/gtest.h>

#include "expert_parts.h"

namespace gatefold {
namespace {

std::vector<float> run(const MoePlan& plan, const ExpertWeights& weights, const std::vector<float>& x,
                       const ChosenExperts& chosen) {
  const MoeSpec& spec = plan.spec();
  const auto rows = static_cast<std::int64_t>(x.size()) / spec.hidden;
  std::vector<float> out(x.size(), 7.0f);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  const Status status = plan.run(weights,
                                 {.hidden = {x.data(), DType::f32, rows, spec.hidden},
                                  .topk_ids = chosen.ids.data(),
                                  .topk_weights = chosen.weights.data()},
                                 {.hidden = {out.data(), DType::f32, rows, spec.hidden}}, workspace);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

void expect_parts_add_up(const Layer& layer, const ReferenceWeights& all, const MoeSpec& spec) {
  const PlanOptions options{.max_tokens = 40, .threads = 2, .debug_workspace = true};
  const MoeSpec part_spec = spec_of_part(spec);
  const auto whole = MoePlan::create(spec, options), plan = MoePlan::create(part_spec, options);
  ASSERT_TRUE(whole.ok() && plan.ok()) << whole.status().message() << plan.status().message();
  for (const std::size_t tokens : {1, 3, 40}) {
    SCOPED_TRACE(testing::Message() << scheme(spec.scheme).name << ", " << tokens << " tokens");
    Layer numbers = layer;
    const std::vector<float> x = numbers.numbers(tokens * static_cast<std::size_t>(spec.hidden), 1.0f);
    const ChosenExperts chosen(tokens);
    std::vector<double> sums(x.size());
    for (int part = 0; part < kParts; ++part) {
      const ExpertWeights weights = pack(part_spec, weights_of_part(all, part), options, {});
      const std::vector<float> out = run(*plan, weights, x, chosen.of_part(part));
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(out[i]);
    }
    EXPECT_LE(relative_l2(run(*whole, pack(spec, all, options, {}), x, chosen), sums),
              2 * tolerance(spec, options));
  }
}

TEST(ExpertParallel, PartsAddUpToTheLayer) {
  for (std::size_t i = 0; i < all_schemes().size(); ++i)
    for (const bool with_static : {false, true}) {
      const Scheme& s = all_schemes()[i];
      if (with_static ? !s.activation.may_be_static() : s.batch_dependent()) continue;
      MoeSpec spec = spec_of_all(small_spec(static_cast<SchemeId>(i)));
      spec.bias = true;
      const Layer layer(spec, 1, with_static);
      expect_parts_add_up(layer, layer.reference(), spec);
    }
}

TEST(ExpertParallel, InputsInOrdersOfTheirOwn) {
  MoeSpec spec = spec_of_all(small_spec(SchemeId::int4_g128));
  const Layer layer(spec);
  spec.ordered_inputs = true;
  ReferenceWeights all = layer.reference();
  for (int e = 0; e < spec.experts; ++e)
    for (int h = 0; h < spec.hidden; ++h) all.vectors.input_order.push_back((h * 5 + e) % spec.hidden);
  expect_parts_add_up(layer, all, spec);
}

// With one scale for all rows, too, of which there may be none.
TEST(ExpertParallel, NothingIsHere) {
  for (const SchemeId id : {SchemeId::int4_g128, SchemeId::fp8_tensor_afp8}) {
    const MoeSpec spec = spec_of_part(spec_of_all(small_spec(id)));
    Layer layer(spec);
    const PlanOptions options{.max_tokens = 5, .threads = 2, .debug_workspace = true};
    const auto plan = MoePlan::create(spec, options);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    ChosenExperts chosen(5);
    for (std::int32_t& id : chosen.ids) id = id % 2 == 0 ? -1 : kExpertsOfPart;
    const std::vector<float> x = layer.numbers(5 * 256, 1.0f);
    EXPECT_EQ(run(*plan, layer.weights(options), x, chosen), std::vector<float>(x.size()));
  }
}

TEST(ExpertParallel, Errors) {
  const MoeSpec spec = spec_of_part(spec_of_all(small_spec(SchemeId::int4_g128)));
  const ExpertWeights weights = Layer(spec).weights({});
  const auto plan = MoePlan::create(spec, {});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::vector<float> x(256), logits(8);
  std::vector<float> y(256);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  for (const float* given : {static_cast<const float*>(nullptr), logits.data()})
    EXPECT_EQ(plan->run(weights, {.hidden = {x.data(), DType::f32, 1, 256}, .router_logits = given},
                        {.hidden = {y.data(), DType::f32, 1, 256}}, workspace)
                  .message(),
              "the layer has one of 4 parts of the experts, and cannot route to others: give topk_ids and "
              "topk_weights");
}

}  // namespace
}  // namespace gatefold
