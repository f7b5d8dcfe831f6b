#pragma once
// Whole MoE layers on the GPU, and how far from the scalar reference they may be.

#include "gatefold/codec.h"
#include "gpu.h"
#include "gpu_layer.h"

namespace gatefold {

inline const Device kGpu = Device::cuda();

enum class Pattern { uniform, single, few, duplicates };

inline Routed route_by(Pattern pattern, const MoeSpec& spec, std::size_t tokens) {
  std::mt19937 random(7);
  Routed routed;
  for (std::size_t t = 0; t < tokens; ++t)
    for (int k = 0; k < spec.top_k; ++k) {
      const auto free = static_cast<std::int32_t>((random() % 1000 * spec.top_k + k) % spec.experts);
      const std::int32_t id = pattern == Pattern::uniform  ? free
                              : pattern == Pattern::single ? (k == 0 ? 4 : 1)
                              : pattern == Pattern::few    ? (free % 2 == 0 ? 0 : spec.experts - 1)
                                                           : free / 2 * 2;  // one expert may come twice
      routed.ids.push_back(id);
      routed.weights.push_back(0.1f * static_cast<float>(1 + random() % 9));
    }
  return routed;
}

/// hidden states in a 16-bit type, and what they are in f32.
struct Hidden {
  std::vector<std::uint16_t> codes;
  std::vector<float> values;
};
template <Format F>
Hidden narrow(const std::vector<float>& x) {
  Hidden hidden{codes_of<F>(x), {}};
  for (const std::uint16_t code : hidden.codes) hidden.values.push_back(decode<F>(code));
  return hidden;
}

/// What error_of_sums() adds: intermediate values round accordingly, as in tolerance().
inline double of_inexact_sums(const MoeSpec& spec, const PlanOptions& options) {
  const Operand activation = effective_activation(spec.scheme, spec, options);
  const double u = error_of_sums(scheme(spec.scheme), activation, std::max(spec.hidden, spec.intermediate));
  return 2 * (u + std::sqrt(u * step_of(activation)));
}

class GpuMoe : public GpuTest {
 protected:
  /// f32 results of 16-bit hidden states.
  static std::vector<float> run(const Layer& layer, const PlanOptions& options, const ExpertWeights& weights,
                                const Hidden& x, const Routed& routed) {
    const MoeSpec& spec = layer.spec();
    const auto plan = MoePlan::create(spec, options, kGpu);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    auto calls = HostCalls::create(*plan);
    EXPECT_TRUE(calls.ok()) << calls.status().message();
    const auto tokens = static_cast<std::int64_t>(x.values.size()) / spec.hidden;
    std::vector<float> out(x.values.size(), std::nanf(""));
    const Status status = calls->run(*plan, weights,
                                     {.hidden = {x.codes.data(), spec.act_dtype, tokens, spec.hidden},
                                      .topk_ids = routed.ids.data(),
                                      .topk_weights = routed.weights.data()},
                                     {.hidden = {out.data(), DType::f32, tokens, spec.hidden}});
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  static void expect_close(const Layer& layer, const PlanOptions& options, std::size_t tokens,
                           Pattern pattern) {
    expect_close(layer, layer.weights(options, kGpu), options, tokens, pattern);
  }
  static void expect_close(const Layer& layer, const ExpertWeights& weights, const PlanOptions& options,
                           std::size_t tokens, Pattern pattern) {
    const MoeSpec& spec = layer.spec();
    Layer source(layer);
    const std::vector<float> numbers = source.numbers(tokens * static_cast<std::size_t>(spec.hidden), 1.0f);
    const Hidden x =
        spec.act_dtype == DType::bf16 ? narrow<formats::bf16>(numbers) : narrow<formats::f16>(numbers);
    const Routed routed = route_by(pattern, spec, tokens);
    const std::vector<float> out = run(layer, options, weights, x, routed);
    ReferenceInputs inputs{.hidden = {x.values.begin(), x.values.end()},
                           .logits = {},
                           .topk_ids = routed.ids,
                           .topk_weights = {routed.weights.begin(), routed.weights.end()}};
    const auto error = [&] {
      return relative_l2(out, reference_moe(spec, options, layer.reference(), inputs).hidden);
    };
    const double allowed = tolerance(spec, options) +
                           one_flip(spec, options, static_cast<std::int64_t>(tokens) * spec.top_k) +
                           of_inexact_sums(spec, options);
    double off = error();
    // Warpgroups leave bf16 that become codes of 8 bits by scales of rows.
    const Operand activation = effective_activation(spec.scheme, spec, options);
    inputs.narrow_intermediate = inputs.narrow_shared = activation.value.bits == 8 && activation.group.k == 0;
    if (off > allowed && inputs.narrow_intermediate) off = error();
    EXPECT_LE(off, allowed) << tokens << " tokens, pattern " << static_cast<int>(pattern);
    EXPECT_EQ(run(layer, options, weights, x, routed), out) << "another run, other bits";
  }
  /// By every candidate of the largest of these numbers of tokens.
  static void expect_close_by_all(const Layer& layer, const std::vector<int>& counts) {
    const ExpertWeights weights = layer.weights({}, kGpu);
    PlanOptions options{.max_tokens = counts.back(), .debug_workspace = true};
    const auto plan = MoePlan::create(layer.spec(), options, kGpu);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const auto candidates = plan->candidates(options.max_tokens);
    ASSERT_GE(candidates.size(), 2u);
    for (const CudaCandidate& candidate : candidates) {
      SCOPED_TRACE(describe(candidate.tuning));
      options.cuda_tuning = candidate.tuning;
      for (const int tokens : counts)
        expect_close(layer, weights, options, static_cast<std::size_t>(tokens), Pattern::uniform);
    }
  }
};

}  // namespace gatefold
