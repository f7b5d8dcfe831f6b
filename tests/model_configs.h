#pragma once
// Configs of model families, and what is read from them.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/config.h"
#include "checkpoint_files.h"

namespace gatefold {

using nlohmann::json;

inline Result<ParsedConfig> parse(const json& config) {
  return parse_config(config.dump(), "dir/config.json");
}

inline ModelConfig good(const json& config) {
  const auto parsed = parse(config);
  EXPECT_TRUE(parsed) << parsed.status().message();
  return parsed ? parsed->model : ModelConfig{};
}

inline void expect_bad(const json& config, std::initializer_list<std::string_view> parts,
                       Code code = Code::bad_file) {
  const auto parsed = parse(config);
  ASSERT_FALSE(parsed) << config;
  expect_error(parsed.status(), code, parts);
  EXPECT_TRUE(parsed.status().message().starts_with("dir/config.json: ")) << parsed.status().message();
}

inline json with(json config, const std::string& key, const json& value) {
  config[key] = value;
  return config;
}
inline json without(json config, const std::string& key) {
  config.erase(key);
  return config;
}

inline json qwen3() {
  return {{"model_type", "qwen3_moe"},
          {"num_hidden_layers", 4},
          {"hidden_size", 256},
          {"vocab_size", 300},
          {"intermediate_size", 512},
          {"max_position_embeddings", 2048},
          {"rms_norm_eps", 1e-5},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"head_dim", 32},
          {"num_experts", 16},
          {"num_experts_per_tok", 4},
          {"moe_intermediate_size", 128},
          {"norm_topk_prob", true},
          {"decoder_sparse_step", 1},
          {"mlp_only_layers", json::array()},
          {"tie_word_embeddings", true},
          {"hidden_act", "silu"},
          {"torch_dtype", "bfloat16"},
          {"rope_theta", 1e6},
          {"rope_scaling", nullptr}};
}
inline json qwen2() {
  json config = with(qwen3(), "model_type", "qwen2_moe");
  config["shared_expert_intermediate_size"] = 96;
  return config;
}
inline json mixtral() {
  json config = qwen3();
  for (const char* key : {"num_experts", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"})
    config.erase(key);
  config["model_type"] = "mixtral";
  config["num_local_experts"] = 8;
  config["head_dim"] = nullptr;
  return config;
}
inline json olmoe() {
  json config = qwen3();
  for (const char* key : {"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"})
    config.erase(key);
  config["model_type"] = "olmoe";
  return config;
}
inline json deepseek() {
  json config = qwen3();
  config.erase("num_experts");
  config.update({{"model_type", "deepseek_v3"},
                 {"n_routed_experts", 32},
                 {"n_group", 8},
                 {"topk_group", 2},
                 {"n_shared_experts", 2},
                 {"first_k_dense_replace", 3},
                 {"routed_scaling_factor", 2.5},
                 {"scoring_func", "sigmoid"},
                 {"topk_method", "noaux_tc"},
                 {"qk_nope_head_dim", 16},
                 {"qk_rope_head_dim", 8}});
  return config;
}

}  // namespace gatefold
