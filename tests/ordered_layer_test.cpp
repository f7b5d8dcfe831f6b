// Layers whose experts take their inputs in orders of their own (act-order), against the oracle, which puts
// the columns of the matrices back instead.
#include <gtest/gtest.h>

#include "gatefold/codec.h"
#include "moe/synthetic.h"
#include "moe_layer.h"

namespace gatefold {
namespace {

/// A layer, and the same with the columns of every expert's gate and up in an order.
struct Ordered {
  explicit Ordered(MoeSpec spec) : layer(spec) {
    this->spec = spec;
    this->spec.ordered_inputs = true;
    packed = layer.reference();
    packed.vectors.input_order = random_orders(spec);
    expected = with_orders(layer.reference(), packed.vectors.input_order);
  }
  Layer layer;
  MoeSpec spec;
  ReferenceWeights packed, expected;
};

class OrderedLayer : public testing::TestWithParam<const char*> {};

TEST_P(OrderedLayer, EqualsTheOracle) {
  Ordered ordered(ragged_spec(small_spec(*find_scheme(GetParam()))));
  const MoeSpec& spec = ordered.spec;
  constexpr std::int64_t tokens = 5;
  const std::vector<float> x = ordered.layer.numbers(static_cast<std::size_t>(tokens * spec.hidden), 1.0f);
  for (const Precision precision : {Precision::native, Precision::f32})
    for (const bool debug : {false, true}) {
      const PlanOptions options{.max_tokens = 7,
                                .threads = 2,
                                .precision = precision,
                                .debug_workspace = debug,
                                .tuning = CpuTuning{}};
      const ExpertWeights weights = pack(spec, ordered.packed, options, {});
      const auto plan = MoePlan::create(spec, options);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      ReferenceInputs inputs{.hidden = {x.begin(), x.end()}};
      const ReferenceResult expected = reference_moe(spec, options, ordered.expected, inputs);

      std::vector<float> out(x.size());
      std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * spec.top_k));
      std::vector<float> shares(ids.size());
      std::vector<std::byte> workspace(plan->workspace_bytes());
      const MatrixView hidden{x.data(), DType::f32, tokens, spec.hidden};
      const MutableMatrixView result{out.data(), DType::f32, tokens, spec.hidden};
      Status status =
          plan->run(weights, {.hidden = hidden},
                    {.hidden = result, .topk_ids = ids.data(), .topk_weights = shares.data()}, workspace);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(ids, expected.topk_ids);
      EXPECT_LE(relative_l2(out, expected.hidden), tolerance(spec, options));

      // The same with the routing given, and in bf16.
      const std::vector<float> own = out;
      status = plan->run(weights, {.hidden = hidden, .topk_ids = ids.data(), .topk_weights = shares.data()},
                         {.hidden = result}, workspace);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(out, own);
      std::vector<std::uint16_t> narrow(x.size());
      status = plan->run(weights, {.hidden = hidden},
                         {.hidden = {narrow.data(), DType::bf16, tokens, spec.hidden}}, workspace);
      ASSERT_TRUE(status.ok()) << status.message();
      for (std::size_t i = 0; i < narrow.size(); ++i)
        ASSERT_EQ(narrow[i], encode<formats::bf16>(own[i])) << i;
    }
}

INSTANTIATE_TEST_SUITE_P(Schemes, OrderedLayer,
                         testing::Values("int4_g32", "uint4_g64", "int8_g32", "int4_g128_afp8"));

TEST(OrderedLayers, WrongOrdersAreRefused) {
  Ordered ordered(small_spec(SchemeId::int4_g32));
  const auto status = [&](const MoeSpec& spec, const ReferenceWeights& weights) {
    return ExpertWeights::pack(
               spec, {}, weights.vectors,
               [&](int e, Projection p) -> Result<QuantizedMatrix> {
                 const ReferenceFfn& ffn = weights.routed[static_cast<std::size_t>(e)];
                 return p == Projection::gate ? ffn.gate : p == Projection::up ? ffn.up : ffn.down;
               })
        .status()
        .message();
  };
  EXPECT_NE(status(ordered.layer.spec(), ordered.packed).find("input order has"), std::string::npos);
  EXPECT_NE(status(ordered.layer.spec(), ordered.expected).find("its columns have an order"),
            std::string::npos);
  ReferenceWeights twice = ordered.packed;
  twice.vectors.input_order[256 + 3] = twice.vectors.input_order[256];
  EXPECT_NE(status(ordered.spec, twice).find("expert 1 is no permutation"), std::string::npos);
}

}  // namespace
}  // namespace gatefold
