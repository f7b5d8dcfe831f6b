// What configs of every model family say.
#include "model_configs.h"

namespace gatefold {
namespace {

TEST(Config, Qwen3) {
  const ModelConfig config = good(qwen3());
  EXPECT_EQ(config.model_type, "qwen3_moe");
  EXPECT_EQ(config.layers, 4);
  EXPECT_EQ(config.hidden, 256);
  EXPECT_EQ(config.vocab, 300);
  EXPECT_EQ(config.dense_intermediate, 512);
  EXPECT_EQ(config.max_positions, 2048);
  EXPECT_EQ(config.rms_eps, 1e-5);
  EXPECT_EQ(config.heads, 4);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.head_dim, 32);
  EXPECT_TRUE(config.tie_embeddings);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_FALSE(config.attention_bias);
  EXPECT_EQ(config.rope.type, RopeConfig::Type::standard);
  EXPECT_EQ(config.rope.theta, 1e6);
  EXPECT_EQ(config.is_moe, std::vector<bool>(4, true));
  EXPECT_EQ(config.moe.experts, 16);
  EXPECT_EQ(config.moe.top_k, 4);
  EXPECT_EQ(config.moe.hidden, 256);
  EXPECT_EQ(config.moe.intermediate, 128);
  EXPECT_EQ(config.moe.scheme, SchemeId::bf16);
  EXPECT_EQ(config.moe.activation.kind, Activation::Kind::swiglu);
  EXPECT_EQ(config.moe.routing.score, Score::softmax);
  EXPECT_TRUE(config.moe.routing.renormalize);
  EXPECT_EQ(config.moe.routing.epsilon, 0);
  EXPECT_EQ(config.moe.shared.intermediate, 0);
  EXPECT_FALSE(good(without(qwen3(), "norm_topk_prob")).moe.routing.renormalize);
}

TEST(Config, Qwen2HasAGatedSharedExpert) {
  const ModelConfig config = good(qwen2());
  EXPECT_EQ(config.moe.shared.intermediate, 96);
  EXPECT_TRUE(config.moe.shared.gated);
  EXPECT_TRUE(config.attention_bias);
  EXPECT_FALSE(config.qk_norm);
  EXPECT_FALSE(good(with(qwen2(), "qkv_bias", false)).attention_bias);
  EXPECT_EQ(good(with(qwen2(), "shared_expert_intermediate_size", 0)).moe.shared.intermediate, 0);
}

TEST(Config, Olmoe) {
  const ModelConfig config = good(olmoe());
  EXPECT_EQ(config.moe.experts, 16);
  EXPECT_EQ(config.moe.intermediate, 512);
  EXPECT_FALSE(config.moe.routing.renormalize);
  EXPECT_EQ(config.is_moe, std::vector<bool>(4, true));
  EXPECT_TRUE(good(with(olmoe(), "norm_topk_prob", true)).moe.routing.renormalize);
}

TEST(Config, Mixtral) {
  const ModelConfig config = good(mixtral());
  EXPECT_EQ(config.head_dim, 64);  // hidden_size / num_attention_heads
  EXPECT_EQ(config.moe.experts, 8);
  EXPECT_EQ(config.moe.intermediate, 512);
  EXPECT_TRUE(config.moe.routing.renormalize);
  EXPECT_EQ(config.is_moe, std::vector<bool>(4, true));
  EXPECT_EQ(config.sliding_window, 0);
  EXPECT_EQ(good(with(mixtral(), "sliding_window", 4096)).sliding_window, 4096);
}

TEST(Config, DeepseekV3) {
  const ModelConfig config = good(deepseek());
  EXPECT_EQ(config.moe.experts, 32);
  EXPECT_EQ(config.moe.shared.intermediate, 256);
  EXPECT_FALSE(config.moe.shared.gated);
  EXPECT_EQ(config.head_dim, 24);
  const Routing& routing = config.moe.routing;
  EXPECT_EQ(routing.score, Score::sigmoid);
  EXPECT_TRUE(routing.renormalize);
  EXPECT_EQ(routing.groups, 8);
  EXPECT_EQ(routing.top_groups, 2);
  EXPECT_EQ(routing.group_score, GroupScore::top2_sum);
  EXPECT_TRUE(routing.correction_bias);
  EXPECT_EQ(routing.scaling_factor, 2.5f);
  EXPECT_EQ(routing.epsilon, 1e-20f);
  EXPECT_EQ(config.is_moe, (std::vector<bool>{false, false, false, true}));
  EXPECT_EQ(good(with(with(deepseek(), "first_k_dense_replace", 1), "moe_layer_freq", 2)).is_moe,
            (std::vector<bool>{false, false, true, false}));
  for (const char* key : {"n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace"})
    expect_bad(without(deepseek(), key), {"no ", key});
  expect_bad(with(deepseek(), "scoring_func", "softmax"), {"scoring_func", "'softmax'"}, Code::unsupported);
  expect_bad(with(deepseek(), "topk_method", "greedy"), {"topk_method", "'greedy'"}, Code::unsupported);
  expect_bad(with(deepseek(), "n_shared_experts", 60000), {"n_shared_experts 60000", "128"});
}

TEST(Config, Qwen3Next) {
  json config = with(qwen2(), "model_type", "qwen3_next");
  config.erase("norm_topk_prob");
  config["layer_types"] =
      json::array({"linear_attention", "full_attention"});  // which only the decoder asks for
  const MoeSpec moe = good(config).moe;
  EXPECT_TRUE(moe.routing.renormalize);
  EXPECT_EQ(moe.shared.intermediate, 96);
  EXPECT_TRUE(moe.shared.gated);
  // The text model of Qwen3.5, which has no dense layers, within one that sees.
  config.erase("intermediate_size");
  config["model_type"] = "qwen3_5_moe_text";
  EXPECT_EQ(good({{"model_type", "qwen3_5_moe"}, {"text_config", config}}).moe.shared.intermediate, 96);
}

TEST(Config, MiniMax) {
  const json config = with(mixtral(), "model_type", "minimax_m2");
  const Routing routing = good(config).moe.routing;
  EXPECT_EQ(routing.score, Score::sigmoid);
  EXPECT_TRUE(routing.renormalize);
  EXPECT_TRUE(routing.correction_bias);
  expect_bad(with(config, "scoring_func", "softmax"), {"scoring_func", "'softmax'"}, Code::unsupported);
}

TEST(Config, DeepSeekV2) {
  json config = with(deepseek(), "model_type", "deepseek_v2");
  config.update(
      {{"scoring_func", "softmax"}, {"topk_method", "group_limited_greedy"}, {"norm_topk_prob", false}});
  const Routing routing = good(config).moe.routing;
  EXPECT_EQ(routing.score, Score::softmax);
  EXPECT_EQ(routing.groups, 8);
  EXPECT_EQ(routing.top_groups, 2);
  EXPECT_EQ(routing.group_score, GroupScore::max);
  EXPECT_FALSE(routing.renormalize);
  EXPECT_EQ(routing.scaling_factor, 2.5f);
  EXPECT_EQ(good(with(without(config, "n_group"), "topk_method", "greedy")).moe.routing.groups, 1);
  expect_bad(without(config, "n_group"), {"no n_group"});
  expect_bad(with(config, "scoring_func", "sigmoid"), {"scoring_func", "'sigmoid'"}, Code::unsupported);
  expect_bad(with(config, "topk_method", "noaux_tc"), {"topk_method", "'noaux_tc'"}, Code::unsupported);
  expect_bad(with(config, "norm_topk_prob", true), {"norm_topk_prob is true"}, Code::unsupported);
}

TEST(Config, Ernie) {
  json config = with(qwen3(), "model_type", "ernie4_5_moe");
  for (const char* key : {"num_experts", "num_experts_per_tok", "norm_topk_prob"}) config.erase(key);
  config.update(
      {{"moe_num_experts", 16}, {"moe_k", 6}, {"moe_num_shared_experts", 2}, {"moe_layer_start_index", 1}});
  const ModelConfig model = good(config);
  EXPECT_EQ(model.moe.top_k, 6);
  EXPECT_EQ(model.moe.shared.intermediate, 256);
  EXPECT_TRUE(model.moe.routing.renormalize && model.moe.routing.correction_bias);
  EXPECT_EQ(model.is_moe, (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(good(with(config, "moe_layer_end_index", 2)).is_moe,
            (std::vector<bool>{false, true, true, false}));
  EXPECT_EQ(good(with(config, "moe_layer_interval", 2)).is_moe,
            (std::vector<bool>{false, true, false, true}));
  expect_bad(with(config, "moe_num_experts", json::array({16, 16})), {"moe_num_experts"});
}

TEST(Config, LayersOfDeepSeekByName) {
  for (const char* family : {"deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"}) {
    json config = without(with(deepseek(), "model_type", family), "first_k_dense_replace");
    expect_bad(config, {"no first_k_dense_replace"});
    config["mlp_layer_types"] = {"dense", "sparse", "dense", "sparse"};
    EXPECT_EQ(good(config).is_moe, (std::vector<bool>{false, true, false, true}));
    expect_bad(with(config, "mlp_layer_types", json::array({"dense"})),
               {"mlp_layer_types has 1", "4 layers"});
    expect_bad(with(config, "mlp_layer_types", json(4, "moe")), {"mlp_layer_types", "moe"},
               Code::unsupported);
  }
}

}  // namespace
}  // namespace gatefold
