// Parts of the experts of a layer (MoeSpec::ep_size): what they give adds up to what the layer gives.
#include "../expert_parts.h"
#include "gatefold/codec.h"
#include "gpu.h"
#include "gpu_layer.h"

namespace gatefold {
namespace {

class ExpertParallel : public GpuTest {};

TEST_F(ExpertParallel, PartsAddUpToTheLayer) {
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    const auto id = static_cast<SchemeId>(i);
    if (scheme(id).batch_dependent()) continue;  // rounds by what other tokens a part has
    const MoeSpec spec = spec_of_all(small_spec(id)), part_spec = spec_of_part(spec);
    PlanOptions options{.max_tokens = 301, .debug_workspace = true};
    Layer layer(spec);
    const ExpertWeights all = layer.weights(options, Device::cuda());
    std::vector<ExpertWeights> weights;
    for (int part = 0; part < kParts; ++part)
      weights.push_back(pack(part_spec, weights_of_part(layer.reference(), part), options, Device::cuda()));
    const auto any = MoePlan::create(spec, options, Device::cuda());
    ASSERT_TRUE(any.ok()) << any.status().message();
    for (const CudaCandidate& candidate : any->candidates(options.max_tokens)) {
      options.cuda_tuning = candidate.tuning;
      const auto whole = MoePlan::create(spec, options, Device::cuda()),
                 plan = MoePlan::create(part_spec, options, Device::cuda());
      ASSERT_TRUE(whole.ok() && plan.ok()) << whole.status().message() << plan.status().message();
      for (const std::size_t tokens : {1, 3, 20, 90, 301}) {
        SCOPED_TRACE(testing::Message()
                     << scheme(id).name << ", " << describe(candidate.tuning) << ", " << tokens << " tokens");
        const auto x = codes_of<formats::bf16>(layer.numbers(tokens * 256, 1.0f));
        const ChosenExperts chosen(tokens);
        std::vector<double> sums(x.size());
        for (int part = 0; part < kParts; ++part) {
          const ChosenExperts own = chosen.of_part(part);
          const std::vector<float> out = run<float>(*plan, weights[static_cast<std::size_t>(part)], x,
                                                    {own.ids, own.weights}, DType::f32);
          for (std::size_t j = 0; j < sums.size(); ++j) sums[j] += static_cast<double>(out[j]);
        }
        EXPECT_LE(relative_l2(run<float>(*whole, all, x, {chosen.ids, chosen.weights}, DType::f32), sums),
                  2 * tolerance(spec, options));
      }
    }
  }
}

// Plans expect of each expert as many tokens as it has: those of a part choose for a call of 8 times as many.
TEST_F(ExpertParallel, PlansAreForAsManyTokensAsExpertsHave) {
  for (const SchemeId id : {SchemeId::mxfp4, SchemeId::int4_g128, SchemeId::fp8_block_afp8}) {
    MoeSpec spec = small_spec(id);
    spec.experts = 32;
    spec.top_k = 8;
    spec.hidden = 7168;
    spec.intermediate = 2048;
    const PlanOptions options{.max_tokens = 4096};
    const auto whole = MoePlan::create(spec, options, Device::cuda());
    spec.ep_size = 8;
    const auto part = MoePlan::create(spec, options, Device::cuda());
    ASSERT_TRUE(whole.ok() && part.ok()) << whole.status().message() << part.status().message();
    const auto clocks = [](const MoePlan& plan, int tokens) {
      for (const CudaCandidate& candidate : plan.candidates(tokens))
        if (candidate.chosen) return candidate.clocks;
      return 0.0;
    };
    for (const int tokens : {64, 512}) {
      SCOPED_TRACE(testing::Message() << scheme(id).name << ", " << tokens << " tokens");
      EXPECT_NEAR(clocks(*part, 8 * tokens) / clocks(*whole, tokens), 1, 0.1);
    }
  }
}

}  // namespace
}  // namespace gatefold
