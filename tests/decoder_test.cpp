#include "gatefold/decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "model_files.h"

namespace gatefold {
namespace {

struct Trace {
  std::vector<float> logits;
  std::map<int, std::vector<float>> inputs, outputs;  // of MoE layers
};

Trace trace(const Decoder& decoder, std::span<const std::int32_t> tokens) {
  Trace result;
  ForwardHooks hooks;
  hooks.logits = [&](std::int64_t first, std::int64_t rows, const float* logits) {
    const std::int64_t vocab = decoder.config().vocab;
    EXPECT_EQ(static_cast<std::int64_t>(result.logits.size()), first * vocab);
    result.logits.insert(result.logits.end(), logits, logits + rows * vocab);
  };
  hooks.moe = [&](int layer, std::int64_t, const MatrixView& input, const MatrixView& output) {
    const auto append = [](std::vector<float>& to, const MatrixView& from) {
      const auto* data = static_cast<const float*>(from.data);
      to.insert(to.end(), data, data + from.rows * from.cols);
    };
    append(result.inputs[layer], input);
    append(result.outputs[layer], output);
  };
  Sequence sequence = decoder.new_sequence();
  const Status status = decoder.forward(tokens, sequence, hooks);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(sequence.length(), static_cast<std::int64_t>(tokens.size()));
  return result;
}

// The trained model against transformers in f32 (models/tiny-moe/metrics.json: reference_source).
class TinyMoe : public testing::Test {
 protected:
  const std::string file = tiny_moe + "/reference.safetensors";
  const std::vector<std::int32_t> ids = read_tensor<std::int32_t>(file, "input_ids");

