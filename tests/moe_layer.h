#pragma once
/// \file
/// Random MoE layers, and how far from the reference a kernel's results may be.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <tuple>

#include "moe/reference.h"

namespace gatefold {

/// Packed for the kernel that runs with these options.
inline ExpertWeights pack(const MoeSpec& spec, const ReferenceWeights& weights, const PlanOptions& options,
                          const Device& device) {
  const auto from = [](const ReferenceFfn& ffn, Projection projection) -> Result<QuantizedMatrix> {
    return projection == Projection::gate ? ffn.gate : projection == Projection::up ? ffn.up : ffn.down;
  };
  auto packed = ExpertWeights::pack(
      spec, device, weights.vectors,
      [&](int expert, Projection projection) { return from(weights.routed[expert], projection); },
      [&](int, Projection projection) { return from(weights.shared, projection); }, options);
  EXPECT_TRUE(packed.ok()) << packed.status().message();
  return std::move(*packed);
}

/// A random layer: heavy-tailed weights with channels of different size.
class Layer {
 public:
  explicit Layer(MoeSpec spec, unsigned seed = 1, bool static_scales = false) : spec_(spec), random_(seed) {
    LayerVectors vectors;
    vectors.router = numbers(static_cast<std::size_t>(spec.experts) * spec.hidden, 0.1f);
    if (spec.routing.correction_bias) vectors.correction_bias = numbers(spec.experts, 0.2f);
    if (spec.shared.gated) vectors.shared_gate = numbers(spec.hidden, 0.1f);
    if (spec.bias) {
      vectors.router_bias = numbers(spec.experts, 0.2f);
      vectors.gate_bias = numbers(static_cast<std::size_t>(spec.experts) * spec.intermediate, 0.1f);
      vectors.up_bias = numbers(static_cast<std::size_t>(spec.experts) * spec.intermediate, 0.1f);
      vectors.down_bias = numbers(static_cast<std::size_t>(spec.experts) * spec.hidden, 0.1f);
    }
    const auto matrix = [&](SchemeId scheme, std::int64_t n, std::int64_t k, int expert) {
      const std::vector<float> w =
          numbers(static_cast<std::size_t>(n * k), 1.0f / std::sqrt(static_cast<float>(k)));
      Result<QuantizedMatrix> quantized = quantize(scheme, {w.data(), DType::f32, n, k});
      EXPECT_TRUE(quantized.ok()) << quantized.status().message();
      if (static_scales) {
        const bool two_level = gatefold::scheme(scheme).activation.tensor_scale.stored();
        const float real = (two_level ? 4.0f / 2688 : 4.0f / 448) * static_cast<float>(1 + expert % 3);
        quantized->input_scale = two_level ? TensorScale{1 / real, true} : TensorScale{real, false};
      }
      return std::move(*quantized);
    };
    const auto ffn = [&](SchemeId scheme, int width, int expert) {
      ReferenceFfn ffn;
      ffn.gate = matrix(scheme, width, spec.hidden, expert);
      ffn.up = matrix(scheme, width, spec.hidden, expert);
      ffn.down = matrix(scheme, spec.hidden, width, expert);
      return ffn;
    };
    reference_.vectors = vectors;
    for (int e = 0; e < spec.experts; ++e)
      reference_.routed.push_back(ffn(spec.scheme, spec.intermediate, e));
    if (spec.shared.intermediate != 0)
      reference_.shared = ffn(spec.shared.scheme, spec.shared.intermediate, 0);
  }

  std::vector<float> numbers(std::size_t count, float size) {
    std::normal_distribution<float> normal(0, size);
    std::vector<float> out(count);
    for (float& x : out) x = normal(random_) * std::exp2(normal(random_) / size / 2);
    return out;
  }

  ExpertWeights weights(const PlanOptions& options, const Device& device = {}) const {
    return pack(spec_, reference_, options, device);
  }
  const ReferenceWeights& reference() const { return reference_; }
  const MoeSpec& spec() const { return spec_; }

