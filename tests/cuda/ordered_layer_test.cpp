// Layers whose experts take their inputs in orders of their own (act-order), on the GPU.
#include "gatefold/codec.h"
#include "gpu.h"
#include "gpu_layer.h"
#include "moe/synthetic.h"

namespace gatefold {
namespace {

class OrderedLayers : public GpuTest {
 protected:
  /// Where all experts have the same order, hidden states in that order give the same bits to the layer
  /// without one: by every candidate.
  static void expect_order_of_hidden_states(const MoeSpec& spec) {
    MoeSpec ordered = spec, of_one = spec;
    ordered.ordered_inputs = true;
    of_one.experts = 1;
    Layer layer(spec);
    ReferenceWeights in_order = layer.reference();
    const std::vector<std::int32_t> order = random_orders(of_one);
    for (int e = 0; e < spec.experts; ++e)
      in_order.vectors.input_order.insert(in_order.vectors.input_order.end(), order.begin(), order.end());
    PlanOptions options{.max_tokens = 90, .debug_workspace = true};
    const ExpertWeights plain = layer.weights(options, Device::cuda()),
                        weights = pack(ordered, in_order, options, Device::cuda());
    const auto any = MoePlan::create(ordered, options, Device::cuda());
    ASSERT_TRUE(any.ok()) << any.status().message();
    for (const CudaCandidate& candidate : any->candidates(options.max_tokens)) {
      options.cuda_tuning = candidate.tuning;
      const auto plan = MoePlan::create(ordered, options, Device::cuda()),
                 of_plain = MoePlan::create(spec, options, Device::cuda());
      ASSERT_TRUE(plan.ok() && of_plain.ok()) << plan.status().message() << of_plain.status().message();
      for (const std::size_t tokens : {1, 3, 90}) {
        SCOPED_TRACE(testing::Message() << scheme(spec.scheme).name << ", hidden " << spec.hidden << ", "
                                        << describe(candidate.tuning) << ", " << tokens << " tokens");
        const auto width = static_cast<std::size_t>(spec.hidden);
        const auto x = codes_of<formats::bf16>(layer.numbers(tokens * width, 1.0f));
        std::vector<std::uint16_t> moved(x.size());
        for (std::size_t i = 0; i < x.size(); ++i)
          moved[i] = x[i / width * width + static_cast<std::size_t>(order[i % width])];
        const Routed routed = route(tokens, static_cast<std::size_t>(spec.experts));
        EXPECT_EQ(run<float>(*plan, weights, x, routed, DType::f32),
                  run<float>(*of_plain, plain, moved, routed, DType::f32));
      }
    }
  }
};

TEST_F(OrderedLayers, OneOrderIsThatOfTheHiddenStates) {
  for (std::size_t id = 0; id < all_schemes().size(); ++id)
    for (const bool ragged : {false, true}) {
      MoeSpec spec = small_spec(static_cast<SchemeId>(id));
      if (ragged) spec = ragged_spec(spec);
      spec.shared = {};  // takes inputs as they are
      expect_order_of_hidden_states(spec);
    }
}

// More than is put in order in shared memory.
TEST_F(OrderedLayers, LongRows) {
  MoeSpec spec = small_spec(SchemeId::int4_g128);
  spec.experts = 2;
  spec.hidden = 24704;
  expect_order_of_hidden_states(spec);
}

}  // namespace
}  // namespace gatefold
