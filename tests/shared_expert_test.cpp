// A shared expert's activations have scales of their own: static ones, if its matrices have them, or one for
// all tokens.
#include "moe/host_calls.h"
#include "moe_layer.h"

namespace gatefold {
namespace {

TEST(SharedExpert, HasScalesOfItsOwn) {
  for (const SchemeId id : {SchemeId::fp8_tensor_afp8, SchemeId::nvfp4_anvfp4})
    for (const bool with_static : {false, true})
      for (const SchemeId of_routed : {SchemeId::bf16, id}) {
        SCOPED_TRACE(testing::Message() << scheme(id).name << " beside " << scheme(of_routed).name
                                        << (with_static ? ", static" : ""));
        MoeSpec spec = small_spec(of_routed);
        spec.shared = {.intermediate = 96, .gated = false, .scheme = id};
        Layer layer(spec, 1, with_static);
        const PlanOptions options{.max_tokens = 20, .threads = 2, .debug_workspace = true};
        const auto plan = MoePlan::create(spec, options);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        auto calls = HostCalls::create(*plan);
        ASSERT_TRUE(calls.ok()) << calls.status().message();
        const std::vector<float> x = layer.numbers(std::size_t{20} * 256, 1.0f);
        std::vector<float> out(x.size());
        const Status status =
            calls->run(*plan, layer.weights(options), {.hidden = {x.data(), DType::f32, 20, 256}},
                       {.hidden = {out.data(), DType::f32, 20, 256}});
        ASSERT_TRUE(status.ok()) << status.message();
        const auto expected =
            reference_moe(spec, options, layer.reference(), {.hidden = {x.begin(), x.end()}});
        MoeSpec of_shared = spec;
        of_shared.scheme = id;
        EXPECT_LE(relative_l2(out, expected.hidden), tolerance(of_shared, options));
      }
}

TEST(SharedExpert, HasStaticScalesOfBothInputs) {
  MoeSpec spec = small_spec(SchemeId::bf16);
  spec.shared = {.intermediate = 96, .scheme = SchemeId::fp8_tensor_afp8};
  ReferenceWeights weights = Layer(spec, 1, true).reference();
  weights.shared.down.input_scale.reset();
  const auto packed = ExpertWeights::pack(
      spec, {}, weights.vectors,
      [&](int e, Projection p) -> Result<QuantizedMatrix> {
        const ReferenceFfn& ffn = weights.routed[static_cast<std::size_t>(e)];
        return p == Projection::gate ? ffn.gate : p == Projection::up ? ffn.up : ffn.down;
      },
      [&](int, Projection p) -> Result<QuantizedMatrix> {
        return p == Projection::gate ? weights.shared.gate
               : p == Projection::up ? weights.shared.up
                                     : weights.shared.down;
      });
  EXPECT_EQ(packed.status().message(),
            "shared expert: some of its matrices have an input scale, some have none");
}

}  // namespace
}  // namespace gatefold
