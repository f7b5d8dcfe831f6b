// From every convention to every one that can be written: the same weights bit for bit, or a refusal that
// says why.
#include <gtest/gtest.h>

#include "convention_kinds.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

class Rewrite : public testing::Test {
 protected:
  Checkpoint open(const fs::path& directory) {
    auto checkpoint = Checkpoint::open(directory);
    if (!checkpoint) throw std::runtime_error(checkpoint.status().message());
    return *checkpoint;
  }
  Checkpoint make(const std::string& kind) { return save(make_checkpoint(kind), kind); }
  Checkpoint save(const Files& files, const std::string& name) {
    fs::create_directories(root_.path() / name);
    files.write(root_.path() / name);
    return open(root_.path() / name);
  }
  /// Those of a module's, under another name.
  static void add_layer(Files& files, const std::string& name, std::vector<FileTensor> tensors,
                        const std::string& module) {
    for (FileTensor& tensor : tensors)
      if (tensor.name.starts_with(module)) {
        tensor.name = name + tensor.name.substr(module.size());
        files.tensors.push_back(tensor);
      }
  }
  static std::vector<float> weights(const Checkpoint& checkpoint, int expert, Projection projection) {
    const auto matrix = checkpoint.expert(0, expert, projection);
    EXPECT_TRUE(matrix) << matrix.status().message();
    const auto& quantized = std::get<QuantizedMatrix>(*matrix);
    std::vector<float> values(static_cast<std::size_t>(quantized.n * quantized.k));
    dequantize(quantized, values.data());
    return values;
  }
  void expect_same(const Checkpoint& from, const Checkpoint& to) {
    EXPECT_EQ(*to.stored_scheme(), *from.stored_scheme());
    for (int expert = 0; expert < from.config().moe.experts; ++expert)
      for (const Projection projection : {Projection::gate, Projection::up, Projection::down})
        EXPECT_EQ(weights(from, expert, projection), weights(to, expert, projection))
            << expert << name(projection);
    for (const TensorEntry& entry : from.tensors()) {
      if (from.is_expert_tensor(entry.name) || !from.quantized_module(entry).empty()) continue;
      const auto a = from.tensor(entry.name), b = to.tensor(entry.name);
      ASSERT_TRUE(b) << b.status().message();
      EXPECT_EQ(0, std::memcmp(a->data, b->data, a->bytes)) << entry.name;
    }
  }

  TemporaryDirectory root_;
};

/// What each kind can become, with the reason of each refusal.
struct Expectation {
  const char* kind;
  const char *compressed_tensors, *gptq, *awq, *modelopt;  ///< "": written
};
constexpr Expectation expectations[] = {
    {"ct-w4a16-g128-rtn", "", "", "", "no quant_algo"},
    {"ct-w4a16-asym-g64", "", "", "", "no quant_algo"},
    {"ct-w4a16-g64-actorder", "act-order would be lost", "", "act-order would be lost", "no quant_algo"},
    {"ct-w3a16-g64", "", "", "", "no quant_algo"},
    {"ct-w8a16-channel", "", "", "4 bits, not of 8", "no quant_algo"},
    {"ct-w8a16-g128", "", "", "4 bits, not of 8", "no quant_algo"},
    {"ct-int8-w8a8", "", "activations are", "activations are", "no quant_algo"},
    {"ct-fp8-dynamic", "", "no place in gptq", "no place in awq", ""},
    {"ct-fp8-tensor-static", "", "no place in gptq", "no place in awq", ""},
    {"ct-fp8-block", "", "no place in gptq", "no place in awq", "no quant_algo"},
    {"ct-mxfp4a16", "", "no place in gptq", "no place in awq", "no quant_algo"},
    {"ct-mxfp8", "", "no place in gptq", "no place in awq", ""},
    {"ct-nvfp4a16", "", "no place in gptq", "no place in awq", ""},
    {"ct-nvfp4", "", "no place in gptq", "no place in awq", ""},
    {"modelopt-nvfp4", "its inverse is not exact", "no place in gptq", "no place in awq", ""},
    {"gptq-sym-g128", "", "", "", "no quant_algo"},
    {"gptq-asym-g64", "", "", "", "no quant_algo"},
    {"gptq-sym-g64-actorder", "act-order would be lost", "", "act-order would be lost", "no quant_algo"},
    {"gptq-x192-g128", "", "", "", "no quant_algo"},
    {"gptq-3bit", "", "", "", "no quant_algo"},
    {"gptq-8bit-channel", "", "", "4 bits, not of 8", "no quant_algo"},
    {"awq-g64", "", "", "", "no quant_algo"},
    {"fp8-block128", "", "no place in gptq", "no place in awq", "no quant_algo"},
    {"modelopt-fp8", "", "no place in gptq", "no place in awq", ""},
    {"gpt-oss-mxfp4", "biases", "biases", "biases", "biases"},
    {"deepseek-v4-fp4", "", "no place in gptq", "no place in awq", "no quant_algo"},
    {"kimi-nested-g32", "", "", "", "no quant_algo"},
};

