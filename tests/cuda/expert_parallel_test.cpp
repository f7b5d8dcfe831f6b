// Parts of the experts of a layer (MoeSpec::ep_size): what they give adds up to what the layer gives.
#include "gatefold/codec.h"
#include "gpu.h"
#include "gpu_layer.h"

namespace gatefold {
namespace {

constexpr int kParts = 4, kExpertsOfPart = 2, kTopK = 3;

MoeSpec spec_of_all(SchemeId scheme) {
  MoeSpec spec = small_spec(scheme);
  spec.experts = kParts * kExpertsOfPart;
  spec.top_k = kTopK;
  return spec;
}
MoeSpec spec_of_part(MoeSpec spec) {
  spec.experts = kExpertsOfPart;
  spec.ep_size = kParts;
  return spec;
}

/// kTopK different experts for each token. None of some tokens' are in part 0.
Routed choose(std::size_t tokens) {
  Routed routed;
  for (std::size_t t = 0; t < tokens; ++t)
    for (std::size_t i = 0; i < kTopK; ++i) {
      routed.ids.push_back(static_cast<std::int32_t>((t * t + 2 * i) % (kParts * kExpertsOfPart)));
      routed.weights.push_back(0.5f / static_cast<float>(i + 1));
    }
  return routed;
}

/// As part i has them: those of others are negative or too large.
Routed of_part(Routed routed, int part) {
  for (std::int32_t& id : routed.ids) id -= part * kExpertsOfPart;
  return routed;
}

class ExpertParallel : public GpuTest {};

TEST_F(ExpertParallel, PartsAddUpToTheLayer) {
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    const auto id = static_cast<SchemeId>(i);
    if (scheme(id).batch_dependent()) continue;  // rounds by what other tokens a part has
    const MoeSpec spec = spec_of_all(id), part_spec = spec_of_part(spec);
    PlanOptions options{.max_tokens = 301, .debug_workspace = true};
    Layer layer(spec);
    const ExpertWeights all = layer.weights(options, Device::cuda());
    std::vector<ExpertWeights> weights;
    for (int part = 0; part < kParts; ++part) {
      ReferenceWeights some = layer.reference();
      const auto first = some.routed.begin() + part * kExpertsOfPart;
      some.routed = {first, first + kExpertsOfPart};
      some.vectors.router.clear();
      weights.push_back(pack(part_spec, some, options, Device::cuda()));
    }
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
        const Routed routed = choose(tokens);
        std::vector<double> sums(x.size());
        for (int part = 0; part < kParts; ++part) {
          const std::vector<float> out = run<float>(*plan, weights[static_cast<std::size_t>(part)], x,
                                                    of_part(routed, part), DType::f32);
          for (std::size_t j = 0; j < sums.size(); ++j) sums[j] += static_cast<double>(out[j]);
        }
        EXPECT_LE(relative_l2(run<float>(*whole, all, x, routed, DType::f32), sums),
                  2 * tolerance(spec, options));
      }
    }
  }
}

// Plans expect of each expert as many tokens as it has: those of a part choose for a call of 8 times as many.
TEST_F(ExpertParallel, PlansAreForAsManyTokensAsExpertsHave) {
  for (const SchemeId id : {SchemeId::mxfp4, SchemeId::int4_g128, SchemeId::fp8_block_afp8}) {
    MoeSpec spec;
    spec.scheme = id;
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

TEST_F(ExpertParallel, Errors) {
  const MoeSpec spec = spec_of_part(spec_of_all(SchemeId::int4_g128));
  Layer layer(spec);
  const ExpertWeights weights = layer.weights({}, Device::cuda());
  const auto plan = MoePlan::create(spec, {}, Device::cuda());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  auto calls = HostCalls::create(*plan);
  ASSERT_TRUE(calls.ok()) << calls.status().message();
  const std::vector<float> x(256), logits(8);
  std::vector<float> y(256);
  for (const float* given : {static_cast<const float*>(nullptr), logits.data()})
    EXPECT_EQ(calls
                  ->run(*plan, weights, {.hidden = {x.data(), DType::f32, 1, 256}, .router_logits = given},
                        {.hidden = {y.data(), DType::f32, 1, 256}})
                  .message(),
              "the layer has one of 4 parts of the experts, and cannot route to others: give topk_ids and "
              "topk_weights");
  const auto of_cpu = MoePlan::create(spec, {});
  ASSERT_FALSE(of_cpu.ok());
  EXPECT_NE(of_cpu.status().message().find("one of 4 parts of a layer are for GPUs only"), std::string::npos);
}

}  // namespace
}  // namespace gatefold
