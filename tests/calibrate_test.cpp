// Calibration of whole models: what is written, what it loses, and how it goes on after an interruption.
#include "gatefold/calibrate.h"

#include <map>

#include "format/row_kernels.h"
#include "model_files.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t few_tokens = 8192;

std::vector<std::int32_t> text(const std::string& name, std::size_t count) {
  const std::string bytes = read_file(tiny_moe + "/" + name).substr(0, count);
  return {reinterpret_cast<const unsigned char*>(bytes.data()),
          reinterpret_cast<const unsigned char*>(bytes.data()) + bytes.size()};
}

std::map<std::string, std::string> contents(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(directory))
    files[entry.path().filename().string()] = read_file(entry.path());
  return files;
}

std::vector<float> values(const TensorView& view) {
  std::vector<float> out(view.bytes * 8 / static_cast<std::size_t>(bits(view.dtype)));
  row_kernels().widen(view.dtype, view.data, 0, static_cast<std::int64_t>(out.size()), out.data());
  return out;
}

std::vector<float> ratios(const std::vector<float>& over, const std::vector<float>& under) {
  std::vector<float> out(over.size());
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = over[i] / under[i];
  return out;
}

void expect_scaled(const std::vector<float>& before, const std::vector<float>& after,
                   const std::vector<float>& fold) {
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) ASSERT_EQ(after[i], before[i] * fold[i % fold.size()]) << i;
}

class CalibrateTest : public testing::Test {
 protected:
  CalibrateReport run(const std::string& name, const CalibrateOptions& options,
                      const std::string& model = tiny_moe) {
    const auto report =
        calibrate(open_checkpoint(model), root_ / name, text("calibration.txt", few_tokens), options);
    EXPECT_TRUE(report) << report.status().message();
    return report ? *report : CalibrateReport{};
  }

  std::string error(const std::string& name, const CalibrateOptions& options,
                    std::size_t tokens = few_tokens) {
    const auto report =
        calibrate(open_checkpoint(tiny_moe), root_ / name, text("calibration.txt", tokens), options);
    EXPECT_FALSE(report);
    return report.status().message();
  }

  /// KL of round-to-nearest in a scheme, and of a written directory.
  std::pair<double, double> losses(SchemeId id, const std::string& name) {
    CompareOptions options;
    options.schemes = {id};
    options.others = {open_checkpoint((root_ / name).string())};
    const auto rows = compare(open_checkpoint(tiny_moe), text("valid.txt", 16384), options);
    EXPECT_TRUE(rows) << rows.status().message();
    EXPECT_TRUE((*rows)[1].status.ok()) << (*rows)[1].status.message();
    EXPECT_EQ((*rows)[1].scheme, id);
    return {(*rows)[0].kl, (*rows)[1].kl};
  }

  TemporaryDirectory root_;
};

TEST_F(CalibrateTest, GptqLosesLess) {
  for (const auto& [id, ratio] :
       {std::pair(SchemeId::int4_g128, 0.8), {SchemeId::mxfp4, 0.85}, {SchemeId::nvfp4, 0.8}}) {
    const std::string name(scheme(id).name);
    const CalibrateReport report = run(name, {.scheme = id});
    EXPECT_GT(report.fewest_samples, 0);
    const auto [nearest, calibrated] = losses(id, name);
    EXPECT_LT(calibrated, ratio * nearest) << name;
    EXPECT_FALSE(fs::exists(root_ / ("." + name + ".calibration")));
  }
}

TEST_F(CalibrateTest, AwqAndSmoothQuant) {
  run("awq", {.scheme = SchemeId::int4_g128, .method = Method::awq});
  const auto [nearest, awq] = losses(SchemeId::int4_g128, "awq");
  EXPECT_LT(awq, 0.9 * nearest);
  run("smooth", {.scheme = SchemeId::int8_aint8, .method = Method::smoothquant});
  const auto [dynamic, smooth] = losses(SchemeId::int8_aint8, "smooth");
  EXPECT_LT(smooth, 1.15 * dynamic);  // both are small, and instruction sets differ
}

