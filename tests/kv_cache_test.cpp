// Keys and values as e4m3: what attention makes of them, and checkpoints that ask for it.
#include <nlohmann/json.hpp>
#include <random>

#include "gatefold/calibrate.h"
#include "gatefold/codec.h"
#include "model/attention.h"
#include "model/softmax.h"
#include "model_files.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

/// A safetensors file with two scales more in each layer; the name of the first may be another one.
std::string with_scales(const std::string& file, const std::string& first, const std::vector<float>& scales) {
  std::uint64_t size = 0;
  std::memcpy(&size, file.data(), 8);
  auto header = nlohmann::json::parse(file.substr(8, size));
  std::string data = file.substr(8 + size);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const std::string name = i == 0 ? first : i % 2 == 0 ? "k_proj.k_scale" : "v_proj.v_scale";
    header["model.layers." + std::to_string(i / 2) + ".self_attn." + name] = {
        {"dtype", "F32"},
        {"shape", nlohmann::json::array()},
        {"data_offsets", {data.size(), data.size() + 4}}};
    data.append(reinterpret_cast<const char*>(&scales[i]), 4);
  }
  // Both names of one.
  if (first == "k_scale")
    header["model.layers.0.self_attn.k_proj.k_scale"] = {
        {"dtype", "F32"}, {"shape", {0}}, {"data_offsets", {data.size(), data.size()}}};
  const std::string text = header.dump();
  size = text.size();
  return std::string(reinterpret_cast<const char*>(&size), 8) + text + data;
}

Recipe fp8_cache() {
  return {.name = "kv.json", .rules = {}, .fp8_kv_cache = true, .comment = {}};
}

/// Rows as a cache holds them, by the rule, one number at a time.
struct Codes {
  std::vector<std::byte> codes;
  std::vector<float> values;

  Codes(const std::vector<float>& x, float scale) {
    for (const float value : x) {
      const std::uint32_t code = encode<formats::e4m3>(value / scale);
      codes.push_back(static_cast<std::byte>(code));
      values.push_back(decode<formats::e4m3>(code) * scale);
    }
  }
};

TEST(KvCache, AttentionReadsCodes) {
  const AttentionShape shape{.heads = 6, .kv_heads = 2, .head_dim = 24, .sliding_window = 90};
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const std::int64_t positions = 2 * key_block, width = shape.kv_heads * shape.head_dim;
  std::vector<float> queries(positions * shape.heads * shape.head_dim), keys(positions * width),
      values(positions * width);
  for (auto* vector : {&queries, &keys, &values})
    for (float& x : *vector) x = 3 * normal(random);
  const Codes k(keys, 0.01f), v(values, 0.5f);
  std::vector<float> expected(queries.size()), out(queries.size());
  attention(shape, {queries.data(), {.values = k.values.data()}, {.values = v.values.data()}, 0, positions},
            expected.data(), 2);
  attention(shape,
            {queries.data(),
             {.codes = k.codes.data(), .scale = 0.01f},
             {.codes = v.codes.data(), .scale = 0.5f},
             0,
             positions},
            out.data(), 2);
  EXPECT_LT(relative_l2(out, expected), 1e-6);
}

class Fp8Model : public testing::Test {
 protected:
  const std::vector<std::int32_t> ids_ = [] {
    const std::string text = read_file(tiny_moe + "/valid.txt").substr(0, 2048);
    return *text_tokens(open_checkpoint(tiny_moe), text);
  }();

  std::vector<float> logits(const Decoder& decoder, std::initializer_list<std::size_t> pieces) {
    Sequence sequence = decoder.new_sequence();
    std::vector<float> all;
    std::size_t at = 0;
    for (int round = 0; round < 2; ++round) {  // the second with the memory of the first
      sequence.clear();
      all.clear();
      at = 0;
      for (const std::size_t count : pieces) {
        std::vector<float> piece(count * 256);
        const Status status = decoder.forward(std::span(ids_).subspan(at, count), sequence, piece);
        EXPECT_TRUE(status.ok()) << status.message();
        all.insert(all.end(), piece.begin(), piece.end());
        at += count;
      }
    }
    return all;
  }

  double loss(const Decoder& decoder) { return evaluate(decoder, ids_)->nats_per_token; }

  TemporaryDirectory folder_;
};

