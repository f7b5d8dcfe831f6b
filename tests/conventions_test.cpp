// Every convention, from checkpoints that are made here: weights bit for bit, and a layer against plain
// loops.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "convention_kinds.h"
#include "gatefold/moe.h"

namespace gatefold {
namespace {

constexpr Projection projections[] = {Projection::gate, Projection::up, Projection::down};

class Conventions : public testing::TestWithParam<std::size_t> {
 protected:
  const CheckpointKind& kind() const { return all_kinds()[GetParam()]; }
};

TEST_P(Conventions, WeightsAreThose) {
  const Files files = kind().make();
  const TemporaryDirectory directory;
  files.write(directory.path());
  const auto checkpoint = Checkpoint::open(directory.path());
  ASSERT_TRUE(checkpoint) << checkpoint.status().message();
  const auto stored = checkpoint->stored_scheme();
  ASSERT_TRUE(stored) << stored.status().message();
  EXPECT_EQ(scheme(*stored).name, kind().scheme);
  for (int expert = 0; expert < ConventionWriter::kExperts; ++expert)
    for (const Projection projection : projections) {
      const std::string key = std::to_string(expert) + "." + std::string(name(projection));
      const auto matrix = checkpoint->expert(0, expert, projection);
      ASSERT_TRUE(matrix) << matrix.status().message();
      const auto& quantized = std::get<QuantizedMatrix>(*matrix);
      std::vector<float> values(static_cast<std::size_t>(quantized.n * quantized.k));
      dequantize(quantized, values.data());
      EXPECT_EQ(values, files.weights.at(key)) << key;
    }
  for (const TensorEntry& entry : checkpoint->tensors()) {
    const bool of_codes = checkpoint->is_expert_tensor(entry.name) && !entry.name.ends_with("_bias");
    EXPECT_EQ(checkpoint->convention(entry) != "unquantized", of_codes) << entry.name;
  }
}

/// One token at one expert, in double precision.
std::vector<double> plain_expert(const Files& files, const MoeSpec& spec, int expert, const float* x) {
  const auto multiply = [&](const std::string& name, const std::vector<double>& in, std::size_t n) {
    const std::string key = std::to_string(expert) + "." + name;
    const std::vector<float>& w = files.weights.at(key);
    std::vector<double> out(n);
    for (std::size_t row = 0; row < n; ++row) {
      for (std::size_t i = 0; i < in.size(); ++i)
        out[row] += static_cast<double>(w[row * in.size() + i]) * in[i];
      if (spec.bias) out[row] += files.biases.at(key)[row];
    }
    return out;
  };
  const std::vector<double> in(x, x + spec.hidden);
  const auto gate = multiply("gate", in, static_cast<std::size_t>(spec.intermediate));
  auto mid = multiply("up", in, static_cast<std::size_t>(spec.intermediate));
  const Activation& a = spec.activation;
  for (std::size_t i = 0; i < mid.size(); ++i) {
    const double g = std::min<double>(gate[i], a.limit), u = std::clamp<double>(mid[i], -a.limit, a.limit);
    mid[i] = g / (1 + std::exp(-a.alpha * g)) * (u + a.beta);
  }
  return multiply("down", mid, static_cast<std::size_t>(spec.hidden));
}

TEST_P(Conventions, LayerIsThat) {
  const Files files = kind().make();
  const TemporaryDirectory directory;
  files.write(directory.path());
  const auto checkpoint = Checkpoint::open(directory.path());
  ASSERT_TRUE(checkpoint) << checkpoint.status().message();
  const PlanOptions options{.max_tokens = 4, .threads = 1, .precision = Precision::f32, .weights_only = true};
  const auto experts = load_experts(*checkpoint, {.plan = options});
  ASSERT_TRUE(experts) << experts.status().message();
  EXPECT_TRUE(experts->warnings().empty()) << experts->warnings().front();
  const MoeSpec& spec = experts->spec();
  const auto plan = MoePlan::create(spec, options);
  ASSERT_TRUE(plan) << plan.status().message();

  constexpr std::int64_t tokens = 3;
  const auto hidden = static_cast<std::size_t>(spec.hidden);
  std::vector<float> in(tokens * hidden);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = std::sin(static_cast<float>(i));
  std::array<std::int32_t, tokens> ids = {1, 0, 1};
  const float weights[tokens] = {1.0f, 0.5f, 0.25f};
  const auto run = [&](const MoePlan& by, const ExpertWeights& of) {
    std::vector<float> out(in.size());
    std::vector<std::byte> workspace(by.workspace_bytes());
    const Status status = by.run(of,
                                 {.hidden = {in.data(), DType::f32, tokens, spec.hidden},
                                  .topk_ids = ids.data(),
                                  .topk_weights = weights},
                                 {.hidden = {out.data(), DType::f32, tokens, spec.hidden}}, workspace);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  };
  const std::vector<float> out = run(*plan, *experts);
  double error = 0, norm = 0;
  for (std::size_t t = 0; t < tokens; ++t) {
    const auto expected = plain_expert(files, spec, ids[t], in.data() + t * hidden);
    for (std::size_t i = 0; i < hidden; ++i) {
      error += std::pow(out[t * hidden + i] - weights[t] * expected[i], 2);
      norm += std::pow(weights[t] * expected[i], 2);
    }
  }
  EXPECT_LE(std::sqrt(error / norm), 1e-5);

  // By parts of one expert each: of a token only one has something.
  std::vector<float> sums(out.size());
  for (int rank = 0; rank < ConventionWriter::kExperts; ++rank) {
    const auto part =
        load_experts(*checkpoint, {.plan = options, .ep_size = ConventionWriter::kExperts, .ep_rank = rank});
    ASSERT_TRUE(part) << part.status().message();
    const auto of_part = MoePlan::create(part->spec(), options);
    ASSERT_TRUE(of_part) << of_part.status().message();
    const std::vector<float> some = run(*of_part, *part);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += some[i];
    for (std::int32_t& id : ids) --id;  // as the next part has them
  }
  EXPECT_EQ(sums, out);
}

TEST(Parts, ThatThereAreNot) {
  const TemporaryDirectory directory;
  make_checkpoint("gptq-sym-g128").write(directory.path());
  const auto checkpoint = Checkpoint::open(directory.path());
  ASSERT_TRUE(checkpoint) << checkpoint.status().message();
  for (const auto& [size, rank] : {std::pair{3, 0}, {0, 0}, {-1, 0}, {2, 2}, {2, -1}})
    EXPECT_EQ(load_experts(*checkpoint, {.ep_size = size, .ep_rank = rank}).status().message(),
              "ep_rank " + std::to_string(rank) + ", ep_size " + std::to_string(size) +
                  ": 2 experts have no such part");
}

/// AutoAWQ's two files spell the version in two ways, and have other names for the rest.
TEST(SideFiles, AwqVersionInEitherCase) {
  for (const auto& [config, side] : {std::pair{"gemm", "GEMM"}, {"GEMM", "gemm"}}) {
    Files files = make_checkpoint("awq-g64");
    files.quantization()["version"] = config;
    files.side["quant_config.json"] = {
        {"zero_point", true}, {"q_group_size", 64}, {"w_bit", 4}, {"version", side}};
    const TemporaryDirectory directory;
    files.write(directory.path());
    const auto checkpoint = Checkpoint::open(directory.path());
    ASSERT_TRUE(checkpoint) << checkpoint.status().message();
    EXPECT_EQ(*checkpoint->stored_scheme(), SchemeId::uint4_g64);
  }
}

/// DeepSeek-V4's first layers have a table from tokens to experts in place of the correction bias.
TEST(ChosenByToken, TheCallerGivesExperts) {
  Files files = make_checkpoint("deepseek-v4-fp4");
  FileTensor& bias = files.tensor(".gate.bias");
  bias = {"layers.0.ffn.gate.tid2eid", "I64", {64, 1}, std::string(64 * sizeof(std::int64_t), '\0')};
  const TemporaryDirectory directory;
  files.write(directory.path());
  const auto checkpoint = Checkpoint::open(directory.path());
  ASSERT_TRUE(checkpoint) << checkpoint.status().message();
  ASSERT_TRUE(checkpoint->chooses_by_token(0));
  const auto experts = load_experts(*checkpoint, {});
  ASSERT_TRUE(experts) << experts.status().message();
  const MoeSpec& spec = experts->spec();
  EXPECT_FALSE(spec.routing.correction_bias);
  const auto plan = MoePlan::create(spec, {.max_tokens = 1, .threads = 1});
  ASSERT_TRUE(plan) << plan.status().message();
  std::vector<float> in(static_cast<std::size_t>(spec.hidden), 0.5f), out(in.size());
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const std::int32_t id = 1;
  const float weight = 1;
  MoeInputs inputs{.hidden = {in.data(), DType::f32, 1, spec.hidden}};
  const MoeOutputs outputs{.hidden = {out.data(), DType::f32, 1, spec.hidden}};
  EXPECT_EQ(plan->run(*experts, inputs, outputs, workspace).code(), Code::invalid_argument);
  inputs.topk_ids = &id, inputs.topk_weights = &weight;
  const Status status = plan->run(*experts, inputs, outputs, workspace);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float y) { return y != 0; }));
}