/// Scales of activations are in the checkpoint, one for all inputs of a layer's experts.
TEST_F(CalibrateTest, StaticScales) {
  run("static", {.scheme = SchemeId::fp8_tensor_afp8, .method = Method::smoothquant});
  const Checkpoint written = open_checkpoint((root_ / "static").string());
  std::optional<float> first;
  for (const int expert : {0, 7}) {
    const auto gate = written.expert(1, expert, Projection::gate);
    ASSERT_TRUE(gate) << gate.status().message();
    const auto& scale = std::get<QuantizedMatrix>(*gate).input_scale;
    ASSERT_TRUE(scale);
    EXPECT_GT(scale->value, 0);
    EXPECT_EQ(scale->value, first.value_or(scale->value));
    first = scale->value;
  }
  const auto [dynamic, fixed] = losses(SchemeId::fp8_tensor_afp8, "static");
  EXPECT_LT(fixed, 1.5 * dynamic);

  run("percentile", {.scheme = SchemeId::fp8_tensor_afp8,
                     .method = Method::smoothquant,
                     .activation_scale = ActivationScale::percentile});
  const Checkpoint other = open_checkpoint((root_ / "percentile").string());
  const auto gate = other.expert(1, 0, Projection::gate);
  ASSERT_TRUE(gate) << gate.status().message();
  const float cut_off = std::get<QuantizedMatrix>(*gate).input_scale->value;
  EXPECT_GT(cut_off, 0);
  EXPECT_LT(cut_off, *first);  // this text has outliers
}

/// Engines multiply gate and up as one matrix.
TEST_F(CalibrateTest, GateAndUpShareTheTensorScale) {
  run("shared", {.scheme = SchemeId::nvfp4});
  const Checkpoint written = open_checkpoint((root_ / "shared").string());
  for (const int expert : {0, 7}) {
    const auto gate = written.expert(1, expert, Projection::gate),
               up = written.expert(1, expert, Projection::up);
    ASSERT_TRUE(gate && up);
    EXPECT_EQ(std::get<QuantizedMatrix>(*gate).tensor_scale.value,
              std::get<QuantizedMatrix>(*up).tensor_scale.value);
  }
}

/// What else reads the norm's output must be scaled as the experts are: the router, the shared expert, its
/// gate.
TEST_F(CalibrateTest, FoldsAreExact) {
  const std::string model = golden_models + "/qwen2-moe-dynamic";
  const Checkpoint source = open_checkpoint(model);
  std::vector<std::int32_t> tokens(512);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<std::int32_t>(i * 7919 % static_cast<std::size_t>(source.config().vocab));
  const CalibrateOptions options{.scheme = SchemeId::int8_aint8, .method = Method::smoothquant, .window = 32};
  const auto report = calibrate(source, root_ / "out", tokens, options);
  ASSERT_TRUE(report) << report.status().message();
  const Checkpoint written = open_checkpoint((root_ / "out").string());
  bool changed = false;
  for (int layer = 0; layer < source.config().layers; ++layer) {
    const std::string norm = "model.layers." + std::to_string(layer) + ".post_attention_layernorm.weight";
    const TensorView before = *source.tensor(norm), after = *written.tensor(norm);
    changed |= std::memcmp(before.data, after.data, before.bytes) != 0;
    const auto fold = ratios(values(before), values(after));
    const auto shared = [&](const Checkpoint& of) {
      const auto matrix = std::get<MatrixView>(*of.shared_expert(layer, Projection::up));
      return TensorView{static_cast<const std::byte*>(matrix.data),
                        matrix.dtype,
                        {},
                        static_cast<std::size_t>(matrix.rows * matrix.cols * bits(matrix.dtype) / 8)};
    };
    expect_scaled(values(*source.router(layer)), values(*written.router(layer)), fold);
    expect_scaled(values(*source.shared_expert_gate(layer)), values(*written.shared_expert_gate(layer)),
                  fold);
    expect_scaled(values(shared(source)), values(shared(written)), fold);
  }
  EXPECT_TRUE(changed);
  const auto exact = evaluate(load_decoder(model), tokens, {.window = 32});
  const auto folded = evaluate(load_decoder((root_ / "out").string()), tokens, {.window = 32});
  ASSERT_TRUE(exact && folded);
  EXPECT_NEAR(folded->nats_per_token, exact->nats_per_token, 1e-2);
}

TEST_F(CalibrateTest, ThreadsDoNotMatter) {
  run("one", {.scheme = SchemeId::int4_g32, .threads = 1});
  run("two", {.scheme = SchemeId::int4_g32, .threads = 2});
  EXPECT_EQ(contents(root_ / "one"), contents(root_ / "two"));
}

