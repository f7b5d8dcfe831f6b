// Whole MoE layers on the GPU against the scalar reference, for every scheme.

#include <numeric>

#include "gpu_moe.h"

namespace gatefold {
namespace {

class EveryScheme : public GpuMoe, public testing::WithParamInterface<SchemeAndType> {
 protected:
  SchemeId id() const { return static_cast<SchemeId>(std::get<0>(GetParam())); }
  MoeSpec small_spec() const {
    MoeSpec spec;
    spec.scheme = id();
    spec.experts = 6;
    spec.top_k = 2;
    spec.hidden = 256;
    spec.intermediate = 128;
    spec.act_dtype = std::get<1>(GetParam());
    return spec;
  }
  void check_batch_invariant(bool fast_accumulation);
};

TEST_P(EveryScheme, TokenCounts) {
  const Layer layer(small_spec());
  const ExpertWeights weights = layer.weights({}, kGpu);
  for (const int tokens : {1, 2, 3, 7, 8, 9, 16, 33, 64, 65, 129, 512})
    expect_close(layer, weights, {.max_tokens = tokens, .debug_workspace = true},
                 static_cast<std::size_t>(tokens), Pattern::uniform);
}

TEST_P(EveryScheme, SkewedRouting) {
  const Layer layer(small_spec());
  const ExpertWeights weights = layer.weights({}, kGpu);
  for (const Pattern pattern : {Pattern::single, Pattern::few, Pattern::duplicates})
    for (const int tokens : {2, 8, 33, 129})
      expect_close(layer, weights, {.max_tokens = 129, .debug_workspace = true},
                   static_cast<std::size_t>(tokens), pattern);
}

TEST_P(EveryScheme, RaggedShapes) {
  const MoeSpec spec = ragged_spec(small_spec());
  const Layer layer(spec);
  for (const std::size_t tokens : {5, 17, 100})
    expect_close(layer, {.max_tokens = 100, .debug_workspace = true}, tokens, Pattern::uniform);
}

TEST_P(EveryScheme, WeightsOnly) {
  if (!scheme(id()).quantizes_activations()) return;
  expect_close(Layer(small_spec()), {.max_tokens = 20, .weights_only = true}, 20, Pattern::uniform);
}

// Experts with scales of their own, some of which are the same.
TEST_P(EveryScheme, StaticActivationScales) {
  if (scheme(id()).activation.may_be_static())
    expect_close_by_all(Layer(small_spec(), 3, true), {3, 20, 300});
}

TEST_P(EveryScheme, LongRows) {
  MoeSpec spec = small_spec();
  spec.experts = 3;
  spec.hidden = 1280;
  spec.intermediate = 640;
  const Layer layer(spec);
  for (const std::size_t tokens : {1, 12, 90})
    expect_close(layer, {.max_tokens = 90}, tokens, Pattern::duplicates);
}

TEST_P(EveryScheme, EveryCandidate) {
  expect_close_by_all(Layer(small_spec()), {3, 90});
}

// A token alone has the bits that it has among others.
void EveryScheme::check_batch_invariant(bool fast_accumulation) {
  MoeSpec spec = small_spec();
  spec.shared = {.intermediate = 128, .gated = true, .scheme = spec.scheme};
  if (scheme(id()).batch_dependent()) return;
  Layer layer(spec);
  const PlanOptions options{
      .max_tokens = 150, .batch_invariant = true, .fast_accumulation = fast_accumulation};
  const auto plan = MoePlan::create(spec, options, kGpu);
  const Format weight = scheme(id()).weight.value;
  if (weight.bits == 16 && (weight == formats::bf16) != (spec.act_dtype == DType::bf16)) {
    EXPECT_NE(plan.status().message().find("one order"), std::string::npos) << plan.status().message();
    return;
  }
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const ExpertWeights weights = layer.weights(options, kGpu);
  const std::vector<float> numbers = layer.numbers(std::size_t{150} * 256, 1.0f);
  const Hidden x =
      spec.act_dtype == DType::bf16 ? narrow<formats::bf16>(numbers) : narrow<formats::f16>(numbers);
  const Routed routed = route_by(Pattern::uniform, spec, 150);
  const auto part = [](const auto& all, std::size_t first, std::size_t count, std::size_t width) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first * width);
    return std::vector(begin, begin + static_cast<std::ptrdiff_t>(count * width));
  };
  const std::vector<float> together = run(layer, options, weights, x, routed);
  for (const auto& [first, count] :
       {std::pair<std::size_t, std::size_t>{0, 1}, {149, 1}, {3, 5}, {20, 40}, {10, 130}}) {
    const Hidden some{part(x.codes, first, count, 256), part(x.values, first, count, 256)};
    const Routed of_some{part(routed.ids, first, count, 2), part(routed.weights, first, count, 2)};
    EXPECT_EQ(run(layer, options, weights, some, of_some), part(together, first, count, 256))
        << count << " tokens from " << first;
  }
}

