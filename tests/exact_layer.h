#pragma once
/// \file
/// Layers whose results are exact: every sum of every kernel is one of small multiples of a power of two, so
/// that a kernel has the bits of the reference or is wrong.
///
/// The activation is 0.5 * gate * (up + 1) (swiglu with alpha 0, beta 1). Weights are small integers under
/// scales of powers of two. Activations would have other scales: so the first number of each of their groups
/// is the format's largest, and the first column and some rows of gate and up are such that the same holds
/// for the intermediate, of which 2 peaks is the largest. (Multiplies of e4m3 lose what is some
/// 12 bits below their largest product: beside a peak's nothing is that small.)

#include <cstring>

#include "gatefold/codec.h"
#include "moe_layer.h"

namespace gatefold {

class ExactLayer {
 public:
  ExactLayer(SchemeId scheme, DType act_dtype, const PlanOptions& options) : options_(options) {
    spec_.scheme = scheme;
    spec_.act_dtype = act_dtype;
    spec_.experts = 5;
    spec_.top_k = 2;
    spec_.hidden = 384;
    spec_.intermediate = 256;
    spec_.activation = {.alpha = 0.0f, .beta = 1.0f};
    activation_ = effective_activation(scheme, spec_, options);
    for (int e = 0; e < spec_.experts; ++e)
      reference_.routed.push_back(
          {matrix(Projection::gate), matrix(Projection::up), matrix(Projection::down)});
  }

  const MoeSpec& spec() const { return spec_; }
  ExpertWeights weights(const PlanOptions& options, const Device& device = {}) const {
    return pack(spec_, reference_, options, device);
  }

  /// [tokens, H], exact in 16 bits: peaks, and two small numbers a token.
  std::vector<float> hidden(std::size_t tokens) {
    const auto width = static_cast<std::size_t>(spec_.hidden);
    std::vector<float> x(tokens * width);
    for (std::size_t t = 0; t < tokens; ++t) {
      for (int i = 0; i < 2; ++i)
        x[t * width + random_() % width] = random_() % 2 == 0 ? peak() / limit() : -peak() / limit();
      for (std::size_t k = 0; k < width; ++k)
        if (is_peak(static_cast<std::int64_t>(k))) x[t * width + k] = peak();
    }
    return x;
  }

  struct Slots {
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
  };
  Slots slots(std::size_t tokens) {
    Slots slots;
    for (std::size_t s = 0; s < tokens * 2; ++s) {
      slots.ids.push_back(static_cast<std::int32_t>(random_() % 5));
      slots.weights.push_back(random_() % 2 == 0 ? 0.5f : 2.0f);
    }
    return slots;
  }

  /// What every kernel must give.
  std::vector<float> expected(const std::vector<float>& x, const Slots& slots) const {
    const ReferenceResult result =
        reference_moe(spec_, options_, reference_,
                      {.hidden = {x.begin(), x.end()},
                       .logits = {},
                       .topk_ids = slots.ids,
                       .topk_weights = {slots.weights.begin(), slots.weights.end()}});
    std::vector<float> expected;
    double largest = 0;
    for (const double y : result.hidden) {
      expected.push_back(static_cast<float>(y));
      EXPECT_EQ(expected.back(), y) << "the reference is not exact in f32";
      largest = std::max(largest, std::abs(y));
    }
    EXPECT_GT(largest, 0);
    return expected;
  }

 private:
  float limit() const { return activation_.quantized() ? static_cast<float>(activation_.value.max()) : 6.0f; }
  /// limit() times a power of two, or what makes the scale of a token and those of its blocks exact.
  float peak() const {
    const bool two_level = activation_.tensor_scale.stored();
    return two_level ? limit() * static_cast<float>(activation_.scale.max()) / 512 : limit();
  }
  bool is_peak(std::int64_t k) const {
    return k % (activation_.group.k == 0 ? spec_.hidden : activation_.group.k) == 0;
  }

  QuantizedMatrix matrix(Projection projection) {
    const bool down = projection == Projection::down;
    const std::int64_t n = down ? spec_.hidden : spec_.intermediate,
                       k = down ? spec_.intermediate : spec_.hidden;
    const Operand& w = scheme(spec_.scheme).weight;
    const std::vector<float> nothing(static_cast<std::size_t>(n * k));
    Result<QuantizedMatrix> m = quantize(spec_.scheme, {nothing.data(), DType::f32, n, k});
    EXPECT_TRUE(m.ok()) << m.status().message();
    const QuantizedLayout layout = m->layout();
    const int zero = w.zero_point.stored() ? 8 : 0;
    std::fill(m->values.begin(), m->values.end(), std::byte{0});
    std::fill(m->zero_points.begin(), m->zero_points.end(), std::byte{0x88});
    m->tensor_scale = {};
    for (std::int64_t row = 0; row < n; ++row)
      for (std::int64_t col = 0; col < k; ++col)
        put(w.value, m->values.data() + row * layout.row_bytes, col,
            static_cast<float>(weight(projection, row, col) + zero));
    const std::int64_t bands = w.scale.stored() ? static_cast<std::int64_t>(m->scales.size()) /
                                                      (layout.scale_cols * w.scale.bits / 8)
                                                : 0;
    for (std::int64_t band = 0; band < bands; ++band)
      for (std::int64_t col = 0; col < layout.scale_cols; ++col) {
        // A peak of the intermediate is made by the first group alone, and is the largest number of its own:
        // small formats have no room for scales of 2.
        float scale = 1;
        if (down)
          scale = std::exp2(static_cast<float>((band + col) % 2));
        else if (col != 0 && (band + col) % 2 == 0)
          scale = limit() < 64 ? 0.5f : 2.0f;
        put(w.scale, m->scales.data(), band * layout.scale_cols + col, scale);
      }
    return std::move(*m);
  }

  int weight(Projection projection, std::int64_t row, std::int64_t col) {
    const int small = static_cast<int>(random_() % 5) - 2;
    if (projection == Projection::down) return is_peak(col) ? small / 2 : small;
    if (is_peak(row)) return projection == Projection::gate && col == 0 ? 4 : 0;
    return is_peak(col) ? 0 : small;
  }

  static void put(Format format, std::byte* row, std::int64_t index, float value) {
    const std::uint32_t code = with_format(format, [&]<Format F>() { return encode<F>(value); });
    if (format.bits == 4)
      row[index / 2] |= static_cast<std::byte>((code & 15) << (index % 2 * 4));
    else
      std::memcpy(row + index * (format.bits / 8), &code, static_cast<std::size_t>(format.bits) / 8);
  }

  MoeSpec spec_;
  PlanOptions options_;
  Operand activation_;
  std::mt19937 random_{11};
  ReferenceWeights reference_;
};

}  // namespace gatefold