TEST_F(CalibrateTest, ResumesAfterTheLastLayer) {
  const int experts = open_checkpoint(tiny_moe).config().moe.experts;
  run("whole", {.scheme = SchemeId::int4_g128});
  std::int64_t asked = 0;
  CalibrateOptions options{.scheme = SchemeId::int4_g128};
  options.cancelled = [&] { return ++asked > 2 * experts + 3; };
  EXPECT_NE(error("out", options).find("interrupted"), std::string::npos);
  EXPECT_FALSE(fs::exists(root_ / "out"));

  options.cancelled = {};
  EXPECT_NE(error("out", options).find("resume"), std::string::npos);
  options.resume = true;
  options.damping = 0.02;
  const std::string other = error("out", options);
  EXPECT_NE(other.find("another run"), std::string::npos) << other;
  EXPECT_NE(other.find("damping 0.02"), std::string::npos) << other;
  options.damping.reset();
  std::int64_t left = 0;
  options.progress = [&](std::int64_t, std::int64_t total) { left = total; };
  EXPECT_EQ(run("out", options).resumed_layers, 2);
  EXPECT_EQ(left, 2 * experts);
  EXPECT_EQ(contents(root_ / "whole"), contents(root_ / "out"));
  EXPECT_FALSE(fs::exists(root_ / ".out.calibration"));
}

TEST_F(CalibrateTest, DamagedLayer) {
  CalibrateOptions options{.scheme = SchemeId::int4_g128};
  std::int64_t asked = 0;
  options.cancelled = [&] { return ++asked > 20; };
  error("out", options);
  const fs::path file = root_ / ".out.calibration" / "layer-0" / "model.safetensors";
  ASSERT_TRUE(fs::exists(file));
  const std::string content = read_file(file);
  std::ofstream(file, std::ios::binary) << content.substr(0, content.size() - 1);
  options.resume = true;
  options.cancelled = {};
  EXPECT_NE(error("out", options).find(file.string()), std::string::npos);
}

TEST_F(CalibrateTest, RareExpertsSeeOtherTokens) {
  const auto tokens = text("calibration.txt", 64);
  CalibrateOptions options{.scheme = SchemeId::int4_g128, .window = 32};
  const auto some = calibrate(open_checkpoint(tiny_moe), root_ / "some", tokens, options);
  ASSERT_TRUE(some) << some.status().message();
  EXPECT_GT(some->rare_experts, 0);
  EXPECT_LT(some->fewest_samples, 64);
  options.min_samples = 0;
  const auto none = calibrate(open_checkpoint(tiny_moe), root_ / "none", tokens, options);
  ASSERT_TRUE(none) << none.status().message();
  EXPECT_EQ(none->rare_experts, 0);
  for (const char* name : {"some", "none"}) {  // sixteen tokens an expert do no harm
    const auto [nearest, calibrated] = losses(SchemeId::int4_g128, name);
    EXPECT_LT(calibrated, 0.9 * nearest) << name;
  }
}

TEST_F(CalibrateTest, Errors) {
  EXPECT_NE(error("a", {.scheme = SchemeId::bf16}).find("bf16 is not quantized"), std::string::npos);
  EXPECT_NE(error("a", {.scheme = SchemeId::mxfp4, .method = Method::smoothquant}).find("mxfp4"),
            std::string::npos);
  EXPECT_NE(error("a", {}, 100).find("100 tokens"), std::string::npos);
  auto tokens = text("calibration.txt", 1024);
  tokens[17] = 256;
  const auto wrong = calibrate(open_checkpoint(tiny_moe), root_ / "a", tokens, {});
  ASSERT_FALSE(wrong);
  EXPECT_NE(wrong.status().message().find("token 17 is 256"), std::string::npos);
  fs::create_directory(root_ / "there");
  EXPECT_NE(error("there", {}).find("already exists"), std::string::npos);
  run("q", {.scheme = SchemeId::int8, .min_samples = 0});
  const auto again =
      calibrate(open_checkpoint((root_ / "q").string()), root_ / "b", text("calibration.txt", 1024), {});
  ASSERT_FALSE(again);
  EXPECT_NE(again.status().message().find("quantized already"), std::string::npos);
}

TEST(Method, Names) {
  EXPECT_EQ(find_method("awq"), Method::awq);
  EXPECT_EQ(name(Method::smoothquant), "smoothquant");
  EXPECT_FALSE(find_method("rtn"));
}

}  // namespace
}  // namespace gatefold