TEST_P(EveryScheme, BatchInvariant) {
  check_batch_invariant(false);
  if (scheme(id()).activation.value == formats::e4m3) check_batch_invariant(true);
}

INSTANTIATE_TEST_SUITE_P(Table, EveryScheme, every_scheme_and_type(), scheme_and_type);

// The layer's own router, on the device.
TEST_F(GpuMoe, FromTheRouter) {
  MoeSpec spec;
  spec.scheme = SchemeId::int4_g128;
  spec.experts = 16;
  spec.top_k = 4;
  spec.hidden = spec.intermediate = 256;
  spec.shared = {.intermediate = 128, .gated = true, .scheme = SchemeId::bf16};
  spec.routing = {.score = Score::sigmoid, .correction_bias = true, .scaling_factor = 2.5f};
  Layer layer(spec);
  for (const std::size_t tokens : {1, 7, 20, 100}) {
    const Hidden x = narrow<formats::bf16>(layer.numbers(tokens * 256, 1.0f));
    const PlanOptions options{.max_tokens = 100, .debug_workspace = true};
    const auto plan = MoePlan::create(spec, options, kGpu);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    auto calls = HostCalls::create(*plan);
    ASSERT_TRUE(calls.ok()) << calls.status().message();
    std::vector<float> out(x.values.size(), std::nanf("")), weights(tokens * 4);
    std::vector<std::int32_t> ids(tokens * 4, -1);
    const auto rows = static_cast<std::int64_t>(tokens);
    const Status status =
        calls->run(*plan, layer.weights(options, kGpu), {.hidden = {x.codes.data(), DType::bf16, rows, 256}},
                   {.hidden = {out.data(), DType::f32, rows, 256},
                    .topk_ids = ids.data(),
                    .topk_weights = weights.data()});
    ASSERT_TRUE(status.ok()) << status.message();
    const ReferenceResult reference =
        reference_moe(spec, options, layer.reference(), {.hidden = {x.values.begin(), x.values.end()}});
    EXPECT_EQ(ids, reference.topk_ids) << tokens;
    EXPECT_LE(relative_l2(weights, reference.topk_weights), 1e-5) << tokens;
    EXPECT_LE(relative_l2(out, reference.hidden), tolerance(spec, options) +
                                                      one_flip(spec, options, rows * spec.top_k) +
                                                      of_inexact_sums(spec, options));
  }
}

/// Logits with ties, infinities and numbers that are none.
std::vector<float> difficult_logits(std::size_t tokens, int experts) {
  std::mt19937 random(11);
  std::vector<float> logits(tokens * static_cast<std::size_t>(experts));
  for (float& x : logits) x = static_cast<float>(random() % 41) / 8 - 2.5f;
  for (std::size_t i = 3; i < logits.size(); i += 29)
    logits[i] = i % 2 == 0 ? std::nanf("") : -std::numeric_limits<float>::infinity();
  return logits;
}

