// config.json and the shard index: what is read from good ones, and what is said about bad ones.
#include <cmath>
#include <limits>

#include "checkpoint/index.h"
#include "model_configs.h"

namespace gatefold {
namespace {

TEST(Config, WhichLayersAreMoe) {
  EXPECT_EQ(good(with(qwen3(), "decoder_sparse_step", 2)).is_moe,
            (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(good(with(qwen3(), "mlp_only_layers", {0, 3})).is_moe,
            (std::vector<bool>{false, true, true, false}));
  for (const json& layer : {json(4), json(-1), json(1.5), json("0"), json(1e300)})
    expect_bad(with(qwen3(), "mlp_only_layers", json::array({layer})),
               {"mlp_only_layers", layer.dump(), "4 layers"});
  expect_bad(with(qwen3(), "mlp_only_layers", 1), {"mlp_only_layers", "1"});
  expect_bad(with(qwen3(), "decoder_sparse_step", 0), {"decoder_sparse_step", "0"});
}

TEST(Config, KeysThatMoved) {
  json config = without(qwen3(), "num_experts");
  config["num_local_experts"] = 16;
  EXPECT_EQ(good(config).moe.experts, 16);
  config["num_experts"] = 16;
  EXPECT_EQ(good(config).moe.experts, 16);
  config["num_experts"] = 17;
  expect_bad(config, {"num_experts", "num_local_experts", "16", "17"});
  expect_bad(without(qwen3(), "num_experts"), {"no num_experts or num_local_experts"});

  config = without(qwen3(), "torch_dtype");
  config["dtype"] = "float16";
  EXPECT_EQ(good(config).dtype, DType::f16);
  EXPECT_EQ(good(config).moe.scheme, SchemeId::f16);
  EXPECT_EQ(good(config).moe.act_dtype, DType::f16);
  config["dtype"] = "float32";
  EXPECT_EQ(good(config).dtype, DType::f32);
  EXPECT_EQ(good(config).moe.scheme, SchemeId::bf16);
  EXPECT_EQ(good(config).moe.act_dtype, DType::bf16);
  expect_bad(with(config, "dtype", "int8"), {"dtype", "'int8'"}, Code::unsupported);

  config = without(without(qwen3(), "rope_theta"), "rope_scaling");
  config["rope_parameters"] = {{"rope_theta", 5e5}, {"rope_type", "default"}};
  EXPECT_EQ(good(config).rope.theta, 5e5);

  config = {
      {"model_type", "outer"}, {"text_config", qwen3()}, {"quantization_config", {{"quant_method", "x"}}}};
  const auto nested = parse(config);
  ASSERT_TRUE(nested) << nested.status().message();
  EXPECT_EQ(nested->model.model_type, "qwen3_moe");
  EXPECT_EQ(nested->quantization["quant_method"], "x");
}

TEST(Config, Rope) {
  const auto scaled = [](const json& scaling) { return with(qwen3(), "rope_scaling", scaling); };
  EXPECT_EQ(good(scaled({{"type", "linear"}, {"factor", 2}})).rope.factor, 2.0);
  EXPECT_EQ(good(scaled({{"rope_type", "dynamic"}, {"factor", 2.5}})).rope.type, RopeConfig::Type::dynamic);
  EXPECT_EQ(good(scaled({{"rope_type", "dynamic"}, {"factor", 2.5}})).rope.original_max_positions, 2048);

  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 512}};
  EXPECT_EQ(good(scaled(llama3)).rope.type, RopeConfig::Type::llama3);
  EXPECT_EQ(good(scaled(llama3)).rope.original_max_positions, 512);
  expect_bad(scaled(with(llama3, "high_freq_factor", 1.0)), {"rope_scaling", "high_freq_factor 1"});
  expect_bad(scaled(without(llama3, "low_freq_factor")), {"rope_scaling", "no low_freq_factor"});

  const RopeConfig yarn = good(scaled({{"rope_type", "yarn"},
                                       {"factor", 4},
                                       {"beta_fast", 16},
                                       {"mscale", 0.5},
                                       {"truncate", false}}))
                              .rope;
  EXPECT_EQ(yarn.type, RopeConfig::Type::yarn);
  EXPECT_EQ(yarn.beta_fast, 16);
  EXPECT_EQ(yarn.beta_slow, 1);
  EXPECT_EQ(yarn.mscale, 0.5);
  EXPECT_FALSE(yarn.truncate);

  expect_bad(scaled({{"rope_type", "yarn"}}), {"rope_scaling", "no factor"});
  expect_bad(scaled({{"rope_type", "yarn"}, {"factor", 0}}), {"rope_scaling", "factor is 0"});
  expect_bad(scaled({{"rope_type", "yarn"}, {"factor", "4"}}), {"factor is \"4\""});
  expect_bad(scaled({{"rope_type", "longrope"}, {"factor", 4}}), {"'longrope'", "yarn"}, Code::unsupported);
  expect_bad(scaled({{"rope_type", "yarn"}, {"type", "linear"}}), {"rope_type and type disagree"});
  expect_bad(scaled(7), {"rope_scaling", "7"});
  expect_bad(with(qwen3(), "rope_theta", -1), {"rope_theta", "-1"});

  // GLM-4.5's, in either place; whether it can be run is the decoder's to say.
  EXPECT_EQ(good(qwen3()).rope.partial_rotary_factor, 1);
  EXPECT_EQ(good(with(qwen3(), "partial_rotary_factor", 0.5)).rope.partial_rotary_factor, 0.5);
  const json parameters = {{"rope_type", "default"}, {"rope_theta", 1e6}, {"partial_rotary_factor", 0.5}};
  json glm = with(deepseek(), "model_type", "glm4_moe");
  EXPECT_EQ(good(with(glm, "partial_rotary_factor", 0.5)).rope.partial_rotary_factor, 0.5);
  glm = without(without(glm, "rope_theta"), "rope_scaling");
  EXPECT_EQ(good(with(glm, "rope_parameters", parameters)).rope.partial_rotary_factor, 0.5);
  for (const json& value : {json(-0.5), json(1.5), json("0.5")}) {
    expect_bad(with(qwen3(), "partial_rotary_factor", value), {"partial_rotary_factor", value.dump()});
    expect_bad(with(glm, "rope_parameters", with(parameters, "partial_rotary_factor", value)),
               {"rope_parameters: partial_rotary_factor", value.dump()});
  }
}

TEST(Config, Activation) {
  EXPECT_EQ(good(with(qwen3(), "hidden_act", "gelu")).moe.activation.kind, Activation::Kind::geglu);
  EXPECT_EQ(good(with(qwen3(), "hidden_act", "gelu_pytorch_tanh")).moe.activation.kind,
            Activation::Kind::geglu_tanh);
  expect_bad(with(qwen3(), "hidden_act", "relu"), {"hidden_act", "'relu'", "silu"}, Code::unsupported);
}

TEST(Config, SlidingWindowOfQwen) {
  json config = with(qwen3(), "sliding_window", 100);
  EXPECT_EQ(good(config).sliding_window, 0);
  config["use_sliding_window"] = true;
  EXPECT_EQ(good(config).sliding_window, 100);
  // Only Qwen2-MoE tells its layers apart.
  config["layer_types"] = json(4, "full_attention");
  EXPECT_EQ(good(config).slides, std::vector<bool>(4, true));
}

TEST(Config, WhichLayersOfQwen2Slide) {
  const json config = with(with(qwen2(), "sliding_window", 100), "use_sliding_window", true);
  EXPECT_EQ(good(config).slides, (std::vector<bool>{true, false, true, false}));
  EXPECT_EQ(good(with(config, "max_window_layers", 2)).slides,
            (std::vector<bool>{true, false, false, false}));
  EXPECT_EQ(good(with(config, "max_window_layers", 0)).slides, std::vector<bool>(4, false));
  const json types = {"full_attention", "sliding_attention", "sliding_attention", "full_attention"};
  EXPECT_EQ(good(with(config, "layer_types", types)).slides, (std::vector<bool>{false, true, true, false}));
  expect_bad(with(config, "max_window_layers", -1), {"max_window_layers", "-1"});
  expect_bad(with(config, "layer_types", "sliding_attention"), {"layer_types"});
  expect_bad(with(config, "layer_types", json::array({"full_attention"})), {"layer_types has 1", "4 layers"});
  for (const json& type : {json("linear_attention"), json(1)})
    expect_bad(with(config, "layer_types", json(4, type)), {"layer_types", type.dump()}, Code::unsupported);
  // Without a window nobody asks.
  EXPECT_EQ(good(with(with(config, "use_sliding_window", false), "layer_types", 1)).sliding_window, 0);
}

TEST(Config, UnknownFamily) {
  expect_bad(with(qwen3(), "model_type", "llama"),
             {"'llama'", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3"}, Code::unsupported);
  expect_bad(without(qwen3(), "model_type"), {"no model_type"});
  expect_bad(with(qwen3(), "model_type", 3), {"model_type is 3"});
}

TEST(Config, EverySizeIsChecked) {
  for (const char* key :
       {"num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "max_position_embeddings",
        "num_attention_heads", "num_experts_per_tok", "num_experts", "moe_intermediate_size"}) {
    expect_bad(without(qwen3(), key), {"no ", key});
    expect_bad(with(qwen3(), key, nullptr), {"no ", key});
    for (const json& value : {json(0), json(-1), json(1.5), json(1e300), json("256"), json(true),
                              json::array({1}), json(std::numeric_limits<std::uint64_t>::max()),
                              json(std::numeric_limits<std::int64_t>::min()), json(std::int64_t{1} << 32)})
      expect_bad(with(qwen3(), key, value), {key, value.dump(), "integer in [1, "});
  }
  expect_bad(with(qwen3(), "head_dim", 0), {"head_dim"});
  expect_bad(with(qwen3(), "num_key_value_heads", 3), {"num_attention_heads 4", "num_key_value_heads 3"});
  expect_bad(with(without(qwen3(), "head_dim"), "hidden_size", 255),
             {"hidden_size 255", "num_attention_heads 4"});
  expect_bad(with(qwen3(), "rms_norm_eps", -1e-6), {"rms_norm_eps"});
  expect_bad(with(qwen3(), "rms_norm_eps", "1e-6"), {"rms_norm_eps"});
  expect_bad(with(qwen3(), "tie_word_embeddings", 1), {"tie_word_embeddings is 1", "true or false"});
  expect_bad(with(qwen3(), "quantization_config", "gptq"), {"quantization_config", "gptq"});
}

TEST(Config, RoutingMustBePossible) {
  expect_bad(with(qwen3(), "num_experts_per_tok", 17), {"top_k 17", "16"});
  expect_bad(with(deepseek(), "n_group", 5), {"32 experts", "5 groups"});
  expect_bad(with(deepseek(), "topk_group", 9), {"top_groups 9", "8"});
  expect_bad(with(deepseek(), "num_experts_per_tok", 9), {"top_k 9", "8 experts", "2 chosen groups"});
  expect_bad(with(with(deepseek(), "n_group", 32), "topk_group", 32), {"groups of 1"});
  expect_bad(with(deepseek(), "routed_scaling_factor", 1e300), {"routed_scaling_factor"});
}

TEST(Config, Json) {
  const auto text = [](std::string_view content, std::initializer_list<std::string_view> parts) {
    const auto parsed = parse_config(content, "dir/config.json");
    ASSERT_FALSE(parsed);
    expect_error(parsed.status(), Code::bad_file, parts);
  };
  text("", {"dir/config.json: ", "JSON object"});
  text("[]", {"JSON object"});
  text("{", {"parse error"});
  text(R"({"hidden_size":1,"hidden_size":2})", {"'hidden_size'", "twice"});
  text(R"({"a":)" + std::string(100'000, '['), {"deeper than 32"});
  text(R"({"a":1e999})", {"1e999"});
}

TEST(Index, Good) {
  const auto index = parse_index(
      R"({"metadata":{"total_size":1.5,"more":[{}]},"weight_map":{"a":"model-1-of-2.safetensors","b":"x y.safetensors"}})",
      "dir/index");
  ASSERT_TRUE(index) << index.status().message();
  EXPECT_EQ(index->size(), 2u);
  EXPECT_EQ(index->at("a"), "model-1-of-2.safetensors");
}

TEST(Index, Bad) {
  const auto bad = [](std::string_view text, std::initializer_list<std::string_view> parts) {
    const auto index = parse_index(text, "dir/index");
    ASSERT_FALSE(index) << text;
    expect_error(index.status(), Code::bad_file, parts);
    EXPECT_TRUE(index.status().message().starts_with("dir/index: ")) << index.status().message();
  };
  bad("", {"JSON object"});
  bad("{}", {"no weight_map"});
  bad(R"({"weight_map":{}})", {"weight_map is empty"});
  bad(R"({"weight_map":[]})", {"weight_map is not an object"});
  bad(R"({"weight_map":"x"})", {"weight_map is not an object"});
  bad(R"({"weight_map":{"a":7}})", {"'a'", "7"});
  bad(R"({"weight_map":{"a":["x.safetensors"]}})", {"'a'"});
  bad(R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})", {"'a'", "twice"});
  for (const char* name : {"../x.safetensors", "/x.safetensors", "d/x.safetensors", "d\\\\x.safetensors",
                           "..", "", ".safetensors", "x.bin", "x\\u0000.safetensors"})
    bad(std::string(R"({"weight_map":{"tensor":")") + name + "\"}}", {"'tensor'", "plain name"});
}

TEST(MoeSpec, Validate) {
  const auto spec = [] {
    MoeSpec spec;
    spec.experts = 8;
    spec.top_k = 2;
    spec.hidden = 256;
    spec.intermediate = 128;
    return spec;
  };
  EXPECT_TRUE(spec().validate().ok());
  MoeSpec part = spec();
  part.top_k = 16, part.ep_size = 2;
  EXPECT_TRUE(part.validate().ok()) << part.validate().message();
  const auto bad = [&](const auto& change, std::initializer_list<std::string_view> parts) {
    MoeSpec changed = spec();
    change(changed);
    const Status status = changed.validate();
    expect_error(status, Code::invalid_argument, parts);
  };
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  bad([](MoeSpec& s) { s.experts = 0; }, {"experts 0"});
  bad([](MoeSpec& s) { s.hidden = -1; }, {"hidden -1"});
  bad([](MoeSpec& s) { s.intermediate = 1 << 21; }, {"intermediate 2097152"});
  bad([](MoeSpec& s) { s.top_k = 0; }, {"top_k 0"});
  bad([](MoeSpec& s) { s.top_k = 9; }, {"top_k 9", "8"});
  bad([](MoeSpec& s) { s.top_k = 17, s.ep_size = 2; }, {"top_k 17", "16"});
  bad([](MoeSpec& s) { s.ep_size = 0; }, {"ep_size 0"});
  bad([](MoeSpec& s) { s.ep_size = 1 << 19; }, {"ep_size 524288", "8 experts"});
  bad([](MoeSpec& s) { s.routing.groups = 3; }, {"8 experts", "3 groups"});
  bad([](MoeSpec& s) { s.routing.scaling_factor = nan; }, {"scaling_factor"});
  bad([](MoeSpec& s) { s.routing.epsilon = -1; }, {"epsilon -1"});
  bad([](MoeSpec& s) { s.activation.limit = 0; }, {"limit 0"});
  bad([](MoeSpec& s) { s.activation.alpha = nan; }, {"alpha"});
  bad([](MoeSpec& s) { s.act_dtype = DType::f32; }, {"act_dtype F32"});
  bad([](MoeSpec& s) { s.shared.intermediate = -1; }, {"shared expert", "-1"});
  bad([](MoeSpec& s) { s.scheme = SchemeId::int4_g128, s.intermediate = 96; }, {"experts", "k = 96", "128"});
  bad([](MoeSpec& s) { s.shared = {.intermediate = 100, .scheme = SchemeId::mxfp4}; },
      {"shared expert", "k = 100", "32"});
}

}  // namespace
}  // namespace gatefold
