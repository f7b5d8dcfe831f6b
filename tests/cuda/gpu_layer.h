#pragma once
// Calls of layers on the GPU, from the host.

#include <cstdint>
#include <vector>

#include "../moe_layer.h"
#include "moe/host_calls.h"

namespace gatefold {

struct Routed {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

/// To two of the first so many experts.
inline Routed route(std::size_t tokens, std::size_t experts) {
  Routed routed;
  for (std::size_t t = 0; t < tokens; ++t)
    for (std::size_t i = 0; i < 2; ++i) {
      routed.ids.push_back(static_cast<std::int32_t>((t * t + i) % experts));
      routed.weights.push_back(i == 0 ? 0.625f : 0.375f);
    }
  return routed;
}

/// A layer's results for all of `x`, codes of bf16. Without ids it routes, and `chosen` is how.
template <class Number>
std::vector<Number> run(const MoePlan& plan, const ExpertWeights& weights,
                        const std::vector<std::uint16_t>& x, const Routed& routed, DType type,
                        Routed* chosen = nullptr) {
  const MoeSpec& spec = plan.spec();
  const auto rows = static_cast<std::int64_t>(x.size()) / spec.hidden;
  std::vector<Number> out(x.size());
  auto calls = HostCalls::create(plan);
  EXPECT_TRUE(calls.ok()) << calls.status().message();
  MoeInputs in{.hidden = {x.data(), DType::bf16, rows, spec.hidden}};
  MoeOutputs to{.hidden = {out.data(), type, rows, spec.hidden}};
  if (!routed.ids.empty()) {
    in.topk_ids = routed.ids.data();
    in.topk_weights = routed.weights.data();
  }
  if (chosen != nullptr) {
    chosen->ids.resize(static_cast<std::size_t>(rows * spec.top_k));
    chosen->weights.resize(chosen->ids.size());
    to.topk_ids = chosen->ids.data();
    to.topk_weights = chosen->weights.data();
  }
  const Status status = calls->run(plan, weights, in, to);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

}  // namespace gatefold