TEST_F(Rewrite, EveryConventionToEveryOther) {
  int written = 0, refused = 0;
  for (const Expectation& expected : expectations) {
    const Checkpoint source = make(expected.kind);
    const std::pair<const char*, const char*> all[] = {{"compressed-tensors", expected.compressed_tensors},
                                                       {"gptq", expected.gptq},
                                                       {"awq", expected.awq},
                                                       {"modelopt", expected.modelopt}};
    for (const auto& [to, why] : all) {
      SCOPED_TRACE(std::string(expected.kind) + " to " + to);
      const fs::path directory = root_.path() / (std::string(expected.kind) + "-" + to);
      const auto report = rewrite(source, directory, {.to = to});
      if (*why != '\0') {
        EXPECT_FALSE(report);
        EXPECT_NE(report.status().message().find(why), std::string::npos) << report.status().message();
        EXPECT_FALSE(fs::exists(directory));
        ++refused;
        continue;
      }
      ASSERT_TRUE(report) << report.status().message();
      const Checkpoint copy = open(directory);
      EXPECT_EQ(copy.convention(), to);
      // AWQ has zero points always.
      if (std::string_view(to) == "awq" && !scheme(*source.stored_scheme()).weight.zero_point.stored()) {
        for (const Projection projection : {Projection::gate, Projection::up, Projection::down})
          EXPECT_EQ(weights(source, 1, projection), weights(copy, 1, projection));
      } else {
        expect_same(source, copy);
      }
      ++written;
    }
  }
  EXPECT_GE(written, 40);
  EXPECT_GE(refused, 40);
}

TEST_F(Rewrite, ThereAndBackHasTheSameBytes) {
  for (const auto& [kind, between] :
       {std::pair("gptq-sym-g128", "compressed-tensors"), std::pair("gptq-sym-g64-actorder", "gptq")}) {
    const Checkpoint source = make(kind);
    const fs::path there = root_.path() / "there", back = root_.path() / "back";
    ASSERT_TRUE(rewrite(source, there, {.to = between}));
    ASSERT_TRUE(rewrite(open(there), back, {.to = "gptq"}));
    const Checkpoint copy = open(back);
    ASSERT_EQ(copy.tensors().size(), source.tensors().size());
    for (const TensorEntry& entry : source.tensors()) {
      const auto a = source.tensor(entry.name), b = copy.tensor(entry.name);
      ASSERT_TRUE(b) << b.status().message();
      EXPECT_EQ(a->shape, b->shape);
      EXPECT_EQ(0, std::memcmp(a->data, b->data, a->bytes)) << entry.name;
    }
    fs::remove_all(there);
    fs::remove_all(back);
  }
}

TEST_F(Rewrite, LayersOutsideOfExpertsAsWell) {
  Files files = make_checkpoint("gptq-sym-g128");
  const std::string from = "model.layers.0.mlp.experts.0.gate_proj", to = "model.layers.0.self_attn.q_proj";
  add_layer(files, to, files.tensors, from);
  const Checkpoint source = save(files, "attention");
  ASSERT_EQ(source.other_quantized_layers().size(), 1u);
  ASSERT_TRUE(rewrite(source, root_.path() / "copy", {.to = "awq"}));
  const Checkpoint copy = open(root_.path() / "copy");
  ASSERT_EQ(copy.other_quantized_layers().size(), 1u);
  EXPECT_EQ(copy.find(to + ".g_idx"), nullptr);
  const auto a = source.quantized_layer(source.other_quantized_layers()[0]);
  const auto b = copy.quantized_layer(copy.other_quantized_layers()[0]);
  ASSERT_TRUE(a && b);
  std::vector<float> x(static_cast<std::size_t>(a->n * a->k)), y(x.size());
  dequantize(*a, x.data());
  dequantize(*b, y.data());
  EXPECT_EQ(x, y);
}

