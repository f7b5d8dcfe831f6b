#pragma once
/// \file
/// Layers and calls of which everything is drawn: for combinations that no other test has.

#include <algorithm>
#include <functional>
#include <numeric>

#include "format/matrix.h"
#include "gatefold/codec.h"
#include "moe/host_calls.h"
#include "moe/synthetic.h"
#include "moe_layer.h"

namespace gatefold {

class RandomLayer {
 public:
  using ErrorOfSums = std::function<double(const MoeSpec&, const PlanOptions&)>;

  RandomLayer(unsigned seed, const Device& device) : device_(device), random_(seed) {
    draw_scheme();
    draw_sizes();
    draw_options();
    draw_weights(seed);
    draw_call();
  }

  /// `of_sums`: what sums of the kernels may be off by beside those of f32.
  void expect_close(const ErrorOfSums& of_sums) {
    SCOPED_TRACE(describe());
    auto plan = MoePlan::create(spec_, options_, device_);
    if (!plan && options_.batch_invariant) {  // not of such weights
      options_.batch_invariant = false;
      plan = MoePlan::create(spec_, options_, device_);
    }
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    if (const auto candidates = plan->candidates(static_cast<int>(tokens_));
        chance(0.7) && !candidates.empty()) {
      options_.cuda_tuning = candidates[below(static_cast<int>(candidates.size()))].tuning;
      plan = MoePlan::create(spec_, options_, device_);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
    }
    SCOPED_TRACE(options_.cuda_tuning ? gatefold::describe(*options_.cuda_tuning) : "its own choice");
    const ExpertWeights weights = pack(spec_, packed_, options_, device_);
    auto calls = HostCalls::create(*plan);
    ASSERT_TRUE(calls.ok()) << calls.status().message();
    const std::vector<float> out = run(*calls, *plan, weights);
    double allowed = allowed_of(spec_, of_sums);
    if (MoeSpec shared = spec_; spec_.shared.intermediate != 0) {
      shared.scheme = spec_.shared.scheme;
      allowed = std::max(allowed, allowed_of(shared, of_sums));
    }
    double off = std::numeric_limits<double>::infinity();
    for (const bool narrow : {false, true})
      for (const bool narrow_shared : {false, true})
        if (!(off <= allowed)) off = std::min(off, relative_l2(out, expected(narrow, narrow_shared)));
    EXPECT_LE(off, allowed);
    EXPECT_EQ(run(*calls, *plan, weights), out) << "another run, other bits";
  }

 private:
  int below(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }
  int within(int least, int most) { return least + below(most - least + 1); }
  bool chance(double p) { return static_cast<double>(random_()) < p * 4294967296.0; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }
  /// Up to so many, small ones as often as large ones.
  int logarithmic(int most) {
    return static_cast<int>(
        std::exp2(std::log2(most + 0.999) * static_cast<double>(random_()) / 4294967296.0));
  }
  const Scheme& row() const { return scheme(spec_.scheme); }

  void draw_scheme() {
    spec_.scheme = static_cast<SchemeId>(below(static_cast<int>(all_schemes().size())));
    spec_.act_dtype = one_of({DType::bf16, DType::bf16, DType::f16});
    static_scales_ = row().activation.may_be_static() && chance(0.5);
    const bool has_groups = row().activation.quantized() && row().activation.group.k != 0;
    spec_.ordered_inputs = !has_groups && chance(0.2);  // groups would be others
    if (chance(0.2) && (static_scales_ || !row().batch_dependent())) spec_.ep_size = one_of({2, 8});
  }

