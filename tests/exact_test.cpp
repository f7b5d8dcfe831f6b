// Layers with exact results: every CPU kernel has the bits of the reference.
#include "exact_layer.h"

namespace gatefold {
namespace {

class EveryScheme : public testing::TestWithParam<SchemeAndType> {};

TEST_P(EveryScheme, HasTheBitsOfTheReference) {
  const auto id = static_cast<SchemeId>(std::get<0>(GetParam()));
  for (const bool weights_only : {false, true}) {
    PlanOptions options{.max_tokens = 33, .threads = 2, .weights_only = weights_only};
    ExactLayer layer(id, std::get<1>(GetParam()), options);
    const MoeSpec& spec = layer.spec();
    for (const std::size_t tokens : {1, 3, 33}) {
      const std::vector<float> x = layer.hidden(tokens);
      const ExactLayer::Slots slots = layer.slots(tokens);
      const std::vector<float> expected = layer.expected(x, slots);
      for (const KernelInfo& kernel : cpu_kernels()) {
        if (kernel.scheme != id || !kernel.refuses(spec, options, {}).empty()) continue;
        options.kernel = kernel.name;
        const auto plan = MoePlan::create(spec, options);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        std::vector<std::byte> workspace(plan->workspace_bytes());
        std::vector<float> out(x.size(), std::nanf(""));
        const auto rows = static_cast<std::int64_t>(tokens);
        const Status status = plan->run(layer.weights(options),
                                        {.hidden = {x.data(), DType::f32, rows, spec.hidden},
                                         .topk_ids = slots.ids.data(),
                                         .topk_weights = slots.weights.data()},
                                        {.hidden = {out.data(), DType::f32, rows, spec.hidden}}, workspace);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(out, expected) << kernel.name << ", " << tokens << " tokens";
      }
      options.kernel.clear();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, EveryScheme, every_scheme_and_type(), scheme_and_type);

}  // namespace
}  // namespace gatefold