TEST_F(Fp8Model, SameBitsForEverySplit) {
  const std::vector<float> whole =
      logits(load_decoder(tiny_moe, {.recipe = fp8_cache(), .threads = 1}), {150});
  for (const int max_tokens : {7, 512}) {
    const Decoder decoder =
        load_decoder(tiny_moe, {.recipe = fp8_cache(), .threads = 2, .max_tokens = max_tokens});
    EXPECT_EQ(logits(decoder, {150}), whole);
    EXPECT_EQ(logits(decoder, {60, 1, 1, 30, 58}), whole);
  }
  EXPECT_NE(logits(load_decoder(tiny_moe), {150}), whole);
}

// The first layer's cache: keys and values are those of the unquantized model, and its output is what
// attention makes of them after rounding; seen as the input of the first MoE layer.
TEST_F(Fp8Model, RoundsByTheRule) {
  std::vector<float> keys, values, plain, rounded;
  const auto run = [&](const Decoder& decoder, std::vector<float>& input) {
    ForwardHooks hooks;
    hooks.kv = [&](int layer, const MatrixView& k, const MatrixView& v) {
      const auto* kd = static_cast<const float*>(k.data);
      const auto* vd = static_cast<const float*>(v.data);
      if (layer != 0) return;
      keys.assign(kd, kd + k.rows * k.cols);
      values.assign(vd, vd + v.rows * v.cols);
    };
    hooks.moe = [&](int layer, std::int64_t, const MatrixView& x, const MatrixView&) {
      const auto* data = static_cast<const float*>(x.data);
      if (layer == 0) input.assign(data, data + x.rows * x.cols);
    };
    Sequence sequence = decoder.new_sequence();
    ASSERT_TRUE(decoder.forward(std::span(ids_).first(100), sequence, hooks).ok());
  };
  run(load_decoder(tiny_moe), plain);
  const std::vector<float> exact_keys = keys, exact_values = values;
  run(load_decoder(tiny_moe, {.recipe = fp8_cache()}), rounded);
  EXPECT_EQ(keys, exact_keys);
  EXPECT_EQ(values, exact_values);
  const double difference = relative_l2(rounded, plain);
  EXPECT_GT(difference, 1e-4);
  EXPECT_LT(difference, 0.05);
}

TEST_F(Fp8Model, LosesLittle) {
  const double exact = loss(load_decoder(tiny_moe));
  const double rounded = loss(load_decoder(tiny_moe, {.recipe = fp8_cache()}));
  EXPECT_NE(rounded, exact);
  EXPECT_NEAR(rounded, exact, 0.01);
}

TEST_F(Fp8Model, ScalesAreThoseOfTheText) {
  const Checkpoint source = open_checkpoint(tiny_moe);
  const auto scales = search_kv_scales(source, std::span(ids_).first(512), 256);
  ASSERT_TRUE(scales) << scales.status().message();
  ASSERT_EQ(scales->size(), 4u);
  float largest = 0;
  ForwardHooks hooks;
  hooks.kv = [&](int layer, const MatrixView& k, const MatrixView&) {
    const auto* data = static_cast<const float*>(k.data);
    for (std::int64_t i = 0; layer == 3 && i < k.rows * k.cols; ++i)
      largest = std::max(largest, std::fabs(data[i]));
  };
  const Decoder decoder = load_decoder(tiny_moe);
  Sequence sequence = decoder.new_sequence();
  for (const std::size_t at : {0, 256}) {
    sequence.clear();
    ASSERT_TRUE(decoder.forward(std::span(ids_).subspan(at, 256), sequence, hooks).ok());
  }
  EXPECT_FLOAT_EQ((*scales)[3].key, largest / 448);
  EXPECT_FALSE(search_kv_scales(source, std::span(ids_).first(100), 256));
}

