#pragma once
// A layer, and parts of its experts (MoeSpec::ep_size), whose results add up to the layer's.

#include "moe_layer.h"

namespace gatefold {

constexpr int kParts = 4, kExpertsOfPart = 2, kTopKOfAll = 3;

inline MoeSpec spec_of_all(MoeSpec spec) {
  spec.experts = kParts * kExpertsOfPart;
  spec.top_k = kTopKOfAll;
  return spec;
}
inline MoeSpec spec_of_part(MoeSpec spec) {
  spec.experts = kExpertsOfPart;
  spec.ep_size = kParts;
  return spec;
}

struct ChosenExperts {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;

  /// Different ones for each token; none of some tokens' are in a part.
  explicit ChosenExperts(std::size_t tokens) {
    for (std::size_t t = 0; t < tokens; ++t)
      for (std::size_t i = 0; i < kTopKOfAll; ++i) {
        ids.push_back(static_cast<std::int32_t>((t * t + 2 * i) % (kParts * kExpertsOfPart)));
        weights.push_back(0.5f / static_cast<float>(i + 1));
      }
  }
  /// As part i has them: those of others are negative or too large.
  ChosenExperts of_part(int part) const {
    ChosenExperts chosen = *this;
    for (std::int32_t& id : chosen.ids) id -= part * kExpertsOfPart;
    return chosen;
  }
};

inline ReferenceWeights weights_of_part(ReferenceWeights all, int part) {
  const auto own = [&](auto& values, std::size_t of_expert) {
    if (values.empty()) return;
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(part * kExpertsOfPart * of_expert);
    values = {first, first + static_cast<std::ptrdiff_t>(kExpertsOfPart * of_expert)};
  };
  const auto of_each = [](const auto& values) { return values.size() / (kParts * kExpertsOfPart); };
  LayerVectors& v = all.vectors;
  own(all.routed, 1);
  v.router.clear();
  v.router_bias.clear();
  for (std::vector<float>* bias : {&v.gate_bias, &v.up_bias, &v.down_bias}) own(*bias, of_each(*bias));
  own(v.input_order, of_each(v.input_order));
  return all;
}

}  // namespace gatefold