TEST_F(Rewrite, EmptyLayersAreRefused) {
  Files files = make_checkpoint("gptq-sym-g128");
  const std::string module = "model.layers.0.self_attn.q_proj";
  files.tensors.push_back({module + ".qweight", "I32", {0, 8}, ""});
  files.tensors.push_back({module + ".qzeros", "I32", {0, 1}, ""});
  files.tensors.push_back({module + ".scales", "F16", {0, 8}, ""});
  files.tensors.push_back({module + ".g_idx", "I32", {0}, ""});
  const Checkpoint source = save(files, "empty");
  expect_error(rewrite(source, root_.path() / "out", {.to = "awq"}).status(), Code::bad_file,
               {module, "8 x 0"});
}

TEST_F(Rewrite, LayersOfSeveralSchemes) {
  Files files = make_checkpoint("ct-w4a16-g128-rtn");
  const Files fp8 = make_checkpoint("ct-fp8-dynamic");
  const std::string from = "model.layers.0.mlp.experts.0.gate_proj", to = "model.layers.0.self_attn.q_proj";
  add_layer(files, to, fp8.tensors, from);
  nlohmann::json& groups = files.quantization()["config_groups"];
  groups["group_1"] = fp8.config["quantization_config"]["config_groups"]["group_0"];
  groups["group_1"]["targets"] = {"re:.*self_attn.*"};
  files.quantization()["format"] = "mixed-precision";
  const Checkpoint source = save(files, "mixed");
  ASSERT_TRUE(rewrite(source, root_.path() / "copy", {.to = "compressed-tensors"}));
  const Checkpoint copy = open(root_.path() / "copy");
  expect_same(source, copy);
  const auto config = nlohmann::json::parse(copy.config_text())["quantization_config"];
  EXPECT_EQ(config["format"], "mixed-precision");
  EXPECT_EQ(config["config_groups"].size(), 2u);
  EXPECT_EQ(config["version"], "0.19.0");
  const auto layer = copy.quantized_layer(copy.other_quantized_layers().at(0));
  ASSERT_TRUE(layer) << layer.status().message();
  EXPECT_EQ(layer->scheme, SchemeId::fp8_channel_afp8);
  expect_error(rewrite(source, root_.path() / "gptq", {.to = "gptq"}).status(), Code::unsupported,
               {"self_attn.q_proj", "no place in gptq"});
}