TEST_F(Fp8Model, IsWrittenAndReadBack) {
  ConvertOptions options;
  options.recipe = fp8_cache();
  options.recipe->rules = {{".*\\.experts\\.", SchemeId::int8}};
  const auto scales = search_kv_scales(open_checkpoint(tiny_moe), ids_);
  options.kv_scales = *scales;
  ASSERT_TRUE(convert(open_checkpoint(tiny_moe), folder_ / "out", options));
  const Checkpoint written = open_checkpoint((folder_ / "out").string());
  ASSERT_TRUE(written.fp8_kv_cache());
  EXPECT_TRUE(*written.fp8_kv_cache());
  EXPECT_NE(written.config_text().find("kv_cache_scheme\": {"), std::string::npos);
  const auto stored =
      read_tensor<float>(folder_ / "out" / "model.safetensors", "model.layers.2.self_attn.v_scale");
  EXPECT_EQ(stored, std::vector<float>{(*scales)[2].value});

  const double exact = loss(load_decoder(tiny_moe, {.scheme = SchemeId::int8}));
  const double fp8 = loss(load_decoder((folder_ / "out").string()));
  EXPECT_NE(fp8, exact);
  EXPECT_NEAR(fp8, exact, 0.01);
  // With other scales it computes something else.
  EXPECT_NE(fp8, loss(load_decoder(tiny_moe, {.recipe = options.recipe})));

  const auto gptq = rewrite(written, folder_ / "gptq", {.to = "gptq"});
  ASSERT_FALSE(gptq);
  EXPECT_NE(gptq.status().message().find("kv_cache_scheme"), std::string::npos) << gptq.status().message();
  ASSERT_TRUE(rewrite(written, folder_ / "same", {.to = "compressed-tensors"}));
  EXPECT_TRUE(*open_checkpoint((folder_ / "same").string()).fp8_kv_cache());
}

/// As ModelOpt writes it: named otherwise, under another scheme.
TEST_F(Fp8Model, OfModelOpt) {
  const Recipe experts{.name = "r.json", .rules = {{".*\\.experts\\.", SchemeId::fp8_channel_afp8}}};
  ConvertOptions options;
  options.recipe = experts;
  options.recipe->fp8_kv_cache = true;
  options.kv_scales = {{0.01f, 0.02f}, {0.03f, 0.04f}, {0.05f, 0.06f}, {0.07f, 0.08f}};
  ASSERT_TRUE(convert(open_checkpoint(tiny_moe), folder_ / "ct", options));
  const double expected = loss(load_decoder((folder_ / "ct").string(), {.weights_only = true}));

  options.recipe = experts;
  options.kv_scales.clear();
  ASSERT_TRUE(convert(open_checkpoint(tiny_moe), folder_ / "plain", options));
  ASSERT_TRUE(
      rewrite(open_checkpoint((folder_ / "plain").string()), folder_ / "modelopt", {.to = "modelopt"}));
  const fs::path file = folder_ / "modelopt" / "model.safetensors";
  const std::string plain = read_file(file), config = read_file(folder_ / "modelopt" / "config.json");
  const auto set = [&](const std::string& member, const std::string& of_layer_0, std::vector<float> scales) {
    std::ofstream(folder_ / "modelopt" / "config.json")
        << std::string(config).replace(config.find("\"quant_method\""), 0, member + ", ");
    std::ofstream(file, std::ios::binary) << with_scales(plain, of_layer_0, scales);
    return open_checkpoint((folder_ / "modelopt").string());
  };
  const std::vector<float> scales = {0.01f, 0.02f, 0.03f, 0.04f, 0.05f, 0.06f, 0.07f, 0.08f};
  const std::string said = R"("kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"})";
  for (const std::string& member : {said, std::string(R"("kv_cache_quant_algo": "FP8")")}) {
    const Checkpoint source = set(member, "k_proj.k_scale", scales);
    EXPECT_TRUE(*source.fp8_kv_cache());
    EXPECT_EQ(loss(load_decoder((folder_ / "modelopt").string(), {.weights_only = true})), expected);
    for (const char* to : {"compressed-tensors", "modelopt"}) {
      const fs::path copy = folder_ / ("to-" + std::string(to));
      const auto report = rewrite(source, copy, {.to = to});
      ASSERT_TRUE(report) << report.status().message();
      EXPECT_TRUE(*open_checkpoint(copy.string()).fp8_kv_cache());
      EXPECT_EQ(loss(load_decoder(copy.string(), {.weights_only = true})), expected) << to;
      fs::remove_all(copy);
    }
    EXPECT_NE(convert(source, folder_ / "x", {}).status().message().find("quantized already"),
              std::string::npos);
  }
  const auto awq = rewrite(set(said, "k_proj.k_scale", scales), folder_ / "x", {.to = "awq"}).status();
  EXPECT_NE(awq.message().find("kv_cache_scheme"), std::string::npos) << awq.message();
  const auto name =
      rewrite(set(said, "kv_b_proj.k_scale", scales), folder_ / "x", {.to = "compressed-tensors"}).status();
  EXPECT_NE(name.message().find("kv_b_proj.k_scale"), std::string::npos) << name.message();
  const auto twice =
      rewrite(set(said, "k_scale", scales), folder_ / "x", {.to = "compressed-tensors"}).status();
  EXPECT_NE(twice.message().find("written twice"), std::string::npos) << twice.message();
  const Checkpoint int8 = set(R"("kv_cache_quant_algo": "INT8")", "k_proj.k_scale", scales);
  EXPECT_NE(int8.fp8_kv_cache().status().message().find("'INT8'"), std::string::npos);
  EXPECT_FALSE(Decoder::load(int8));
  const std::string null = R"("kv_cache_scheme": null, "kv_cache_quant_algo": null)";
  EXPECT_FALSE(*set(null, "k_proj.k_scale", scales).fp8_kv_cache());
}