 private:
  MoeSpec spec_;
  std::mt19937 random_;
  ReferenceWeights reference_;
};

inline MoeSpec small_spec(SchemeId scheme) {
  MoeSpec spec;
  spec.scheme = scheme;
  spec.experts = 6;
  spec.top_k = 2;
  spec.hidden = 256;
  spec.intermediate = 128;
  return spec;
}

/// The same with sizes that fill nothing, biases, a shared expert and the activation of gpt-oss.
inline MoeSpec ragged_spec(MoeSpec spec) {
  const Granularity group = scheme(spec.scheme).weight.group;
  const int multiple = group.n == 1 && group.k != 0 ? group.k : 2;
  spec.hidden = (170 + multiple - 1) / multiple * multiple;
  spec.intermediate = (84 + multiple - 1) / multiple * multiple;
  spec.shared = {.intermediate = 20, .gated = true, .scheme = SchemeId::bf16};
  spec.bias = true;
  spec.activation = {.kind = Activation::Kind::swiglu, .alpha = 1.702f, .beta = 1.0f, .limit = 7.0f};
  return spec;
}

/// Parameters of tests of every scheme with both types of activations, and their names.
using SchemeAndType = std::tuple<std::size_t, DType>;
inline auto every_scheme_and_type() {
  return testing::Combine(testing::Range<std::size_t>(0, all_schemes().size()),
                          testing::Values(DType::bf16, DType::f16));
}
inline std::string scheme_and_type(const testing::TestParamInfo<SchemeAndType>& info) {
  const auto& [id, type] = info.param;
  return std::string(all_schemes()[id].name) + (type == DType::bf16 ? "_x_bf16" : "_x_f16");
}

/// Weights whose experts take inputs in these orders (LayerVectors::input_order), as the oracle takes them:
/// it puts columns back instead.
inline ReferenceWeights with_orders(ReferenceWeights weights, const std::vector<std::int32_t>& orders) {
  const auto hidden = static_cast<std::ptrdiff_t>(orders.size() / weights.routed.size());
  auto first = orders.begin();
  for (ReferenceFfn& ffn : weights.routed) {
    ffn.gate.input_order = ffn.up.input_order = {first, first + hidden};
    first += hidden;
  }
  return weights;
}

inline double relative_l2(const std::vector<float>& a, const std::vector<double>& b) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

/// From one value of an activation format to the next, beside the values.
inline double step_of(const Operand& activation) {
  return activation.value.is_integer() ? 1.0 / 32 : std::exp2(-activation.value.mantissa_bits);
}

/// tolerance() holds for many intermediate values. Of a few, those of so many slots, one that rounds to the
/// other side may be far above their mean: 4 times their root mean square.
inline double one_flip(const MoeSpec& spec, const PlanOptions& options, std::int64_t slots) {
  const double step = step_of(effective_activation(spec.scheme, spec, options));
  return 4 * step / 2 / std::sqrt(static_cast<double>(slots) * spec.intermediate);
}

/// Error that f32 sums and one more rounding of the intermediate may make. u: relative error of a sum of k
/// terms of random sign. A value within u of a rounding boundary of the activation format may fall on the
/// other side, which happens to a share u / step of the values and moves each by step. Where activations are
/// multiplied as fixed point (panel.h), numbers smaller than 2^-7 of a chunk's largest are off by up to 2^-16
/// of it: 2^-17 of the norm is what that comes to if a tenth of them are, and the largest is 8 times their
/// rms.
inline double tolerance(const MoeSpec& spec, const PlanOptions& options) {
  double u = 4 * std::sqrt(static_cast<double>(std::max(spec.hidden, spec.intermediate))) * std::exp2(-24);
  const Operand activation = effective_activation(spec.scheme, spec, options);
  if (!activation.value.stored()) return 2 * u;
  const Format weight = scheme(spec.scheme).weight.value;
  if ((weight.is_integer() || weight.bits == 4) && activation.value.bits == 16) u += std::exp2(-17);
  return 2 * (u + std::sqrt(u * step_of(activation)));
}

}  // namespace gatefold