  /// A width that weights of the scheme may have: of full tiles, or not.
  int width(SchemeId id, int most) {
    const Granularity group = scheme(id).weight.group;
    const int multiple = group.n == 1 && group.k != 0 ? group.k : 2;
    const int of_tiles = std::lcm(multiple, 128);
    const int step = chance(0.5) && of_tiles <= most ? of_tiles : multiple;
    return step * within(std::max(1, 16 / step), std::max(1, most / step));
  }
  void draw_sizes() {
    spec_.hidden = width(spec_.scheme, 1300);
    spec_.intermediate = width(spec_.scheme, 800);
    const double expert = 3.0 * spec_.hidden * spec_.intermediate;
    spec_.experts = logarithmic(static_cast<int>(std::clamp(6e6 / expert, 2.0, 140.0)));
    spec_.top_k = within(1, std::min(10, spec_.experts * spec_.ep_size));
    tokens_ = logarithmic(static_cast<int>(std::clamp(1.5e8 / expert / spec_.top_k, 2.0, 1500.0)));
    spec_.bias = chance(0.3);
    spec_.activation = {.kind = one_of({Activation::Kind::swiglu, Activation::Kind::swiglu,
                                        Activation::Kind::geglu, Activation::Kind::geglu_tanh}),
                        .alpha = one_of({1.0f, 1.702f}),
                        .beta = one_of({0.0f, 1.0f}),
                        .limit = one_of({std::numeric_limits<float>::infinity(), 7.0f, 1.0f})};
    if (!chance(0.4)) return;
    const bool alike = chance(0.5);
    const SchemeId id =
        alike ? spec_.scheme : one_of({SchemeId::bf16, SchemeId::int4_g32, SchemeId::fp8_channel_afp8});
    if (id == spec_.scheme || spec_.hidden % 32 == 0)
      spec_.shared = {
          .intermediate = alike ? spec_.intermediate : width(id, 300), .gated = chance(0.5), .scheme = id};
  }

  void draw_options() {
    options_.max_tokens = static_cast<int>(tokens_) + (chance(0.5) ? below(600) : 0);
    options_.threads = within(1, 4);
    options_.weights_only = row().quantizes_activations() && chance(0.2);
    options_.batch_invariant = chance(0.2);
    options_.fast_accumulation = chance(0.2);
    options_.debug_workspace = chance(0.7);
    if (device_.kind == Device::Kind::cpu && chance(0.2)) options_.precision = Precision::f32;
  }

  void draw_weights(unsigned seed) {
    packed_ = Layer(spec_, seed, static_scales_).reference();
    const Operand& w = row().weight;
    if (w.group.k != 0 && w.scale == formats::bf16 && chance(0.3))  // as other libraries store them
      for (ReferenceFfn& ffn : packed_.routed)
        for (QuantizedMatrix* matrix : {&ffn.gate, &ffn.up, &ffn.down}) convert_scales(*matrix, formats::f32);
    expected_ = packed_;
    if (!spec_.ordered_inputs) return;
    packed_.vectors.input_order = random_orders(spec_);
    expected_ = with_orders(std::move(expected_), packed_.vectors.input_order);
  }

  void draw_call() {
    x_ = Layer(small_spec(SchemeId::bf16), static_cast<unsigned>(random_()))
             .numbers(tokens_ * static_cast<std::size_t>(spec_.hidden), 1.0f);
    in_ = one_of({spec_.act_dtype, spec_.act_dtype, DType::f32});
    out_ = one_of({DType::f32, DType::f32, DType::bf16, DType::f16});
    codes_.resize(x_.size());
    for (std::size_t i = 0; i < x_.size() && in_ != DType::f32; ++i) {
      codes_[i] = encode(x_[i], in_);
      x_[i] = decode(codes_[i], in_);
    }
    from_ids_ = spec_.ep_size > 1 || chance(0.6);
    const int some = chance(0.3) ? within(1, std::min(3, spec_.experts)) : spec_.experts;  // that are chosen
    for (std::size_t slot = 0; slot < tokens_ * static_cast<std::size_t>(spec_.top_k); ++slot) {
      ids_.push_back(spec_.ep_size > 1 ? within(-spec_.experts, 2 * spec_.experts) : below(some));
      shares_.push_back(0.1f * static_cast<float>(within(1, 9)));
    }
  }

  bool is_here(int id) const { return id >= 0 && id < spec_.experts; }
  static std::uint16_t encode(float x, DType dtype) {
    return static_cast<std::uint16_t>(dtype == DType::bf16 ? gatefold::encode<formats::bf16>(x)
                                                           : gatefold::encode<formats::f16>(x));
  }
  static float decode(std::uint16_t code, DType dtype) {
    return dtype == DType::bf16 ? gatefold::decode<formats::bf16>(code)
                                : gatefold::decode<formats::f16>(code);
  }