/// What the reader goes by is kept, wherever the config has it.
TEST_F(Rewrite, KeepsTheVersionAndTheKvCache) {
  const nlohmann::json cache{{"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}, {"dynamic", false}};
  Files inner = make_checkpoint("kimi-nested-g32");
  nlohmann::json& text = inner.config["text_config"];
  text["quantization_config"]["kv_cache_scheme"] = cache;
  Files older = make_checkpoint("ct-w4a16-g128-rtn");
  older.quantization()["kv_cache_scheme"] = cache;
  older.config["compression_config"] = older.quantization();
  older.config.erase("quantization_config");
  Files both = inner;
  both.config["text_config"]["compression_config"] = text["quantization_config"];
  both.config["text_config"].erase("quantization_config");
  for (const auto& [name, files] :
       {std::pair("inner", inner), std::pair("older", older), std::pair("both", both)}) {
    SCOPED_TRACE(name);
    const Checkpoint source = save(files, name);
    const fs::path directory = root_.path() / (std::string(name) + "-copy");
    ASSERT_TRUE(rewrite(source, directory, {.to = "compressed-tensors"}));
    const Checkpoint copy = open(directory);
    expect_same(source, copy);
    EXPECT_EQ(source.config().moe.activation_rule, ScaleRule::compressed_tensors);
    EXPECT_EQ(copy.config().moe.activation_rule, ScaleRule::compressed_tensors);
    EXPECT_TRUE(*copy.fp8_kv_cache());
    auto config = nlohmann::json::parse(copy.config_text());
    EXPECT_EQ(config["quantization_config"]["version"], "0.19.0");
    EXPECT_EQ(config["quantization_config"]["kv_cache_scheme"], cache);
    EXPECT_FALSE(config.contains("compression_config"));
    if (!config.contains("text_config")) continue;
    EXPECT_FALSE(config["text_config"].contains("quantization_config"));
    EXPECT_FALSE(config["text_config"].contains("compression_config"));
  }
}

/// Where hf_quant_config.json alone speaks of it.
TEST_F(Rewrite, TheKvCacheOfASideFile) {
  Files files = make_checkpoint("modelopt-fp8");
  const float one = 0.5f;
  files.tensors.push_back(
      {"model.layers.0.self_attn.k_proj.k_scale", "F32", {}, bytes_of_values(std::vector{one})});
  files.side["hf_quant_config.json"]["quantization"] = {{"quant_algo", "FP8"},
                                                        {"kv_cache_quant_algo", "FP8"}};
  const Checkpoint source = save(files, "side");
  EXPECT_TRUE(*source.fp8_kv_cache());
  ASSERT_TRUE(rewrite(source, root_.path() / "copy", {.to = "compressed-tensors"}));
  const Checkpoint copy = open(root_.path() / "copy");
  EXPECT_TRUE(*copy.fp8_kv_cache());
  EXPECT_NE(copy.find("model.layers.0.self_attn.k_scale"), nullptr);
  ASSERT_TRUE(rewrite(source, root_.path() / "same", {.to = "modelopt"}));
  EXPECT_TRUE(*open(root_.path() / "same").fp8_kv_cache());
  expect_error(rewrite(source, root_.path() / "awq", {.to = "awq"}).status(), Code::unsupported,
               {"kv_cache_scheme"});
}

/// Of experts they are zeros or an error; of other layers they are kept.
TEST_F(Rewrite, BiasesOfOtherLayersAreKept) {
  Files files = make_checkpoint("gptq-sym-g128");
  const std::string from = "model.layers.0.mlp.experts.0.gate_proj", to = "model.layers.0.self_attn.q_proj";
  add_layer(files, to, files.tensors, from);
  files.tensors.push_back({from + ".bias", "F16", {128}, std::string(256, '\0')});
  files.tensors.push_back({to + ".bias", "F16", {128}, std::string(256, '\1')});
  const Checkpoint source = save(files, "biased");
  for (const char* name : {"awq", "gptq", "compressed-tensors"}) {
    ASSERT_TRUE(rewrite(source, root_.path() / name, {.to = name}));
    const Checkpoint copy = open(root_.path() / name);
    const auto bias = copy.tensor(to + ".bias");
    ASSERT_TRUE(bias) << bias.status().message();
    EXPECT_EQ(std::string(256, '\1'), std::string(reinterpret_cast<const char*>(bias->data), bias->bytes));
    EXPECT_EQ(copy.find(from + ".bias"), nullptr);
  }
}

TEST_F(Rewrite, RefusesScalesThatDoNotFit) {
  Files files = make_checkpoint("ct-w4a16-g128-rtn");
  const std::uint16_t tiny = 0x1080;  // 5e-29 in bf16
  std::memcpy(files.tensor("experts.1.down_proj.weight_scale").data.data(), &tiny, 2);
  const Checkpoint source = save(files, "tiny");
  const auto report = rewrite(source, root_.path() / "out", {.to = "gptq"});
  expect_error(report.status(), Code::unsupported, {"experts.1.down_proj", "bf16", "f16"});
  EXPECT_TRUE(rewrite(source, root_.path() / "out", {.to = "compressed-tensors"}));
  expect_error(rewrite(source, root_.path() / "out", {.to = "compressed-tensors"}).status(),
               Code::invalid_argument, {"exists"});
}

TEST_F(Rewrite, RefusesUnquantizedSourcesAndUnknownConventions) {
  const Checkpoint plain = open(GATEFOLD_SOURCE_DIR "/models/tiny-moe");
  expect_error(rewrite(plain, root_.path() / "out", {.to = "gptq"}).status(), Code::invalid_argument,
               {"is not quantized"});
  expect_error(rewrite(plain, root_.path() / "out", {.to = "gguf"}).status(), Code::invalid_argument,
               {"gguf", "compressed-tensors, gptq, awq, modelopt"});
}

}  // namespace
}  // namespace gatefold
