// Layers with exact results: the GPU has the bits of the reference.
#include "../exact_layer.h"
#include "gpu.h"
#include "moe/host_calls.h"

namespace gatefold {
namespace {

class GpuExact : public GpuTest, public testing::WithParamInterface<SchemeAndType> {};

TEST_P(GpuExact, HasTheBitsOfTheReference) {
  const auto id = static_cast<SchemeId>(std::get<0>(GetParam()));
  for (const bool weights_only : {false, true}) {
    const PlanOptions options{.max_tokens = 129, .weights_only = weights_only, .debug_workspace = true};
    ExactLayer layer(id, std::get<1>(GetParam()), options);
    const MoeSpec& spec = layer.spec();
    const ExpertWeights weights = layer.weights(options, Device::cuda());
    const auto plan = MoePlan::create(spec, options, Device::cuda());
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    auto calls = HostCalls::create(*plan);
    ASSERT_TRUE(calls.ok()) << calls.status().message();
    for (const std::size_t tokens : {1, 2, 3, 8, 17, 40, 129}) {
      const std::vector<float> x = layer.hidden(tokens);
      std::vector<std::uint16_t> codes;
      for (const float number : x)
        codes.push_back(static_cast<std::uint16_t>(
            spec.act_dtype == DType::f16 ? encode<formats::f16>(number) : encode<formats::bf16>(number)));
      const ExactLayer::Slots slots = layer.slots(tokens);
      std::vector<float> out(x.size(), std::nanf(""));
      const auto rows = static_cast<std::int64_t>(tokens);
      const Status status = calls->run(*plan, weights,
                                       {.hidden = {codes.data(), spec.act_dtype, rows, spec.hidden},
                                        .topk_ids = slots.ids.data(),
                                        .topk_weights = slots.weights.data()},
                                       {.hidden = {out.data(), DType::f32, rows, spec.hidden}});
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(out, layer.expected(x, slots)) << tokens << " tokens";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, GpuExact, every_scheme_and_type(), scheme_and_type);

}  // namespace
}  // namespace gatefold
