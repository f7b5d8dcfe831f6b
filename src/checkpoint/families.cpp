#include "checkpoint/families.h"

#include <fmt/format.h>

#include <charconv>

#include "checkpoint/config.h"
#include "checkpoint/json.h"

namespace gatefold {
namespace {

void read_qwen_moe(Fields& fields, ModelConfig& config, bool renormalize = false) {
  MoeSpec& moe = config.moe;
  moe.experts = fields.integer({"num_experts", "num_local_experts"}, {1, max_experts});
  moe.intermediate = fields.integer({"moe_intermediate_size"}, {1, max_size});
  moe.routing.renormalize = fields.boolean({"norm_topk_prob"}, renormalize);
  if (!fields.boolean({"use_sliding_window"}, false)) config.sliding_window = 0;

  const int step = fields.integer({"decoder_sparse_step"}, {1, max_size}, 1);
  for (int layer = 0; layer < config.layers; ++layer) config.is_moe[layer] = (layer + 1) % step == 0;
  const nlohmann::json* dense = fields.array({"mlp_only_layers"});
  if (dense == nullptr) return;
  for (const nlohmann::json& layer : *dense) {
    if (!layer.is_number_unsigned() || layer.get<std::uint64_t>() >= config.is_moe.size())
      return fields.fail(
          fmt::format("mlp_only_layers holds {}; there are {} layers", show_json(layer), config.layers));
    config.is_moe[layer.get<std::size_t>()] = false;
  }
}

/// Which layers slide. Without layer_types as transformers derives them: every other one of the first
/// max_window_layers.
void read_layer_types(Fields& fields, ModelConfig& config) {
  const int first = fields.integer({"max_window_layers"}, {0, max_size}, 28);
  const nlohmann::json* types = fields.array({"layer_types"});
  if (types != nullptr && types->size() != config.slides.size())
    return fields.fail(
        fmt::format("layer_types has {} entries; there are {} layers", types->size(), config.layers));
  for (int layer = 0; layer < config.layers; ++layer) {
    config.slides[layer] = layer % 2 == 0 && layer < first;
    if (types == nullptr) continue;
    const nlohmann::json& type = (*types)[static_cast<std::size_t>(layer)];
    config.slides[layer] = type == "sliding_attention";
    if (!config.slides[layer] && type != "full_attention")
      return fields.fail(
          fmt::format("layer_types holds {}; known: full_attention, sliding_attention", show_json(type)),
          Code::unsupported);
  }
}

void read_gated_shared_expert(Fields& fields, MoeSpec& moe) {
  moe.shared.intermediate = fields.integer({"shared_expert_intermediate_size"}, {0, max_size});
  moe.shared.gated = true;
}

void read_qwen2_moe(Fields& fields, ModelConfig& config) {
  read_qwen_moe(fields, config);
  if (config.sliding_window > 0) read_layer_types(fields, config);
  config.attention_bias = fields.boolean({"qkv_bias"}, true);
  read_gated_shared_expert(fields, config.moe);
}

/// Qwen3-Next and Qwen3.5.
void read_qwen3_next(Fields& fields, ModelConfig& config) {
  read_qwen_moe(fields, config, true);
  read_gated_shared_expert(fields, config.moe);
}

void read_qwen3_moe(Fields& fields, ModelConfig& config) {
  read_qwen_moe(fields, config);
  config.qk_norm = true;
}

void read_mixtral(Fields& fields, ModelConfig& config) {
  config.moe.experts = fields.integer({"num_local_experts", "num_experts"}, {1, max_experts});
  config.moe.intermediate = config.dense_intermediate;
  config.is_moe.assign(config.is_moe.size(), true);
}

void read_minimax_m2(Fields& fields, ModelConfig& config) {
  read_mixtral(fields, config);
  const std::string score = fields.text({"scoring_func"}, "sigmoid");
  if (score != "sigmoid")
    fields.fail(fmt::format("scoring_func is {}; sigmoid is known", quote(score)), Code::unsupported);
  config.moe.routing = {.score = Score::sigmoid, .renormalize = true, .correction_bias = true};
}

void read_olmoe(Fields& fields, ModelConfig& config) {
  config.moe.experts = fields.integer({"num_experts", "num_local_experts"}, {1, max_experts});
  config.moe.intermediate = config.dense_intermediate;
  config.moe.routing.renormalize = fields.boolean({"norm_topk_prob"}, false);
  config.is_moe.assign(config.is_moe.size(), true);
}

/// Which layers are MoE: each is named, or they follow so many dense ones.
void read_deepseek_layers(Fields& fields, ModelConfig& config) {
  const nlohmann::json* types = fields.array({"mlp_layer_types"});
  if (types == nullptr) {
    const int first = fields.integer({"first_k_dense_replace"}, {0, max_size});
    const int frequency = fields.integer({"moe_layer_freq"}, {1, max_size}, 1);
    for (int layer = 0; layer < config.layers; ++layer)
      config.is_moe[layer] = layer >= first && layer % frequency == 0;
    return;
  }
  if (types->size() != config.is_moe.size())
    return fields.fail(
        fmt::format("mlp_layer_types has {} entries; there are {} layers", types->size(), config.layers));
  for (int layer = 0; layer < config.layers; ++layer) {
    const nlohmann::json& type = (*types)[static_cast<std::size_t>(layer)];
    config.is_moe[layer] = type == "sparse";
    if (!config.is_moe[layer] && type != "dense")
      return fields.fail(fmt::format("mlp_layer_types holds {}; known: dense, sparse", show_json(type)),
                         Code::unsupported);
  }
}

/// So many shared experts, which are one of their joint width.
void read_shared_experts(Fields& fields, std::string_view key, MoeSpec& moe) {
  const int shared = fields.integer({key}, {0, max_experts}, 0);
  const std::int64_t width = std::int64_t{shared} * moe.intermediate;
  if (width > max_size)
    fields.fail(fmt::format("{} {} times moe_intermediate_size {} is more than {}", key, shared,
                            moe.intermediate, max_size));
  else
    moe.shared.intermediate = static_cast<int>(width);
}

/// What DeepSeek-V2 and later have in common, but for how experts are chosen.
void read_deepseek(Fields& fields, ModelConfig& config) {
  MoeSpec& moe = config.moe;
  moe.experts = fields.integer({"n_routed_experts", "num_local_experts"}, {1, max_experts});
  moe.intermediate = fields.integer({"moe_intermediate_size"}, {1, max_size});
  read_shared_experts(fields, "n_shared_experts", moe);
  read_deepseek_layers(fields, config);

  // Multi-head latent attention: the size of one query or key.
  if (fields.has("qk_nope_head_dim"))
    config.head_dim = fields.integer({"qk_nope_head_dim"}, {1, max_size / 2}) +
                      fields.integer({"qk_rope_head_dim"}, {1, max_size / 2});
}

/// By softmax, of the groups with the best experts, or of all.
void read_deepseek_v2(Fields& fields, ModelConfig& config) {
  read_deepseek(fields, config);
  const std::string score = fields.text({"scoring_func"}, "softmax");
  if (score != "softmax")
    fields.fail(fmt::format("scoring_func is {}; softmax is known", quote(score)), Code::unsupported);
  const std::string method = fields.text({"topk_method"}, "greedy");
  const bool in_groups = method == "group_limited_greedy";
  if (!in_groups && method != "greedy")
    fields.fail(fmt::format("topk_method is {}; greedy and group_limited_greedy are known", quote(method)),
                Code::unsupported);
  // Of which implementations differ: the scaling factor applies besides, or does not.
  if (fields.boolean({"norm_topk_prob"}, false))
    fields.fail("norm_topk_prob is true; false is known", Code::unsupported);
  config.moe.routing = {
      .renormalize = false,
      .groups = in_groups ? fields.integer({"n_group"}, {1, max_experts}) : 1,
      .top_groups = in_groups ? fields.integer({"topk_group"}, {1, max_experts}) : 1,
      .group_score = GroupScore::max,
      .scaling_factor = static_cast<float>(fields.real({"routed_scaling_factor"}, {1e-6, 1e6}, 1.0))};
}

void read_deepseek_v3(Fields& fields, ModelConfig& config) {
  read_deepseek(fields, config);
  MoeSpec& moe = config.moe;
  const std::string score = fields.text({"scoring_func"}, "sigmoid");
  if (score != "sigmoid")
    fields.fail(fmt::format("scoring_func is {}; sigmoid is known", quote(score)), Code::unsupported);
  const std::string method = fields.text({"topk_method"}, "noaux_tc");
  if (method != "noaux_tc")
    fields.fail(fmt::format("topk_method is {}; noaux_tc is known", quote(method)), Code::unsupported);
  moe.routing = {.score = Score::sigmoid,
                 .renormalize = fields.boolean({"norm_topk_prob"}, true),
                 .groups = fields.integer({"n_group"}, {1, max_experts}),
                 .top_groups = fields.integer({"topk_group"}, {1, max_experts}),
                 .group_score = GroupScore::top2_sum,
                 .correction_bias = true,
                 .scaling_factor = static_cast<float>(fields.real({"routed_scaling_factor"}, {1e-6, 1e6})),
                 .epsilon = 1e-20f};
}

/// DeepSeek-V4: experts are scored by the square root of softplus; the first layers choose them by token.
void read_deepseek_v4(Fields& fields, ModelConfig& config) {
  MoeSpec& moe = config.moe;
  moe.experts = fields.integer({"n_routed_experts"}, {1, max_experts});
  moe.intermediate = fields.integer({"moe_intermediate_size"}, {1, max_size});
  const std::string score = fields.text({"scoring_func"}, "sqrtsoftplus");
  if (score != "sqrtsoftplus")
    fields.fail(fmt::format("scoring_func is {}; sqrtsoftplus is known", quote(score)), Code::unsupported);
  moe.routing = {
      .score = Score::sqrt_softplus,
      .renormalize = fields.boolean({"norm_topk_prob"}, true),
      .groups = 1,
      .top_groups = 1,
      .group_score = GroupScore::top2_sum,
      .correction_bias = true,
      .scaling_factor = static_cast<float>(fields.real({"routed_scaling_factor"}, {1e-6, 1e6}, 1.0)),
      .epsilon = 1e-20f};
  moe.activation.limit = static_cast<float>(fields.real({"swiglu_limit"}, {1e-6, 1e6}, 10.0));
  read_shared_experts(fields, "n_shared_experts", moe);
  config.is_moe.assign(config.is_moe.size(), true);
}

/// ERNIE 4.5: scores of softmax, chosen by them and a correction bias.
void read_ernie(Fields& fields, ModelConfig& config) {
  MoeSpec& moe = config.moe;
  moe.experts = fields.integer({"moe_num_experts"}, {1, max_experts});
  moe.intermediate = fields.integer({"moe_intermediate_size"}, {1, max_size});
  moe.routing = {.renormalize = true, .correction_bias = true};
  read_shared_experts(fields, "moe_num_shared_experts", moe);
  const int first = fields.integer({"moe_layer_start_index"}, {0, max_size}, 0),
            last = fields.integer({"moe_layer_end_index"}, {-1, max_size}, -1),
            interval = fields.integer({"moe_layer_interval"}, {1, max_size}, 1);
  for (int layer = 0; layer < config.layers; ++layer)
    config.is_moe[layer] = layer >= first && (last < 0 || layer <= last) && (layer + 1) % interval == 0;
}

void read_gpt_oss(Fields& fields, ModelConfig& config) {
  MoeSpec& moe = config.moe;
  moe.experts = fields.integer({"num_local_experts", "num_experts"}, {1, max_experts});
  moe.intermediate = config.dense_intermediate;
  moe.routing.renormalize = true;  // softmax of the chosen logits is the same
  const double limit = fields.real({"swiglu_limit"}, {1e-6, 1e6}, 7.0);
  moe.activation = {
      .kind = Activation::Kind::swiglu, .alpha = 1.702f, .beta = 1.0f, .limit = static_cast<float>(limit)};
  moe.bias = true;
  config.is_moe.assign(config.is_moe.size(), true);
}

constexpr std::string_view kSharedExpertGate = "shared_expert_gate";
constexpr std::string_view kProjections[3] = {"gate_proj", "up_proj", "down_proj"};

constexpr Family family(std::string_view model_type, std::string_view shared,
                        void (*read)(Fields& fields, ModelConfig& config)) {
  return {.model_type = model_type,
          .block = "mlp",
          .projections = {kProjections[0], kProjections[1], kProjections[2]},
          .shared = shared,
          .router = "gate",
          .correction_bias = "gate.e_score_correction_bias",
          .interleaved = false,
          .has_dense = true,
          .read = read};
}

constexpr Family mixtral_family() {
  Family mixtral = family("mixtral", "", read_mixtral);
  mixtral.block = "block_sparse_moe";
  mixtral.projections[0] = "w1", mixtral.projections[1] = "w3", mixtral.projections[2] = "w2";
  return mixtral;
}

constexpr Family minimax_m2_family() {
  Family m2 = mixtral_family();
  m2.model_type = "minimax_m2";
  m2.correction_bias = "e_score_correction_bias";
  m2.read = read_minimax_m2;
  return m2;
}

constexpr Family ernie_family() {
  Family ernie = family("ernie4_5_moe", "shared_experts", read_ernie);
  ernie.correction_bias = "moe_statics.e_score_correction_bias";
  return ernie;
}

/// The text model of Qwen3.5: its layers have experts alone.
constexpr Family qwen3_5_family() {
  Family text = family("qwen3_5_moe_text", "shared_expert", read_qwen3_next);
  text.has_dense = false;
  return text;
}

constexpr Family deepseek_v4_family() {
  Family v4 = mixtral_family();
  v4.model_type = "deepseek_v4";
  v4.block = "ffn";
  v4.shared = "shared_experts";
  v4.correction_bias = "gate.bias";
  v4.has_dense = false;
  v4.read = read_deepseek_v4;
  return v4;
}

constexpr Family gpt_oss_family() {
  Family gpt_oss = family("gpt_oss", "", read_gpt_oss);
  gpt_oss.router = "router";
  gpt_oss.interleaved = true;
  return gpt_oss;
}

constexpr Family table[] = {
    family("qwen3_moe", "", read_qwen3_moe),
    family("qwen2_moe", "shared_expert", read_qwen2_moe),
    family("qwen3_next", "shared_expert", read_qwen3_next),
    qwen3_5_family(),
    mixtral_family(),
    minimax_m2_family(),
    family("olmoe", "", read_olmoe),
    family("deepseek_v2", "shared_experts", read_deepseek_v2),
    family("deepseek_v3", "shared_experts", read_deepseek_v3),
    family("deepseek_v32", "shared_experts", read_deepseek_v3),
    family("kimi_k2", "shared_experts", read_deepseek_v3),
    family("glm4_moe", "shared_experts", read_deepseek_v3),
    family("glm4_moe_lite", "shared_experts", read_deepseek_v3),
    family("glm_moe_dsa", "shared_experts", read_deepseek_v3),
    deepseek_v4_family(),
    ernie_family(),
    gpt_oss_family(),
};

/// Removes `text` from the front.
bool skip(std::string_view& rest, std::string_view text) {
  if (!rest.starts_with(text)) return false;
  rest.remove_prefix(text.size());
  return true;
}

/// Removes a number, written as we write it, from the front.
std::optional<int> skip_number(std::string_view& rest) {
  int value = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  const auto digits = static_cast<std::size_t>(end - rest.data());
  if (error != std::errc{} || value < 0 || (digits > 1 && rest.front() == '0')) return std::nullopt;
  rest.remove_prefix(digits);
  return value;
}

}  // namespace

std::span<const Family> families() {
  return table;
}

const Family* find_family(std::string_view model_type) {
  for (const Family& family : table)
    if (family.model_type == model_type) return &family;
  return nullptr;
}

std::string ModuleNames::block(int layer) const {
  return fmt::format("{}layers.{}.{}", prefix_, layer, family_->block);
}

std::string ModuleNames::router(int layer) const {
  return fmt::format("{}.{}", block(layer), family_->router);
}

std::string ModuleNames::correction_bias(int layer) const {
  return fmt::format("{}.{}", block(layer), family_->correction_bias);
}

std::string ModuleNames::shared_expert_gate(int layer) const {
  return fmt::format("{}.{}", block(layer), kSharedExpertGate);
}

bool ModuleNames::is_router_or_gate(std::string_view module) const {
  for (const std::string_view name : {family_->router, kSharedExpertGate})
    if (module.ends_with(fmt::format(".{}.{}", family_->block, name))) return true;
  return false;
}

Linear ModuleNames::expert(const MoeSpec& spec, int layer, int expert, Projection projection) const {
  const bool down = projection == Projection::down;
  return {.module = fmt::format("{}.experts.{}.{}", block(layer), expert,
                                family_->projections[static_cast<std::size_t>(projection)]),
          .n = down ? spec.hidden : spec.intermediate,
          .k = down ? spec.intermediate : spec.hidden,
          .fused = {}};
}

Linear ModuleNames::fused_expert(const MoeSpec& spec, int layer, int expert, Projection projection) const {
  Linear linear = this->expert(spec, layer, expert, projection);
  const bool down = projection == Projection::down;
  linear.module = fmt::format("{}.experts.{}", block(layer), down ? "down_proj" : "gate_up_proj");
  linear.fused = {.experts = spec.experts,
                  .rows = down ? linear.n : 2 * linear.n,
                  .expert = expert,
                  .first_row = projection == Projection::up ? (family_->interleaved ? 1 : linear.n) : 0,
                  .row_step = family_->interleaved && !down ? 2 : 1,
                  .transposed = family_->interleaved};
  return linear;
}

std::string ModuleNames::experts_pattern(const std::string& layers) const {
  std::string pattern;
  for (const char c : fmt::format("{}layers.({}).{}.experts.", prefix_, layers, family_->block))
    pattern += c == '.' ? std::string("\\.") : std::string(1, c);
  return pattern + ".*";
}

std::string ModuleNames::fused_bias(int layer, Projection projection) const {
  return fmt::format("{}.experts.{}_bias", block(layer),
                     projection == Projection::down ? "down_proj" : "gate_up_proj");
}

Linear ModuleNames::shared_expert(const MoeSpec& spec, int layer, Projection projection) const {
  const bool down = projection == Projection::down;
  return {.module = fmt::format("{}.{}.{}", block(layer), family_->shared,
                                family_->projections[static_cast<std::size_t>(projection)]),
          .n = down ? spec.hidden : spec.shared.intermediate,
          .k = down ? spec.shared.intermediate : spec.hidden,
          .fused = {}};
}

std::optional<ExpertTensor> ModuleNames::parse(std::string_view name) const {
  if (!skip(name, prefix_) || !skip(name, "layers.")) return std::nullopt;
  const auto layer = skip_number(name);
  if (!layer || !skip(name, ".") || !skip(name, family_->block) || !skip(name, ".experts."))
    return std::nullopt;
  if (skip(name, "gate_up_proj"))
    return ExpertTensor{.layer = *layer, .expert = {}, .gate_up = true, .suffix = name};
  if (skip(name, "down_proj"))
    return ExpertTensor{.layer = *layer, .expert = {}, .projection = Projection::down, .suffix = name};
  const auto expert = skip_number(name);
  if (!expert || !skip(name, ".")) return std::nullopt;
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    const std::string_view module = family_->projections[static_cast<std::size_t>(projection)];
    if (name.starts_with(module) && name.substr(module.size()).starts_with('.'))
      return ExpertTensor{
          .layer = *layer, .expert = expert, .projection = projection, .suffix = name.substr(module.size())};
  }
  return std::nullopt;
}

}  // namespace gatefold
