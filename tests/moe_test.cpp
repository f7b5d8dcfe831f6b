#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "cpu/gemm.h"
#include "format/isa.h"
#include "gatefold/codec.h"
#include "gatefold/moe.h"
#include "moe/reference.h"
#include "moe_layer.h"

namespace gatefold {
namespace {

struct Output {
  std::vector<float> hidden;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

Output run(const Layer& layer, const PlanOptions& options, const std::vector<float>& x,
           const std::vector<float>& logits = {}, const std::vector<std::int32_t>& ids = {},
           const std::vector<float>& weights = {}) {
  const MoeSpec& spec = layer.spec();
  const auto plan = MoePlan::create(spec, options);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / spec.hidden;
  Output out{std::vector<float>(x.size(), std::nanf("")), std::vector<std::int32_t>(tokens * spec.top_k),
             std::vector<float>(tokens * spec.top_k)};
  const Status status = plan->run(layer.weights(options),
                                  {.hidden = {x.data(), DType::f32, tokens, spec.hidden},
                                   .router_logits = logits.empty() ? nullptr : logits.data(),
                                   .topk_ids = ids.empty() ? nullptr : ids.data(),
                                   .topk_weights = weights.empty() ? nullptr : weights.data()},
                                  {.hidden = {out.hidden.data(), DType::f32, tokens, spec.hidden},
                                   .topk_ids = out.ids.data(),
                                   .topk_weights = out.weights.data()},
                                  workspace);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

/// The kernels that can run this here.
std::vector<std::string> kernel_names(const MoeSpec& spec, const PlanOptions& options) {
  std::vector<std::string> names;
  for (const KernelInfo& kernel : cpu_kernels())
    if (kernel.scheme == spec.scheme && kernel.refuses(spec, options, {}).empty())
      names.push_back(kernel.name);
  return names;
}

/// Every kernel that runs here against the reference.
void expect_close(const Layer& layer, PlanOptions options, const std::vector<float>& x) {
  const ReferenceResult reference =
      reference_moe(layer.spec(), options, layer.reference(), {.hidden = {x.begin(), x.end()}});
  for (const std::string& kernel : kernel_names(layer.spec(), options)) {
    options.kernel = kernel;
    const Output out = run(layer, options, x);
    EXPECT_EQ(out.ids, reference.topk_ids) << kernel;
    EXPECT_LE(relative_l2(out.weights, reference.topk_weights), 1e-5) << kernel;
    EXPECT_LE(relative_l2(out.hidden, reference.hidden), tolerance(layer.spec(), options)) << kernel;
  }
}

class EveryScheme : public testing::TestWithParam<std::size_t> {
 protected:
  SchemeId id() const { return static_cast<SchemeId>(GetParam()); }
};

TEST_P(EveryScheme, AgreesWithTheReference) {
  Layer layer(small_spec(id()));
  for (const Precision precision : {Precision::native, Precision::f32})
    for (const bool weights_only : {false, true}) {
      if (weights_only && !scheme(id()).quantizes_activations()) continue;
      const PlanOptions options{.max_tokens = 40,
                                .threads = 2,
                                .precision = precision,
                                .weights_only = weights_only,
                                .debug_workspace = true};
      for (const std::size_t tokens : {1, 3, 33})
        expect_close(layer, options, layer.numbers(tokens * 256, 1.0f));
    }
}

TEST_P(EveryScheme, RaggedShapes) {
  const MoeSpec spec = ragged_spec(small_spec(id()));
  Layer layer(spec);
  const PlanOptions options{.max_tokens = 17, .threads = 3, .debug_workspace = true};
  expect_close(layer, options, layer.numbers(17 * static_cast<std::size_t>(spec.hidden), 1.0f));
}

TEST_P(EveryScheme, SameBitsForEveryThreadCountAndBatch) {
  Layer layer(small_spec(id()));
  const std::vector<float> x = layer.numbers(24 * 256, 1.0f);
  const Output whole = run(layer, {.max_tokens = 24, .threads = 1}, x);
  for (const int threads : {2, 5})
    EXPECT_EQ(run(layer, {.max_tokens = 24, .threads = threads}, x).hidden, whole.hidden) << threads;
  const CpuTuning other{.prefetch = 1024, .split = 8, .serial_tokens = 0, .queues = 3};
  EXPECT_EQ(run(layer, {.max_tokens = 24, .threads = 2, .tuning = other}, x).hidden, whole.hidden);
  if (scheme(id()).batch_dependent()) return;
  std::vector<float> pieces;
  for (std::size_t begin = 0; begin < 24; begin += 8) {
    const Output part =
        run(layer, {.max_tokens = 8, .threads = 2}, {x.begin() + begin * 256, x.begin() + (begin + 8) * 256});
    pieces.insert(pieces.end(), part.hidden.begin(), part.hidden.end());
  }
  EXPECT_EQ(pieces, whole.hidden);
  const Output one = run(layer, {.max_tokens = 1, .threads = 2}, {x.begin(), x.begin() + 256});
  EXPECT_EQ(one.hidden, std::vector<float>(whole.hidden.begin(), whole.hidden.begin() + 256));
}

// A token's result does not depend on how many others there are: each count takes another way through the
// tiles.
TEST_P(EveryScheme, TokenCounts) {
  if (scheme(id()).batch_dependent()) return;
  MoeSpec spec = small_spec(id());
  spec.experts = 5;  // so that an expert has many tokens
  Layer layer(spec);
  const std::vector<float> x = layer.numbers(512 * 256, 1.0f);
  PlanOptions options{.max_tokens = 512, .threads = 2};
  for (const std::string& kernel : kernel_names(spec, options)) {
    options.kernel = kernel;
    const Output whole = run(layer, options, x);
    for (const std::size_t tokens : {1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 129}) {
      const std::vector<float> some(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(tokens * 256));
      const std::vector<float> same(whole.hidden.begin(),
                                    whole.hidden.begin() + static_cast<std::ptrdiff_t>(tokens * 256));
      EXPECT_EQ(run(layer, options, some).hidden, same) << kernel << tokens;
    }
  }
}

TEST_P(EveryScheme, StaticActivationScales) {
  const Operand& activation = scheme(id()).activation;
  if (!activation.quantized() || (activation.group.n != 0 && !activation.tensor_scale.stored())) return;
  Layer layer(small_spec(id()), 3, true);
  expect_close(layer, {.max_tokens = 20, .threads = 2, .debug_workspace = true},
               layer.numbers(20 * 256, 1.0f));
}

TEST(Moe, SkewedRouting) {
  Layer layer(small_spec(SchemeId::int4_g32));
  const std::vector<float> x = layer.numbers(35 * 256, 1.0f);
  std::vector<std::int32_t> ids(70);
  std::vector<float> weights(70);
  for (int pattern = 0; pattern < 3; ++pattern) {
    for (int s = 0; s < 70; ++s) {
      ids[s] = pattern == 0 ? (s % 2 == 0 ? 5 : 0) : pattern == 1 ? 3 : (s * 7) % 6;  // 1: one expert twice
      weights[s] = 0.1f * static_cast<float>(s % 9) - 0.3f;
    }
    const PlanOptions options{.max_tokens = 35, .threads = 2, .debug_workspace = true};
    const Output out = run(layer, options, x, {}, ids, weights);
    const ReferenceResult reference = reference_moe(layer.spec(), options, layer.reference(),
                                                    {.hidden = {x.begin(), x.end()},
                                                     .logits = {},
                                                     .topk_ids = ids,
                                                     .topk_weights = {weights.begin(), weights.end()}});
    EXPECT_LE(relative_l2(out.hidden, reference.hidden), tolerance(layer.spec(), options)) << pattern;
    EXPECT_EQ(out.ids, ids);
    EXPECT_EQ(out.weights, weights);
  }
}

TEST(Moe, SixteenBitInputsAndOutputs) {
  Layer layer(small_spec(SchemeId::bf16));
  const std::vector<float> x = layer.numbers(3 * 256, 1.0f);
  std::vector<std::uint16_t> narrow(x.size()), out(x.size());
  std::vector<float> wide(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    narrow[i] = static_cast<std::uint16_t>(encode<formats::bf16>(x[i]));
    wide[i] = decode<formats::bf16>(narrow[i]);
  }
  const Output expected = run(layer, {.max_tokens = 3}, wide);
  const auto plan = MoePlan::create(layer.spec(), {.max_tokens = 3});
  std::vector<std::byte> workspace(plan->workspace_bytes());
  ASSERT_TRUE(plan->run(layer.weights({}), {.hidden = {narrow.data(), DType::bf16, 3, 256}},
                        {.hidden = {out.data(), DType::bf16, 3, 256}}, workspace)
                  .ok());
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(out[i], encode<formats::bf16>(expected.hidden[i]));
}

INSTANTIATE_TEST_SUITE_P(Table, EveryScheme, testing::Range<std::size_t>(0, all_schemes().size()),
                         [](const auto& info) { return std::string(all_schemes()[info.param].name); });

TEST(Moe, BadCalls) {
  Layer layer(small_spec(SchemeId::mxfp4));
  const auto plan = MoePlan::create(layer.spec(), {.max_tokens = 4});
  ASSERT_TRUE(plan.ok());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  std::vector<float> x(5 * 256), y(5 * 256);
  std::vector<std::int32_t> ids = {0, 1, 2, 6};
  std::vector<float> weights(4);
  const ExpertWeights packed = layer.weights({});
  const auto message = [&](const MoeInputs& in, const MoeOutputs& out, std::size_t bytes) {
    return plan->run(packed, in, out, std::span(workspace).first(bytes)).message();
  };
  const MatrixView two{x.data(), DType::f32, 2, 256};
  const MoeOutputs out{.hidden = {y.data(), DType::f32, 2, 256}};
  EXPECT_EQ(message({.hidden = two}, out, workspace.size()), "");
  EXPECT_EQ(message({.hidden = {nullptr, DType::f32, 0, 256}}, {.hidden = {nullptr, DType::f32, 0, 256}},
                    workspace.size()),
            "");
  EXPECT_NE(message({.hidden = {x.data(), DType::f32, 5, 256}}, out, workspace.size()).find("5 tokens"),
            std::string::npos);
  EXPECT_NE(message({.hidden = {x.data(), DType::f32, 2, 255}}, out, workspace.size()).find("[2, 255]"),
            std::string::npos);
  EXPECT_NE(message({.hidden = {x.data(), DType::i32, 2, 256}}, out, workspace.size()).find("I32"),
            std::string::npos);
  EXPECT_NE(message({.hidden = two}, out, 100).find("100 bytes"), std::string::npos);
  EXPECT_NE(message({.hidden = two, .hidden_scales = x.data()}, out, workspace.size()).find("GPUs only"),
            std::string::npos);
  EXPECT_NE(
      message({.hidden = two, .topk_ids = ids.data(), .topk_weights = weights.data()}, out, workspace.size())
          .find("topk_ids[1, 1] = 6 is not within 0..5"),
      std::string::npos);
  EXPECT_NE(message({.hidden = two, .topk_ids = ids.data()}, out, workspace.size()).find("missing"),
            std::string::npos);

  Layer other(small_spec(SchemeId::nvfp4));
  EXPECT_FALSE(plan->run(other.weights({}), {.hidden = two}, out, workspace).ok());
  MoeSpec bad = layer.spec();
  bad.top_k = 7;
  EXPECT_NE(MoePlan::create(bad, {}).status().message().find("7"), std::string::npos);
  EXPECT_FALSE(MoePlan::create(layer.spec(), {.max_tokens = 0}).ok());
  EXPECT_FALSE(MoePlan::create(layer.spec(), {.kernel = "no such kernel"}).ok());
}

TEST(Moe, DescribeNamesKernelAndBuffers) {
  const auto plan = MoePlan::create(small_spec(SchemeId::int8), {.max_tokens = 4, .kernel = "portable"});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->kernel_name(), "cpu.portable.int8");
  EXPECT_NE(plan->describe().find("not cpu.avx512.int8: "), std::string::npos);
  EXPECT_NE(plan->describe().find("routed_mid"), std::string::npos);
}

TEST(Workspace, FindsDamage) {
  WorkspaceLayout layout(true);
  const std::size_t a = layout.add<float>("a", 5), b = layout.add<char>("b", 64);
  std::vector<std::byte> memory(layout.bytes());
  std::byte* base = WorkspaceLayout::align(memory.data());
  layout.poison(base);
  EXPECT_EQ(layout.damaged(base), nullptr);
  std::memset(base + a, 1, 20);
  std::memset(base + b, 1, 64);
  EXPECT_EQ(layout.damaged(base), nullptr);
  base[a + 20] = std::byte{0};
  ASSERT_NE(layout.damaged(base), nullptr);
  layout.poison(base);
  base[b + 64] = std::byte{0};
  EXPECT_EQ(layout.damaged(base)->name, "b");
  layout.poison(base);
  base[0] = std::byte{0};
  EXPECT_EQ(layout.damaged(base)->name, "a");
}

// Integers: the sums are exact, so every instruction set gives the same.
TEST(Multiply, ExactOnIntegers) {
  std::mt19937 random(5);
  const std::int64_t k = 176;
  for (const Isa isa : all_isas) {
    if (!missing(isa).empty()) continue;
    for (const std::int64_t tokens : {1, 2, 3, 4, 5, 9})
      for (const std::int64_t rows : {1, 3, 4, 7, 8}) {
        std::vector<float> x(tokens * k), w(rows * k), out(tokens * 10, -1);
        for (float& value : x) value = static_cast<float>(random() % 255) - 127;
        for (float& value : w) value = static_cast<float>(random() % 16) - 8;
        std::vector<const float*> in;
        for (std::int64_t t = 0; t < tokens; ++t) in.push_back(&x[t * k]);
        multiply(isa)(in.data(), tokens, w.data(), rows, k, out.data(), 10);
        for (std::int64_t t = 0; t < tokens; ++t)
          for (std::int64_t r = 0; r < 10; ++r) {
            float expected = r < rows ? 0 : -1;
            for (std::int64_t i = 0; r < rows && i < k; ++i) expected += x[t * k + i] * w[r * k + i];
            ASSERT_EQ(out[t * 10 + r], expected) << name(isa) << " " << tokens << " " << rows;
          }
      }
  }
}

}  // namespace
}  // namespace gatefold