// Routed by the multiply, or by a kernel before it: experts and weights are the CPU's, and the result has the
// bits of a call that is given them.
TEST_F(GpuMoe, FromLogits) {
  const Routing routings[] = {
      {},
      {.score = Score::sigmoid, .correction_bias = true, .scaling_factor = 2.5f},
      {.score = Score::sigmoid, .groups = 4, .top_groups = 2, .correction_bias = true, .epsilon = 1e-20f},
      {.score = Score::sqrt_softplus, .correction_bias = true, .scaling_factor = 1.5f, .epsilon = 1e-20f},
      {.renormalize = false, .groups = 2, .top_groups = 1, .group_score = GroupScore::max}};
  struct Case {
    int experts, top_k;
    SchemeId scheme = SchemeId::int4_g128;
    bool static_scales = false;
  };
  for (const Case& test : {Case{8, 2}, Case{128, 8}, Case{256, 8, SchemeId::int4_g128_afp8}, Case{512, 10},
                           Case{8, 4, SchemeId::fp8_tensor_afp8, true}, Case{40, 32}, Case{600, 4}})
    for (const Routing& routing : routings) {
      MoeSpec spec;
      spec.scheme = test.scheme;
      spec.experts = test.experts;
      spec.top_k = test.top_k;
      if (routing.groups > 1 && test.top_k > test.experts / 2) continue;
      spec.hidden = spec.intermediate = 128;
      spec.routing = routing;
      Layer layer(spec, 3, test.static_scales);
      const PlanOptions options{.max_tokens = 32, .debug_workspace = true};
      const ExpertWeights weights = layer.weights(options, kGpu);
      const auto plan = MoePlan::create(spec, options, kGpu);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      auto calls = HostCalls::create(*plan);
      ASSERT_TRUE(calls.ok()) << calls.status().message();
      const auto bias = layer.reference().vectors.correction_bias;
      for (const std::size_t tokens : {1, 2, 7, 8, 9, 16, 32}) {
        SCOPED_TRACE(testing::Message() << tokens << " tokens, " << spec.top_k << " of " << spec.experts);
        const std::vector<float> logits = difficult_logits(tokens, spec.experts);
        const Hidden x = narrow<formats::bf16>(layer.numbers(tokens * 128, 1.0f));
        const auto rows = static_cast<std::int64_t>(tokens);
        const std::size_t slots = tokens * static_cast<std::size_t>(spec.top_k);
        Routed expected{std::vector<std::int32_t>(slots), std::vector<float>(slots)};
        route(routing, spec.experts, spec.top_k, logits.data(), rows, bias.empty() ? nullptr : bias.data(),
              expected.ids.data(), expected.weights.data());
        const auto run_from_logits = [&](Routed* chosen) {
          std::vector<float> out(x.values.size(), std::nanf(""));
          const Status status =
              calls->run(*plan, weights,
                         {.hidden = {x.codes.data(), DType::bf16, rows, 128}, .router_logits = logits.data()},
                         {.hidden = {out.data(), DType::f32, rows, 128},
                          .topk_ids = chosen == nullptr ? nullptr : chosen->ids.data(),
                          .topk_weights = chosen == nullptr ? nullptr : chosen->weights.data()});
          EXPECT_TRUE(status.ok()) << status.message();
          return out;
        };
        Routed chosen{std::vector<std::int32_t>(slots, -1), std::vector<float>(slots)};
        const std::vector<float> out = run_from_logits(&chosen);
        ASSERT_EQ(chosen.ids, expected.ids);
        ASSERT_EQ(chosen.weights, expected.weights);
        ASSERT_EQ(run(layer, options, weights, x, expected), out);
        ASSERT_EQ(run_from_logits(nullptr), out);
      }
    }
}