/// The first pattern of the file that matches decides; sorted, the second comes first.
TEST(Gptq, DynamicHasAnOrder) {
  Files files = make_checkpoint("gptq-sym-g128");
  files.quantization()["bits"] = 8;
  files.quantization()["dynamic"] = "HERE";
  const auto stored = [&](const std::string& dynamic, const char* side = nullptr) {
    const TemporaryDirectory directory;
    files.write(directory.path());
    const auto put = [&](const std::string& name, std::string text) {
      const std::size_t at = text.find("\"HERE\"");
      if (at != std::string::npos) text.replace(at, 6, dynamic);
      save_file(directory.path() / name, text);
    };
    put("config.json", load_file(directory.path() / "config.json"));
    if (side != nullptr) {
      nlohmann::json config = files.config;
      config.erase("quantization_config");
      put("config.json", config.dump());
      put(side, files.quantization().dump());
    }
    const auto checkpoint = Checkpoint::open(directory.path());
    if (!checkpoint) return checkpoint.status().message();
    return std::string(scheme(*checkpoint->stored_scheme()).name);
  };
  const std::string four = R"("+:.*experts": {"bits": 4})", eight = R"("+:.*": {"desc_act": false})";
  for (const char* side : {static_cast<const char*>(nullptr), "quantize_config.json"}) {
    EXPECT_EQ(stored("{" + four + "," + eight + "}", side), "int4_g128");
    EXPECT_NE(stored("{" + eight + "," + four + "}", side).find("bits 8"), std::string::npos);
  }
  EXPECT_NE(stored("7").find("dynamic is 7"), std::string::npos) << stored("7");
  EXPECT_NE(stored("[7]").find("dynamic has 7"), std::string::npos) << stored("[7]");
  EXPECT_NE(stored(R"({"a": 7})").find("dynamic['a'] is not an object"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(All, Conventions, testing::Range(std::size_t{0}, all_kinds().size()),
                         [](const auto& info) {
                           std::string name = all_kinds()[info.param].name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace gatefold