  /// Sees what was chosen, if that is not given.
  std::vector<float> run(HostCalls& calls, const MoePlan& plan, const ExpertWeights& weights) {
    const auto rows = static_cast<std::int64_t>(tokens_);
    std::vector<float> out(x_.size(), std::nanf(""));
    std::vector<std::uint16_t> narrow(x_.size(), 0xFFFF);
    MoeInputs in{.hidden = {in_ == DType::f32 ? static_cast<const void*>(x_.data()) : codes_.data(), in_,
                            rows, spec_.hidden}};
    MoeOutputs to{.hidden = {out_ == DType::f32 ? static_cast<void*>(out.data()) : narrow.data(), out_, rows,
                             spec_.hidden}};
    if (from_ids_) {
      in.topk_ids = ids_.data();
      in.topk_weights = shares_.data();
    } else {
      to.topk_ids = ids_.data();
      to.topk_weights = shares_.data();
    }
    const Status status = calls.run(plan, weights, in, to);
    EXPECT_TRUE(status.ok()) << status.message();
    for (std::size_t i = 0; i < out.size() && out_ != DType::f32; ++i) out[i] = decode(narrow[i], out_);
    return out;
  }

  /// `narrow`: as warpgroups do, which leave bf16 that become codes of 8 bits.
  std::vector<double> expected(bool narrow, bool narrow_shared) const {
    ReferenceInputs inputs{.hidden = {x_.begin(), x_.end()},
                           .topk_ids = ids_,
                           .topk_weights = {shares_.begin(), shares_.end()},
                           .narrow_intermediate = narrow,
                           .narrow_shared = narrow_shared};
    for (std::size_t slot = 0; slot < ids_.size(); ++slot)
      if (!is_here(ids_[slot])) {
        inputs.topk_ids[slot] = 0;
        inputs.topk_weights[slot] = 0;
      }
    return reference_moe(spec_, options_, expected_, inputs).hidden;
  }

  /// Slots and their sum are rounded to the results' type.
  double allowed_of(const MoeSpec& spec, const ErrorOfSums& of_sums) const {
    const double step = step_of(effective_activation(spec.scheme, spec, options_)),
                 u = of_sums(spec, options_);
    const auto there = std::count_if(ids_.begin(), ids_.end(), [&](int id) { return is_here(id); });
    const double a_flip = one_flip(spec, options_, std::max<std::int64_t>(there, 1));
    const double of_results = out_ == DType::f32 ? 0 : out_ == DType::bf16 ? 0x1p-8 : 0x1p-11;
    return 1.25 * (tolerance(spec, options_) + a_flip + 2 * (u + std::sqrt(u * step)) + of_results);
  }

  std::string describe() const {
    const auto format = [](DType dtype) { return std::string(name(dtype)); };
    std::string text = std::string(row().name) + ", hidden " + std::to_string(spec_.hidden) +
                       ", intermediate " + std::to_string(spec_.intermediate) + ", " +
                       std::to_string(spec_.top_k) + " of " + std::to_string(spec_.experts) + " experts, " +
                       std::to_string(tokens_) + " of " + std::to_string(options_.max_tokens) + " tokens, " +
                       format(in_) + " by " + format(spec_.act_dtype) + " to " + format(out_);
    if (spec_.shared.intermediate != 0)
      text += ", shared " + std::string(scheme(spec_.shared.scheme).name) + " of " +
              std::to_string(spec_.shared.intermediate) + (spec_.shared.gated ? ", gated" : "");
    const std::pair<bool, const char*> more[] = {{static_scales_, "static"},
                                                 {spec_.ordered_inputs, "ordered"},
                                                 {spec_.ep_size > 1, "a part"},
                                                 {spec_.bias, "biases"},
                                                 {from_ids_, "ids"},
                                                 {options_.weights_only, "weights only"},
                                                 {options_.batch_invariant, "batch-invariant"},
                                                 {options_.fast_accumulation, "fast accumulation"}};
    for (const auto& [is, what] : more)
      if (is) text += std::string(", ") + what;
    return text;
  }

  Device device_;
  std::mt19937 random_;
  MoeSpec spec_;
  PlanOptions options_;
  bool static_scales_ = false, from_ids_ = false;
  std::size_t tokens_ = 0;
  ReferenceWeights packed_, expected_;  ///< as kernels and as the oracle take them
  std::vector<float> x_, shares_;
  std::vector<std::uint16_t> codes_;
  std::vector<std::int32_t> ids_;
  DType in_ = DType::f32, out_ = DType::f32;
};

}  // namespace gatefold
