// A shared expert that is like the routed ones is multiplied as one of them, which all tokens choose.
#include "cuda/layer_buffers.h"
#include "gatefold/codec.h"
#include "gpu.h"
#include "gpu_layer.h"

namespace gatefold {
namespace {

class SharedExpert : public GpuTest {
 protected:
  static MoeSpec with_shared(SchemeId scheme, bool gated = false) {
    MoeSpec spec = small_spec(scheme);
    spec.shared = {.intermediate = spec.intermediate, .gated = gated, .scheme = scheme};
    return spec;
  }

  /// With every candidate; false: the expert is multiplied by itself.
  static bool has_the_bits_of_one_more_expert(const MoeSpec& spec) {
    PlanOptions options{.max_tokens = 301};  // ids need not be experts
    const MoeSpec joined = cuda::joined(spec, options);
    const std::int32_t experts = spec.experts;
    if (joined.experts == experts) return false;
    Layer layer(spec);
    ReferenceWeights all = layer.reference();
    all.routed.push_back(all.shared);
    all.vectors.router.clear();
    const ExpertWeights weights = layer.weights(options, Device::cuda()),
                        of_joined = pack(joined, all, options, Device::cuda());
    const auto any = MoePlan::create(spec, options, Device::cuda());
    EXPECT_TRUE(any.ok()) << any.status().message();
    if (!any) return true;
    for (const CudaCandidate& candidate : any->candidates(options.max_tokens)) {
      options.cuda_tuning = candidate.tuning;
      const auto plan = MoePlan::create(spec, options, Device::cuda()),
                 of_all = MoePlan::create(joined, options, Device::cuda());
      EXPECT_TRUE(plan.ok() && of_all.ok()) << plan.status().message() << of_all.status().message();
      if (!plan || !of_all) return true;
      for (const std::size_t tokens : {1, 3, 20, 90, 301}) {
        SCOPED_TRACE(testing::Message() << scheme(spec.scheme).name << ", " << describe(candidate.tuning)
                                        << ", " << tokens << " tokens");
        const auto x = codes_of<formats::bf16>(layer.numbers(tokens * 256, 1.0f));
        Routed routed = route(tokens, experts), of_all_routed;
        for (std::size_t slot = 7; slot < routed.ids.size(); slot += 10)  // experts that there are not
          routed.ids[slot] = slot % 20 == 7 ? -1 : experts;
        for (std::size_t slot = 0; slot < routed.ids.size(); ++slot) {
          of_all_routed.ids.push_back(routed.ids[slot] == experts ? -1 : routed.ids[slot]);
          of_all_routed.weights.push_back(routed.weights[slot]);
          if (slot % 2 == 0) continue;
          of_all_routed.ids.push_back(experts);
          of_all_routed.weights.push_back(1);
        }
        EXPECT_EQ(run<float>(*plan, weights, x, routed, DType::f32),
                  run<float>(*of_all, of_joined, x, of_all_routed, DType::f32));
      }
    }
    return true;
  }
};

TEST_F(SharedExpert, HasTheBitsOfOneMoreExpert) {
  int joins = 0;
  for (std::size_t id = 0; id < all_schemes().size(); ++id)
    joins += has_the_bits_of_one_more_expert(with_shared(static_cast<SchemeId>(id)));
  EXPECT_GE(joins, 20);
}

// Up to as many as multiplies sort slots of by themselves.
TEST_F(SharedExpert, BesideManyExperts) {
  MoeSpec spec = with_shared(SchemeId::int4_g128);
  for (const int experts : {512, 519}) {
    spec.experts = experts;
    EXPECT_TRUE(has_the_bits_of_one_more_expert(spec));
  }
  spec.experts = 520;
  EXPECT_FALSE(has_the_bits_of_one_more_expert(spec));
}

// Its gate, beside the reference; and the layer's own routing, beside calls that are given what was chosen.
TEST_F(SharedExpert, GatedAndRouted) {
  for (const SchemeId id : {SchemeId::int4_g128, SchemeId::mxfp4, SchemeId::fp8_block_afp8})
    for (const bool gated : {false, true}) {
      const MoeSpec spec = with_shared(id, gated);
      Layer layer(spec);
      const PlanOptions options{.max_tokens = 301, .debug_workspace = true};
      const ExpertWeights weights = layer.weights(options, Device::cuda());
      const auto plan = MoePlan::create(spec, options, Device::cuda());
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      for (const std::size_t tokens : {1, 7, 90, 301}) {
        SCOPED_TRACE(testing::Message()
                     << scheme(id).name << (gated ? ", gated, " : ", ") << tokens << " tokens");
        const auto x = codes_of<formats::bf16>(layer.numbers(tokens * 256, 1.0f));
        Routed routed;
        const std::vector<float> out = run<float>(*plan, weights, x, {}, DType::f32, &routed);
        EXPECT_EQ(run<float>(*plan, weights, x, routed, DType::f32), out);
        if (scheme(id).quantizes_activations()) continue;  // rounding of the intermediate may differ
        std::vector<double> hidden;
        for (const std::uint16_t code : x) hidden.push_back(decode<formats::bf16>(code));
        const ReferenceResult expected =
            reference_moe(spec, options, layer.reference(),
                          {.hidden = hidden,
                           .topk_ids = routed.ids,
                           .topk_weights = {routed.weights.begin(), routed.weights.end()}});
        EXPECT_LE(relative_l2(out, expected.hidden),
                  tolerance(spec, options) + 2 * error_of_sums(scheme(id), scheme(id).activation, 256));
      }
    }
}

}  // namespace
}  // namespace gatefold
