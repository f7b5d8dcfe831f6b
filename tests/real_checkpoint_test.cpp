// Checkpoints that other software wrote, with the values that it computes itself, where the environment
// variable GATEFOLD_CHECKPOINTS names a folder of them. Each has an expected.safetensors: hashes of the
// dequantized weights, and inputs and outputs of one MoE layer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>

#include "checkpoint/source.h"
#include "checkpoint_files.h"
#include "gatefold/codec.h"
#include "gatefold/moe.h"
#include "gatefold/quantize.h"
#include "sha256.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

constexpr Projection projections[] = {Projection::gate, Projection::up, Projection::down};

TEST(Sha256, KnownAnswers) {
  EXPECT_EQ(sha256({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  const std::byte abc[] = {std::byte{'a'}, std::byte{'b'}, std::byte{'c'}};
  EXPECT_EQ(sha256(abc), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

/// A matrix as row-major f32, -0 replaced by +0.
std::vector<float> to_floats(const ExpertMatrix& matrix) {
  std::vector<float> values;
  if (const auto* quantized = std::get_if<QuantizedMatrix>(&matrix)) {
    values.resize(static_cast<std::size_t>(quantized->n * quantized->k));
    dequantize(*quantized, values.data());
  } else {
    const auto& view = std::get<MatrixView>(matrix);
    EXPECT_EQ(view.dtype, DType::bf16);
    for (std::int64_t i = 0; i < view.rows * view.cols; ++i) {
      std::uint16_t code = 0;
      std::memcpy(&code, static_cast<const char*>(view.data) + 2 * i, 2);
      values.push_back(decode<formats::bf16>(code));
    }
  }
  for (float& value : values) value += 0.0f;
  return values;
}

/// What expected.safetensors says of a directory.
class Expected {
 public:
  explicit Expected(const fs::path& directory)
      : source_(std::move(*Source::open_file(directory / "expected.safetensors"))) {
    const std::string file = load_file(directory / "expected.safetensors");
    std::uint64_t size = 0;
    std::memcpy(&size, file.data(), 8);
    metadata_ = nlohmann::json::parse(file.substr(8, size)).at("__metadata__");
  }

  int layer() const { return std::stoi(metadata_.at("moe_layer").get<std::string>()); }
  /// By "layers.0.experts.3.gate"; `exact`: where they differ, those of the real values rounded once.
  std::map<std::string, std::string> hashes(bool exact) const {
    const char* key = exact ? "sha256_exact" : "sha256";
    if (!metadata_.contains(key)) return {};
    return nlohmann::json::parse(metadata_.at(key).get<std::string>());
  }
  bool has(const std::string& name) const { return source_.find(name) != nullptr; }
  TensorView tensor(const std::string& name) const { return source_.view(*source_.find(name)); }
  template <class T>
  std::vector<T> values(const std::string& name) const {
    const TensorView view = tensor(name);
    std::vector<T> values(view.bytes / sizeof(T));
    std::memcpy(values.data(), view.data, view.bytes);
    return values;
  }

 private:
  Source source_;
  nlohmann::json metadata_;
};

class RealCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("GATEFOLD_CHECKPOINTS") == nullptr)
      GTEST_SKIP() << "GATEFOLD_CHECKPOINTS names no folder of checkpoints";
    for (const auto& entry : fs::directory_iterator(std::getenv("GATEFOLD_CHECKPOINTS")))
      if (fs::exists(entry.path() / "config.json")) directories_.push_back(entry.path());
    std::sort(directories_.begin(), directories_.end());
    EXPECT_FALSE(directories_.empty());
  }
  static fs::path path(const char* directory) {
    return fs::path(std::getenv("GATEFOLD_CHECKPOINTS")) / directory;
  }
  static Checkpoint open(const fs::path& directory) {
    auto checkpoint = Checkpoint::open(directory);
    if (!checkpoint) throw std::runtime_error(checkpoint.status().message());
    return *checkpoint;
  }

  std::vector<fs::path> directories_;
};

TEST_F(RealCheckpoint, EveryWeightHasItsHash) {
  for (const fs::path& directory : directories_) {
    SCOPED_TRACE(directory.filename().string());
    const Checkpoint checkpoint = open(directory);
    const Expected expected(directory);
    const auto hashes = expected.hashes(false), exact = expected.hashes(true);
    std::size_t checked = 0;
    for (const ExpertGroup& group : checkpoint.expert_groups())
      for (int expert = 0; expert < checkpoint.config().moe.experts; ++expert)
        for (const Projection projection : projections) {
          const std::string key = "layers." + std::to_string(group.layer) + ".experts." +
                                  std::to_string(expert) + "." + std::string(name(projection));
          if (!hashes.contains(key)) continue;
          const auto matrix = checkpoint.expert(group.layer, expert, projection);
          ASSERT_TRUE(matrix) << matrix.status().message();
          const std::vector<float> values = to_floats(*matrix);
          const std::string hash = sha256(std::as_bytes(std::span(values)));
          EXPECT_TRUE(hash == hashes.at(key) || (exact.contains(key) && hash == exact.at(key))) << key;
          ++checked;
        }
    EXPECT_EQ(checked, hashes.size());
    EXPECT_GT(checked, 0u);
  }
}

/// The layer's output in f32 mode.
std::vector<float> run_layer(const Checkpoint& checkpoint, const Expected& expected, bool weights_only,
                             bool given_routing) {
  const PlanOptions options{
      .max_tokens = 16, .threads = 1, .precision = Precision::f32, .weights_only = weights_only};
  const auto experts = load_experts(checkpoint, {.layer = expected.layer(), .plan = options});
  if (!experts) throw std::runtime_error(experts.status().message());
  const auto plan = MoePlan::create(experts->spec(), options);
  if (!plan) throw std::runtime_error(plan.status().message());
  const TensorView in = expected.tensor("moe_in");
  const std::int64_t tokens = in.shape[0], hidden = in.shape[1];
  std::vector<std::byte> workspace(plan->workspace_bytes());
  std::vector<float> out(static_cast<std::size_t>(tokens * hidden));
  const auto ids = expected.values<std::int32_t>("topk_ids");
  const auto weights = expected.values<float>("topk_weights");
  std::vector<std::int32_t> chosen(ids.size());
  std::vector<float> shares(weights.size());
  const Status status = plan->run(*experts,
                                  {.hidden = {in.data, in.dtype, tokens, hidden},
                                   .topk_ids = given_routing ? ids.data() : nullptr,
                                   .topk_weights = given_routing ? weights.data() : nullptr},
                                  {.hidden = {out.data(), DType::f32, tokens, hidden},
                                   .topk_ids = chosen.data(),
                                   .topk_weights = shares.data()},
                                  workspace);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(chosen, ids);
  for (std::size_t i = 0; i < weights.size(); ++i) EXPECT_NEAR(shares[i], weights[i], 2e-6 * weights[i]) << i;
  return out;
}

double relative_l2(const std::vector<float>& actual, const std::vector<float>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(static_cast<double>(actual[i]) - expected[i], 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(error / norm);
}

TEST_F(RealCheckpoint, LayersGiveTheirOutputs) {
  for (const fs::path& directory : directories_) {
    SCOPED_TRACE(directory.filename().string());
    const Checkpoint checkpoint = open(directory);
    const Expected expected(directory);
    for (const bool given : {true, false}) {
      const double error =
          relative_l2(run_layer(checkpoint, expected, true, given), expected.values<float>("moe_out"));
      RecordProperty("moe_out " + directory.filename().string(), std::to_string(error));
      EXPECT_LE(error, 1e-5);
    }
  }
}

TEST_F(RealCheckpoint, QuantizedActivationsGiveTheirOutputs) {
  int checked = 0;
  for (const fs::path& directory : directories_) {
    SCOPED_TRACE(directory.filename().string());
    const Checkpoint checkpoint = open(directory);
    const Expected expected(directory);
    if (!expected.has("moe_out_actquant")) continue;
    ++checked;
    EXPECT_TRUE(scheme(*checkpoint.stored_scheme()).quantizes_activations());
    const double error =
        relative_l2(run_layer(checkpoint, expected, false, true), expected.values<float>("moe_out_actquant"));
    RecordProperty("moe_out_actquant " + directory.filename().string(), std::to_string(error));
    EXPECT_LE(error, 1e-3);
  }
  EXPECT_GT(checked, 0);
}

TEST_F(RealCheckpoint, Families) {
  const Checkpoint mixtral = open(path("mixtral-bf16"));
  EXPECT_TRUE(mixtral.router(0));
  EXPECT_EQ(mixtral.config().rope.theta, 1e6);
  // Cut: only what is asked for must exist.
  expect_error(mixtral.tensor("lm_head.weight").status(), Code::bad_file, {"'lm_head.weight'"});

  const Checkpoint qwen2 = open(path("qwen2-moe-bf16"));
  EXPECT_EQ(qwen2.config().moe.shared.intermediate, 96);
  for (const Projection projection : projections) EXPECT_TRUE(qwen2.shared_expert(0, projection));
  EXPECT_TRUE(qwen2.shared_expert_gate(0));

  const Checkpoint deepseek = open(path("deepseek-v3-bf16"));
  EXPECT_EQ(deepseek.config().is_moe, (std::vector<bool>{false, true}));
  EXPECT_EQ(deepseek.config().moe.routing.groups, 4);
  for (const Projection projection : projections) EXPECT_TRUE(deepseek.shared_expert(1, projection));
  const TensorEntry* bias = deepseek.router_correction_bias(1);
  ASSERT_NE(bias, nullptr);
  EXPECT_EQ(bias->dtype, DType::f32);
}

}  // namespace
}  // namespace gatefold