/// What is quantized anew would keep the factors, but lose the scheme.
TEST_F(Fp8Model, IsNotQuantizedAgain) {
  ConvertOptions options;
  options.recipe = fp8_cache();
  ASSERT_TRUE(convert(open_checkpoint(tiny_moe), folder_ / "out", options));
  const Checkpoint source = open_checkpoint((folder_ / "out").string());
  const auto expect_refused = [](const Status& status) {
    EXPECT_NE(status.message().find("its KV cache is quantized already"), std::string::npos)
        << status.message();
  };
  expect_refused(convert(source, folder_ / "x", options).status());
  expect_refused(convert(source, folder_ / "x", {.scheme = SchemeId::mxfp4}).status());
  expect_refused(calibrate(source, folder_ / "x", ids_, {.scheme = SchemeId::mxfp4}).status());

  // Factors that nothing refers to.
  std::string config = read_file(folder_ / "out" / "config.json");
  const std::size_t begin = config.find("\"kv_cache_scheme\": {"), end = config.find('}', begin) + 1;
  std::ofstream(folder_ / "out" / "config.json") << config.replace(begin, end - begin, "\"unused\": 0");
  const auto twice = convert(open_checkpoint((folder_ / "out").string()), folder_ / "x", options).status();
  EXPECT_NE(twice.message().find("self_attn.k_scale' would be written twice"), std::string::npos)
      << twice.message();
}

TEST_F(Fp8Model, WhatIsRefused) {
  ConvertOptions options;
  options.recipe = fp8_cache();
  ASSERT_TRUE(convert(open_checkpoint(tiny_moe), folder_ / "out", options));
  const auto error = [&](const std::string& file, const std::string& from, const std::string& to) {
    const TemporaryDirectory changed;
    for (const char* name : {"config.json", "model.safetensors"})
      changed.copy(folder_ / "out" / name, file == name ? from : "", file == name ? to : "");
    const auto decoder = Decoder::load(open_checkpoint(changed.string()));  // it opens all the same
    EXPECT_FALSE(decoder);
    return decoder.status().message();
  };
  EXPECT_NE(
      error("config.json", "\"strategy\": \"tensor\"", "\"strategy\": \"channel\"").find("kv_cache_scheme"),
      std::string::npos);
  EXPECT_NE(error("config.json", "\"type\": \"float\"", "\"type\": \"int\"").find("kv_cache_scheme"),
            std::string::npos);
  options.kv_scales = {{1, 1}, {1, 1}, {1, -1}, {1, 1}};
  ASSERT_TRUE(convert(open_checkpoint(tiny_moe), folder_ / "negative", options));
  const auto negative = Decoder::load(open_checkpoint((folder_ / "negative").string()));
  ASSERT_FALSE(negative);
  EXPECT_NE(negative.status().message().find("layers.2.self_attn.v_scale is -1"), std::string::npos)
      << negative.status().message();
  options.kv_scales.resize(3);
  EXPECT_FALSE(convert(open_checkpoint(tiny_moe), folder_ / "x", options));
}

}  // namespace
}  // namespace gatefold