// Whichever kernel finds the experts of the multiply that is asked for.
TEST_F(GpuMoe, FromLogitsByEveryCandidate) {
  MoeSpec spec;
  spec.scheme = SchemeId::mxfp4;
  spec.experts = 16;
  spec.top_k = 4;
  spec.hidden = spec.intermediate = 128;
  Layer layer(spec);
  PlanOptions options{.max_tokens = 70, .debug_workspace = true};
  const ExpertWeights weights = layer.weights(options, kGpu);
  const auto any = MoePlan::create(spec, options, kGpu);
  ASSERT_TRUE(any.ok()) << any.status().message();
  for (const CudaCandidate& candidate : any->candidates(70))
    for (const std::size_t tokens : {1, 4, 8, 9, 64, 70}) {
      SCOPED_TRACE(testing::Message() << describe(candidate.tuning) << " by tile, " << tokens << " tokens");
      options.cuda_tuning = candidate.tuning;
      const auto plan = MoePlan::create(spec, options, kGpu);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      auto calls = HostCalls::create(*plan);
      ASSERT_TRUE(calls.ok()) << calls.status().message();
      const std::vector<float> logits = difficult_logits(tokens, spec.experts);
      const Hidden x = narrow<formats::bf16>(layer.numbers(tokens * 128, 1.0f));
      const auto rows = static_cast<std::int64_t>(tokens);
      Routed chosen{std::vector<std::int32_t>(tokens * 4), std::vector<float>(tokens * 4)};
      std::vector<float> out(x.values.size(), std::nanf(""));
      const Status status =
          calls->run(*plan, weights,
                     {.hidden = {x.codes.data(), DType::bf16, rows, 128}, .router_logits = logits.data()},
                     {.hidden = {out.data(), DType::f32, rows, 128},
                      .topk_ids = chosen.ids.data(),
                      .topk_weights = chosen.weights.data()});
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(run(layer, options, weights, x, chosen), out);
    }
}

// A captured call, replayed with other hidden states and routing in the same memory.
TEST_F(GpuMoe, GraphReplay) {
  MoeSpec spec;
  spec.scheme = SchemeId::int4_g128_afp8;
  spec.experts = 8;
  spec.top_k = 2;
  spec.hidden = spec.intermediate = 256;
  Layer layer(spec);
  constexpr std::int64_t tokens = 20, width = 256;
  const auto plan = MoePlan::create(spec, {.max_tokens = tokens}, kGpu);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const ExpertWeights weights = layer.weights({}, kGpu);
  DeviceVector<std::uint16_t> x(tokens * width);
  DeviceVector<float> out(tokens * width), slot_weights(std::vector<float>(tokens * 2, 0.5f));
  DeviceVector<std::int32_t> ids(route_by(Pattern::uniform, spec, tokens).ids);
  DeviceVector<std::byte> workspace(plan->workspace_bytes());
  const auto run = [&](cuda::Stream stream) {
    return plan->run(weights,
                     {.hidden = {x.data(), DType::bf16, tokens, width},
                      .topk_ids = ids.data(),
                      .topk_weights = slot_weights.data()},
                     {.hidden = {out.data(), DType::f32, tokens, width}},
                     {workspace.data(), workspace.size()}, stream);
  };
  const auto graph = cuda::Graph::record(run);
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  for (const Pattern pattern : {Pattern::single, Pattern::few, Pattern::duplicates}) {
    const Hidden hidden = narrow<formats::bf16>(layer.numbers(tokens * width, 1.0f));
    ASSERT_TRUE(cuda::copy(x.data(), hidden.codes.data(), tokens * width * 2).ok());
    ASSERT_TRUE(cuda::copy(ids.data(), route_by(pattern, spec, tokens).ids.data(), tokens * 2 * 4).ok());
    ASSERT_TRUE(cuda::fill(out.data(), 0xFF, tokens * width * 4).ok());
    ASSERT_TRUE(graph->launch().ok());
    const std::vector<float> replayed = out.host();
    ASSERT_TRUE(run(nullptr).ok());
    EXPECT_EQ(out.host(), replayed);
    EXPECT_TRUE(std::isfinite(std::accumulate(replayed.begin(), replayed.end(), 0.0f)));
  }
}