  std::vector<float> reference(const std::string& name) const { return read_tensor<float>(file, name); }
};

TEST_F(TinyMoe, MatchesReferenceInF32) {
  const Trace result = trace(load_decoder(tiny_moe, {.precision = Precision::f32}), ids);
  EXPECT_LE(relative_l2(result.logits, reference("logits")), 1e-5);
  for (const int layer : {0, 3}) {
    const std::string prefix = "layers." + std::to_string(layer) + ".mlp.";
    EXPECT_LE(relative_l2(result.inputs.at(layer), reference(prefix + "input")), 1e-5) << layer;
    EXPECT_LE(relative_l2(result.outputs.at(layer), reference(prefix + "output")), 1e-5) << layer;
  }
}

TEST_F(TinyMoe, MatchesReferenceInNativePrecision) {
  const Decoder decoder = load_decoder(tiny_moe);
  EXPECT_EQ(decoder.scheme(), SchemeId::bf16);
  EXPECT_EQ(decoder.expert_weights(), 4u * 16 * 3 * 128 * 256);
  const Trace result = trace(decoder, ids);
  EXPECT_LE(relative_l2(result.logits, reference("logits")), 2e-3);
  // An MoE layer by itself: within the decoder its input differs already, and with it a few of the choices of
  // experts.
  for (const int layer : {0, 3}) {
    const std::string prefix = "layers." + std::to_string(layer) + ".mlp.";
    const auto experts =
        load_experts(open_checkpoint(tiny_moe), {.layer = layer, .scheme = {}, .device = {}, .quantize = {}});
    ASSERT_TRUE(experts) << experts.status().message();
    const auto plan = MoePlan::create(experts->spec(), {});
    ASSERT_TRUE(plan) << plan.status().message();
    const std::vector<float> input = reference(prefix + "input");
    std::vector<float> output(input.size());
    std::vector<std::byte> workspace(plan->workspace_bytes());
    MoeInputs inputs;
    inputs.hidden = {input.data(), DType::f32, 512, 256};
    MoeOutputs outputs;
    outputs.hidden = {output.data(), DType::f32, 512, 256};
    const Status status = plan->run(*experts, inputs, outputs, workspace);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_LE(relative_l2(output, reference(prefix + "output")), 2e-3) << layer;
  }
}

// However the text is cut into calls and steps, and however many threads run: the same bits.
TEST_F(TinyMoe, SameBitsForEverySplitAndThreadCount) {
  const auto tokens = std::span(ids).first(200);
  const std::vector<float> whole = trace(load_decoder(tiny_moe, {.threads = 1}), tokens).logits;
  const auto equals_whole = [&](const std::vector<float>& logits, std::int64_t first) {
    return std::memcmp(logits.data(), whole.data() + first * 256, logits.size() * sizeof(float)) == 0;
  };
  for (const int threads : {1, 2, 3}) {
    for (const int max_tokens : {1, 7, 64, 512}) {
      SCOPED_TRACE("threads " + std::to_string(threads) + ", max_tokens " + std::to_string(max_tokens));
      const Decoder decoder = load_decoder(tiny_moe, {.threads = threads, .max_tokens = max_tokens});
      EXPECT_TRUE(equals_whole(trace(decoder, tokens).logits, 0));
      // A prompt, some tokens one by one, then the rest; twice, with the memory of the first time.
      Sequence sequence = decoder.new_sequence();
      for (int round = 0; round < 2; ++round) {
        sequence.clear();
        std::size_t at = 0;
        for (const std::size_t count : {50, 1, 1, 1, 30, 1, 116}) {
          std::vector<float> logits(256 * std::min<std::size_t>(count, 20));
          const Status status = decoder.forward(tokens.subspan(at, count), sequence, logits);
          ASSERT_TRUE(status.ok()) << status.message();
          at += count;
          EXPECT_TRUE(equals_whole(logits, static_cast<std::int64_t>(at - logits.size() / 256))) << at;
        }
      }
    }
  }
}

// The same promise for every scheme that can keep it.
TEST_F(TinyMoe, EverySchemeSameBitsForEverySplit) {
  const auto tokens = std::span(ids).first(48);
  for_each_scheme([&]<class Tag>() {
    SCOPED_TRACE(Tag::scheme.name);
    const Decoder decoder = load_decoder(tiny_moe, {.scheme = Tag::id});
    EXPECT_EQ(decoder.scheme(), Tag::id);
    const std::vector<float> whole = trace(decoder, tokens).logits;
    EXPECT_EQ(trace(decoder, tokens).logits, whole);
    if (Tag::scheme.batch_dependent()) return;
    std::vector<float> logits(17 * 256);
    Sequence sequence = decoder.new_sequence();
    ASSERT_TRUE(decoder.forward(tokens.first(31), sequence, std::span<float>()).ok());
    ASSERT_TRUE(decoder.forward(tokens.subspan(31), sequence, logits).ok());
    EXPECT_TRUE(std::equal(logits.begin(), logits.end(), whole.begin() + 31 * 256));
  });
}

TEST_F(TinyMoe, ThreadsShareADecoder) {
  const Decoder decoder = load_decoder(tiny_moe, {.threads = 2});
  const auto tokens = std::span(ids).first(64);
  const std::vector<float> expected = trace(decoder, tokens).logits;
  std::vector<std::vector<float>> results(4, std::vector<float>(expected.size()));
  std::vector<std::thread> threads;
  for (auto& result : results)
    threads.emplace_back([&] {
      Sequence sequence = decoder.new_sequence();
      EXPECT_TRUE(decoder.forward(tokens, sequence, result).ok());
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, expected);
}

TEST_F(TinyMoe, RefusesBadCalls) {
  const Decoder decoder = load_decoder(tiny_moe);
  Sequence sequence = decoder.new_sequence();
  const auto message = [&](std::vector<std::int32_t> tokens, std::size_t room) {
    std::vector<float> logits(room);
    const Status status = decoder.forward(tokens, sequence, logits);
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_EQ(sequence.length(), 0);
    return status.message();
  };
  EXPECT_EQ(message({1, 2, 256}, 0), "token 2 is 256: not in [0, 256)");
  EXPECT_EQ(message({1, -5, 3}, 0), "token 1 is -5: not in [0, 256)");
  EXPECT_NE(message({1, 2}, 255).find("255"), std::string::npos);
  EXPECT_NE(message({1}, 512).find("up to 1 tokens"), std::string::npos);

  const Decoder other = load_decoder(tiny_moe);
  Sequence foreign = other.new_sequence();
  EXPECT_EQ(decoder.forward(ids, foreign, std::span<float>()).code(), Code::invalid_argument);

  EXPECT_TRUE(decoder.forward({}, sequence, std::span<float>()).ok());
  EXPECT_EQ(sequence.length(), 0);
}

TEST_F(TinyMoe, RefusesBadOptions) {
  const Checkpoint checkpoint = open_checkpoint(tiny_moe);
  for (const DecoderOptions& options : {DecoderOptions{.threads = -1}, DecoderOptions{.max_tokens = 0},
                                        DecoderOptions{.max_tokens = 1 << 30}})
    EXPECT_EQ(Decoder::load(checkpoint, options).status().code(), Code::invalid_argument);
}

// Tiny random models, one for each way in which families and RoPE types differ
// (tests/golden/make_decoder.py).
class Golden : public testing::TestWithParam<const char*> {
 protected:
  const std::string directory = golden_models + "/" + GetParam();
  const std::vector<std::int32_t> ids =
      read_tensor<std::int32_t>(directory + "/reference.safetensors", "input_ids");
};

// In one step and in several; also beyond max_positions.
TEST_P(Golden, MatchesTransformers) {
  const std::string reference = directory + "/reference.safetensors";
  for (const int max_tokens : {512, 50}) {
    const Decoder decoder = load_decoder(directory, {.precision = Precision::f32, .max_tokens = max_tokens});
    EXPECT_FALSE(decoder.byte_level());
    EXPECT_LT(decoder.config().max_positions, static_cast<int>(ids.size()));
    const std::vector<float> logits = trace(decoder, ids).logits;
    const std::size_t vocab = decoder.config().vocab;
    std::vector<float> rows;
    for (const int row : read_tensor<std::int32_t>(reference, "rows"))
      rows.insert(rows.end(), logits.begin() + row * vocab, logits.begin() + (row + 1) * vocab);
    EXPECT_LE(relative_l2(rows, read_tensor<float>(reference, "logits")), 1e-5);
  }
}

TEST_P(Golden, SameBitsForEverySplit) {
  const Decoder decoder = load_decoder(directory);
  // Beyond max_positions dynamic RoPE follows the length of the call.
  const bool is_dynamic = decoder.config().rope.type == RopeConfig::Type::dynamic;
  const auto tokens = std::span(ids).first(is_dynamic ? decoder.config().max_positions : ids.size());
  const std::vector<float> whole = trace(decoder, tokens).logits;
  std::vector<float> parts;
  Sequence sequence = decoder.new_sequence();
  const std::size_t vocab = decoder.config().vocab;
  for (std::size_t at = 0; at < tokens.size(); at += 11) {
    const auto part = tokens.subspan(at, std::min<std::size_t>(11, tokens.size() - at));
    parts.resize((at + part.size()) * vocab);
    const Status status = decoder.forward(part, sequence, std::span(parts).subspan(at * vocab));
    ASSERT_TRUE(status.ok()) << status.message();
  }
  EXPECT_EQ(std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(Models, Golden,
                         testing::Values("mixtral-sliding-llama3", "mixtral-f16-tied-linear",
                                         "qwen2-moe-dynamic", "qwen3-moe-mlp-yarn", "qwen3-moe-f32-bias"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Layers of Qwen2-MoE slide one by one: what the first layer's experts see tells whether it does.
TEST(Qwen2Moe, SlidesLayerByLayer) {
  const std::string source = golden_models + "/qwen2-moe-dynamic";
  constexpr std::size_t window = 24, hidden = 32;
  const auto ids = read_tensor<std::int32_t>(source + "/reference.safetensors", "input_ids");
  const auto run = [&](const std::string& first, const std::string& second, bool use = true) {
    const TemporaryDirectory directory;
    directory.copy(source + "/model.safetensors");
    auto config = nlohmann::json::parse(read_file(source + "/config.json"));
    config["use_sliding_window"] = use, config["sliding_window"] = window;
    config["layer_types"] = {first + "_attention", second + "_attention"};
    if (first.empty()) config.erase("layer_types");
    directory.write("config.json", config.dump());
    return trace(load_decoder(directory.string()), std::span(ids).first(100));
  };
  const Trace full = run("full", "full"), last = run("full", "sliding"), one = run("sliding", "full"),
              both = run("sliding", "sliding");
  EXPECT_EQ(full.logits, run("full", "full", false).logits);
  EXPECT_EQ(one.logits, run("", "").logits);
  EXPECT_EQ(last.inputs.at(0), full.inputs.at(0));
  EXPECT_EQ(one.inputs.at(0), both.inputs.at(0));
  const auto same_rows = [](const std::vector<float>& a, const std::vector<float>& b, std::size_t width) {
    return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin()) / width;
  };
  EXPECT_EQ(same_rows(one.inputs.at(0), full.inputs.at(0), hidden), window);
  EXPECT_EQ(same_rows(last.logits, full.logits, 64), window);
  EXPECT_EQ(same_rows(both.logits, one.logits, 64), window);
}

// A copy of a golden model with one thing changed.
Status load_changed(const std::string& model, const std::string& file, const std::string& from,
                    const std::string& to) {
  const TemporaryDirectory directory;
  for (const std::string name : {"config.json", "model.safetensors"}) {
    const bool change = name == file;
    directory.copy(golden_models + "/" + model + "/" + name, change ? from : "", change ? to : "");
  }
  const auto checkpoint = Checkpoint::open(directory.string());
  if (!checkpoint) return checkpoint.status();
  return Decoder::load(*checkpoint).status();
}

void expect_error(const Status& status, Code code, std::initializer_list<const char*> parts) {
  EXPECT_EQ(status.code(), code) << status.message();
  for (const char* part : parts)
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " in: " << status.message();
}

TEST(BadModel, MissingTensor) {
  expect_error(
      load_changed("mixtral-sliding-llama3", "model.safetensors", "model.norm.weight", "model.morn.weight"),
      Code::bad_file, {"model.norm.weight"});
  expect_error(load_changed("qwen3-moe-mlp-yarn", "model.safetensors", "layers.1.self_attn.q_norm.weight",
                            "layers.1.self_attn.r_norm.weight"),
               Code::bad_file, {"model.layers.1.self_attn.q_norm.weight"});
  expect_error(load_changed("qwen2-moe-dynamic", "model.safetensors", "layers.0.self_attn.v_proj.bias",
                            "layers.0.self_attn.v_proj.bios"),
               Code::bad_file, {"model.layers.0.self_attn.v_proj.bias"});
}

// A token whose embedding is NaN spoils its sequence, and no other.
TEST(BadModel, ClearForgetsNaN) {
  const std::string source = golden_models + "/mixtral-sliding-llama3";
  const TemporaryDirectory directory;
  directory.copy(source + "/config.json");
  std::string content = read_file(source + "/model.safetensors");
  const auto header = parse_safetensors_header(std::as_bytes(std::span(content)), content.size(), "model");
  ASSERT_TRUE(header);
  for (const TensorEntry& entry : header->tensors)
    if (entry.name == "model.embed_tokens.weight")
      content.replace(entry.begin + 5 * 32 * 2, 32 * 2, std::string(32 * 2, '\xff'));
  directory.write("model.safetensors", content);

  const Decoder decoder = load_decoder(directory.string());
  Sequence sequence = decoder.new_sequence();
  std::vector<float> logits(64);
  ASSERT_TRUE(decoder.forward(std::vector<std::int32_t>(40, 5), sequence, logits).ok());
  EXPECT_TRUE(std::isnan(logits[0]));
  sequence.clear();
  const std::vector<std::int32_t> tokens = {1, 2, 3};
  ASSERT_TRUE(decoder.forward(tokens, sequence, logits).ok());
  Sequence fresh = decoder.new_sequence();
  std::vector<float> expected(64);
  ASSERT_TRUE(decoder.forward(tokens, fresh, expected).ok());
  EXPECT_EQ(logits, expected);
}

TEST(BadModel, WrongShape) {
  // Two heads are twice as wide, so that the keys and values would be 32 wide, too.
  expect_error(load_changed("mixtral-sliding-llama3", "config.json", "\"num_attention_heads\": 4",
                            "\"num_attention_heads\": 2"),
               Code::bad_file, {"model.layers.0.self_attn.k_proj.weight", "[16, 32]", "[32, 32]"});
}

TEST(BadModel, RotatesAPartOfAHead) {
  const std::string theta = "\"rope_theta\": 10000.0";
  expect_error(load_changed("mixtral-f16-tied-linear", "config.json", theta,
                            theta + ", \"partial_rotary_factor\": 0.5"),
               Code::unsupported, {"partial_rotary_factor is 0.5"});
}

// A bias that the config does not ask for would be left out without a word.
TEST(BadModel, BiasThatNothingAdds) {
  expect_error(load_changed("qwen2-moe-dynamic", "config.json", "\"qkv_bias\": true", "\"qkv_bias\": false"),
               Code::unsupported, {"model.layers.0.self_attn.q_proj.bias", "without bias"});
}

// Whole checkpoints of other tools, which the library can read but the decoder cannot run.
TEST(BadModel, Unsupported) {
  const char* root = std::getenv("GATEFOLD_CHECKPOINTS");
  if (root == nullptr) GTEST_SKIP() << "GATEFOLD_CHECKPOINTS is not set";
  const auto load = [&](const std::string& name) {
    const auto checkpoint = Checkpoint::open(std::string(root) + "/" + name);
    return checkpoint ? Decoder::load(*checkpoint).status() : checkpoint.status();
  };
  expect_error(load("deepseek-v3-bf16"), Code::unsupported, {"deepseek_v3", "qwen3_moe"});
  expect_error(load("ct-w4a16-g128-gptq"), Code::unsupported,
               {"model.layers.0.self_attn.q_proj is quantized"});
}

}  // namespace
}  // namespace gatefold
