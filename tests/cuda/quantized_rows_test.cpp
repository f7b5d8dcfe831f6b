// Layers on the GPU whose hidden states are quantized already.

#include <numeric>

#include "../moe_layer.h"
#include "format/code_rows.h"
#include "gatefold/cuda_quantize.h"
#include "gatefold/linear.h"
#include "gpu.h"
#include "moe/host_calls.h"

namespace gatefold {
namespace {

const Device kGpu = Device::cuda();

MoeSpec spec_with_shared(SchemeId id) {
  MoeSpec spec = small_spec(id);
  spec.shared = {.intermediate = 128, .scheme = id};
  return spec;
}

/// Hidden states in bf16, and the same as codes.
struct Hidden {
  std::int64_t tokens, width;
  std::vector<std::uint16_t> numbers;
  QuantizedActivation quantized;

  Hidden(Layer& layer, std::int64_t count)
      : tokens(count),
        width(layer.spec().hidden),
        numbers(codes_of<formats::bf16>(layer.numbers(static_cast<std::size_t>(count * width), 1.0f))) {
    auto codes = quantize_activation(layer.spec().scheme, as_numbers().hidden);
    EXPECT_TRUE(codes.ok()) << codes.status().message();
    if (codes) quantized = std::move(*codes);
  }
  MoeInputs as_numbers() const { return {.hidden = {numbers.data(), DType::bf16, tokens, width}}; }
  MoeInputs as_codes() const {
    const DType dtype = dtype_of_codes(scheme(quantized.scheme).activation.value);
    return {.hidden = {quantized.values.data(), dtype, tokens, width},
            .hidden_scales = quantized.scales.data(),
            .hidden_token_scales = quantized.token_scales.data()};
  }
};

class QuantizedRows : public GpuTest, public testing::WithParamInterface<SchemeId> {
 protected:
  /// f32 results, slots routed to `experts` in turn.
  static std::vector<float> run(const Layer& layer, const PlanOptions& options, MoeInputs in,
                                const std::vector<std::int32_t>& experts) {
    const std::int64_t tokens = in.hidden.rows, width = layer.spec().hidden;
    std::vector<std::int32_t> ids;
    std::vector<float> slot_weights;
    for (std::size_t slot = 0; slot < static_cast<std::size_t>(tokens * layer.spec().top_k); ++slot) {
      ids.push_back(experts[slot * 7 / 3 % experts.size()]);
      slot_weights.push_back(0.1f * static_cast<float>(1 + slot % 9));
    }
    in.topk_ids = ids.data();
    in.topk_weights = slot_weights.data();
    std::vector<float> out(static_cast<std::size_t>(tokens * width), std::nanf(""));
    const auto plan = MoePlan::create(layer.spec(), options, kGpu);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    auto calls = HostCalls::create(*plan);
    EXPECT_TRUE(calls.ok()) << calls.status().message();
    const Status status = calls->run(*plan, layer.weights(options, kGpu), in,
                                     {.hidden = {out.data(), DType::f32, tokens, width}});
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }
  static void expect_same(const Layer& layer, const PlanOptions& options, const Hidden& x) {
    const std::vector<std::int32_t> experts = {0, 1, 2, 3, 4, 5};
    const std::vector<float> expected = run(layer, options, x.as_numbers(), experts);
    EXPECT_TRUE(std::isfinite(std::accumulate(expected.begin(), expected.end(), 0.0f)));
    EXPECT_EQ(run(layer, options, x.as_codes(), experts), expected) << x.tokens << " tokens";
  }
};

TEST_P(QuantizedRows, TokenCounts) {
  Layer layer(spec_with_shared(GetParam()));
  for (const int tokens : {1, 5, 9, 33, 64, 300})
    expect_same(layer, {.max_tokens = 300, .debug_workspace = true}, Hidden(layer, tokens));
}

TEST_P(QuantizedRows, EveryCandidate) {
  for (const int hidden : {1280, 2176}) {  // as many columns as a thread reads at once, and more
    MoeSpec spec = small_spec(GetParam());
    spec.hidden = hidden;
    Layer layer(spec);
    const Hidden x(layer, 90);
    PlanOptions options{.max_tokens = 90, .debug_workspace = true};
    const auto plan = MoePlan::create(spec, options, kGpu);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    for (const CudaCandidate& candidate : plan->candidates(90)) {
      SCOPED_TRACE(describe(candidate.tuning));
      options.cuda_tuning = candidate.tuning;
      expect_same(layer, options, x);
    }
  }
}

TEST_P(QuantizedRows, RaggedShapes) {
  MoeSpec spec = ragged_spec(small_spec(GetParam()));
  spec.shared = {};
  Layer layer(spec);
  for (const int tokens : {3, 100})
    expect_same(layer, {.max_tokens = 100, .debug_workspace = true}, Hidden(layer, tokens));
}

// Scales of the call, not the weights' static ones; the intermediate's are still those.
TEST_P(QuantizedRows, BesideStaticScales) {
  const Operand& activation = scheme(GetParam()).activation;
  if (!activation.may_be_static()) return;
  MoeSpec spec = small_spec(GetParam());
  Layer layer(spec, 3, true);
  const std::vector<std::int32_t> experts = {0, 3};  // whose static scales are the same
  for (const int tokens : {4, 100}) {
    Hidden x(layer, tokens);
    const auto layout = cuda::activation_layout(GetParam(), tokens, spec.hidden);
    ASSERT_TRUE(layout.ok()) << layout.status().message();
    const DeviceVector<std::uint16_t> numbers(x.numbers);
    const DeviceVector<TensorScale> scale(
        std::vector<TensorScale>{*layer.reference().routed[0].gate.input_scale});
    const DeviceVector<std::byte> values(layout->value_bytes), scales(layout->scale_bytes),
        workspace(layout->workspace_bytes);
    const DeviceVector<float> token_scales(layout->token_scale_bytes / sizeof(float));
    const Status status = cuda::quantize_activations(
        GetParam(),
        {.x = {numbers.data(), DType::bf16, tokens, spec.hidden},
         .rows = tokens,
         .static_scales = scale.data()},
        {.values = values.data(), .scales = scales.data(), .token_scales = token_scales.data()},
        {workspace.data(), workspace.size()});
    ASSERT_TRUE(status.ok()) << status.message();
    const PlanOptions options{.max_tokens = tokens};
    const std::vector<float> expected = run(layer, options, x.as_numbers(), experts);
    EXPECT_NE(run(layer, options, x.as_codes(), experts), expected);  // scales of the rows themselves
    x.quantized.values = values.host();
    x.quantized.scales = scales.host();
    x.quantized.token_scales = token_scales.host();
    EXPECT_EQ(run(layer, options, x.as_codes(), experts), expected) << tokens << " tokens";
  }
}

std::vector<SchemeId> schemes_with_codes() {
  std::vector<SchemeId> all;
  for (std::size_t i = 0; i < all_schemes().size(); ++i)
    if (all_schemes()[i].quantizes_activations()) all.push_back(static_cast<SchemeId>(i));
  return all;
}
INSTANTIATE_TEST_SUITE_P(Table, QuantizedRows, testing::ValuesIn(schemes_with_codes()),
                         [](const auto& test) { return std::string(scheme(test.param).name); });

using QuantizedRowsCalls = GpuTest;

TEST_F(QuantizedRowsCalls, BadCalls) {
  MoeSpec spec = spec_with_shared(SchemeId::fp8_block_afp8);
  Layer layer(spec);
  const Hidden x(layer, 4);
  std::vector<float> y(4 * 256), logits(4 * 6);
  const auto message = [&](const Layer& of, const MoeInputs& in,
                           const PlanOptions& options = {.max_tokens = 4}) {
    const auto plan = MoePlan::create(of.spec(), options, kGpu);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    auto calls = HostCalls::create(*plan);
    return calls->run(*plan, of.weights(options, kGpu), in, {.hidden = {y.data(), DType::f32, 4, 256}})
        .message();
  };
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const auto routed = [&](MoeInputs in) {
    in.router_logits = logits.data();
    return in;
  };
  const MoeInputs good = routed(x.as_codes());
  EXPECT_EQ(message(layer, good), "");
  has(message(layer, x.as_codes()), "give router_logits");
  MoeInputs in = good;
  in.hidden.dtype = DType::i8;
  has(message(layer, in), "the activations of fp8_block_afp8 are F8_E4M3");
  in = good;
  in.hidden_scales = nullptr;
  has(message(layer, in), "expected F32, F16 or BF16");
  has(message(layer, good, {.max_tokens = 4, .weights_only = true}), "leaves activations in 16 bits");
  spec.shared.gated = true;
  has(message(Layer(spec), good), "gate");
  spec.shared = {.intermediate = 128, .scheme = SchemeId::fp8_channel_afp8};
  has(message(Layer(spec), good), "fp8_channel_afp8 does not take the activations of fp8_block_afp8");
  spec.scheme = SchemeId::nvfp4_anvfp4;
  spec.shared = {};
  Layer fp4(spec);
  const Hidden of_fp4(fp4, 4);
  in = routed(of_fp4.as_codes());
  in.hidden_token_scales = nullptr;
  has(message(fp4, in), "token_scales is a null pointer");
}

}  // namespace
}  // namespace gatefold