TEST_F(GpuMoe, BadCalls) {
  MoeSpec spec;
  spec.scheme = SchemeId::mxfp4;
  spec.experts = 4;
  spec.top_k = 2;
  spec.hidden = spec.intermediate = 128;
  const Layer layer(spec);
  const auto plan = MoePlan::create(spec, {.max_tokens = 4}, kGpu);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_NE(MoePlan::create(spec, {.precision = Precision::f32}, kGpu).status().message().find("16-bit"),
            std::string::npos);
  PlanOptions forced;
  forced.cuda_tuning = CudaTuning{CudaTuning::Body::warps, 7};
  EXPECT_NE(MoePlan::create(spec, forced, kGpu).status().message().find("warps, 8 tokens"),
            std::string::npos);
  EXPECT_NE(MoePlan::create(spec, {}, Device::cuda(99)).status().message().find("99"), std::string::npos);
  auto calls = HostCalls::create(*plan);
  ASSERT_TRUE(calls.ok());
  std::vector<float> x(5 * 128), y(5 * 128);
  const auto message = [&](const ExpertWeights& weights, std::int64_t tokens) {
    return calls
        ->run(*plan, weights, {.hidden = {x.data(), DType::f32, tokens, 128}},
              {.hidden = {y.data(), DType::f32, tokens, 128}})
        .message();
  };
  EXPECT_EQ(message(layer.weights({}, kGpu), 4), "");
  EXPECT_EQ(message(layer.weights({}, kGpu), 0), "");
  EXPECT_NE(message(layer.weights({}, kGpu), 5).find("5 tokens"), std::string::npos);
  EXPECT_NE(message(layer.weights({}), 4).find("panels"), std::string::npos);
  MoeSpec other = spec;
  other.scheme = SchemeId::nvfp4;
  EXPECT_NE(message(Layer(other).weights({}, kGpu), 4), "");
}

// Slots of ids that there is no expert for add nothing, and nothing of them is read.
TEST_F(GpuMoe, IdsOutOfRange) {
  for (const SchemeId id : {SchemeId::int4_g128, SchemeId::fp8_tensor_afp8})
    for (const auto& [with_static, tokens] : {std::pair{false, 6}, {true, 6}, {false, 200}, {true, 200}}) {
      MoeSpec spec;
      spec.scheme = id;
      spec.experts = 4;
      spec.top_k = 2;
      spec.hidden = spec.intermediate = 128;
      Layer layer(spec, 5, with_static && scheme(id).quantizes_activations());
      const Hidden x = narrow<formats::bf16>(layer.numbers(static_cast<std::size_t>(tokens) * 128, 1.0f));
      const PlanOptions options{.max_tokens = tokens};
      Routed bad = route_by(Pattern::uniform, spec, static_cast<std::size_t>(tokens)), none = bad;
      for (std::size_t slot = 0; slot < bad.ids.size(); slot += 2) {
        bad.ids[slot] = slot % 4 == 0 ? -1 : 1000000;
        none.ids[slot] = none.ids[slot + 1];
        none.weights[slot] = 0;
      }
      const ExpertWeights weights = layer.weights(options, kGpu);
      const std::vector<float> out = run(layer, options, weights, x, bad);
      const std::vector<float> expected = run(layer, options, weights, x, none);
      EXPECT_LE(relative_l2(out, {expected.begin(), expected.end()}), 1e-5) << scheme(id).name;
    }
}

TEST_F(GpuMoe, Activations) {
  for (const Activation::Kind kind : {Activation::Kind::geglu, Activation::Kind::geglu_tanh}) {
    MoeSpec spec;
    spec.experts = 4;
    spec.top_k = 2;
    spec.hidden = spec.intermediate = 128;
    spec.activation.kind = kind;
    spec.scheme = SchemeId::int4_g32;
    for (const std::size_t tokens : {9, 60})
      expect_close(Layer(spec), {.max_tokens = 60}, tokens, Pattern::uniform);
    // Where tokens are rows of multiplies, the ends of tiles are others.
    spec.scheme = SchemeId::fp8_block_afp8;
    spec.bias = true;
    for (const int tile : {128, 192})
      expect_close(Layer(spec),
                   {.max_tokens = 300, .cuda_tuning = CudaTuning{CudaTuning::Body::warpgroups, tile}}, 300,
                   Pattern::uniform);
  }
}

}  // namespace
}  // namespace gatefold
