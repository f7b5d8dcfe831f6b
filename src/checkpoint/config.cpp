#include "checkpoint/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/json.h"

namespace gatefold {
namespace {

constexpr RealRange positive{1e-30, 1e30};
constexpr RealRange or_zero{0, 1e30};
constexpr RealRange part{0, 1};

/// A model that is part of another keeps its config in text_config; what it lacks is in the outer one.
nlohmann::json flatten(nlohmann::json root) {
  const auto text = root.find("text_config");
  if (text == root.end() || !text->is_object()) return root;
  const nlohmann::json inner = std::move(*text);
  for (const auto& [key, value] : inner.items())
    if (!value.is_null()) root[key] = value;
  return root;
}

std::string known_families() {
  std::string list;
  for (const Family& family : families())
    list += fmt::format("{}{}", list.empty() ? "" : ", ", family.model_type);
  return list;
}

/// Where the rotary parameters are has moved: rope_theta, partial_rotary_factor and rope_scaling became
/// rope_parameters.
RopeConfig read_rope(Fields& fields, const ModelConfig& config) {
  RopeConfig rope;
  rope.theta = fields.real({"rope_theta"}, positive, rope.theta);
  rope.partial_rotary_factor = fields.real({"partial_rotary_factor"}, part, rope.partial_rotary_factor);
  const bool is_new = fields.has("rope_parameters");
  const nlohmann::json* object = fields.object({is_new ? "rope_parameters" : "rope_scaling"});
  if (object == nullptr) return rope;

  Fields scaling(*object, fields.where() + (is_new ? ": rope_parameters" : ": rope_scaling"));
  rope.theta = scaling.real({"rope_theta"}, positive, rope.theta);
  rope.partial_rotary_factor = scaling.real({"partial_rotary_factor"}, part, rope.partial_rotary_factor);
  const std::string type = scaling.text({"rope_type", "type"}, "default");
  if (type == "default") {
  } else if (type == "linear") {
    rope.type = RopeConfig::Type::linear;
  } else if (type == "dynamic") {
    rope.type = RopeConfig::Type::dynamic;
  } else if (type == "llama3") {
    rope.type = RopeConfig::Type::llama3;
  } else if (type == "yarn") {
    rope.type = RopeConfig::Type::yarn;
  } else {
    scaling.fail(
        fmt::format("rope_type {} is unknown; known: default, linear, dynamic, llama3, yarn", quote(type)),
        Code::unsupported);
  }
  if (rope.type != RopeConfig::Type::standard) {
    rope.factor = scaling.real({"factor"}, {1e-6, 1e6});
    rope.original_max_positions =
        scaling.integer({"original_max_position_embeddings"}, {1, max_size}, config.max_positions);
  }
  if (rope.type == RopeConfig::Type::llama3) {
    rope.low_freq_factor = scaling.real({"low_freq_factor"}, positive);
    rope.high_freq_factor = scaling.real({"high_freq_factor"}, positive);
    if (rope.high_freq_factor <= rope.low_freq_factor)
      scaling.fail(fmt::format("high_freq_factor {} is not above low_freq_factor {}", rope.high_freq_factor,
                               rope.low_freq_factor));
  }
  if (rope.type == RopeConfig::Type::yarn) {
    rope.beta_fast = scaling.real({"beta_fast"}, positive, rope.beta_fast);
    rope.beta_slow = scaling.real({"beta_slow"}, positive, rope.beta_slow);
    rope.attention_factor = scaling.real({"attention_factor"}, or_zero, 0.0);
    rope.mscale = scaling.real({"mscale"}, or_zero, 0.0);
    rope.mscale_all_dim = scaling.real({"mscale_all_dim"}, or_zero, 0.0);
    rope.truncate = scaling.boolean({"truncate"}, true);
  }
  fields.merge(scaling.status());
  return rope;
}

Activation read_activation(Fields& fields) {
  const std::string name = fields.text({"hidden_act", "hidden_activation"}, "silu");
  if (name == "silu" || name == "swish") return {.kind = Activation::Kind::swiglu};
  if (name == "gelu") return {.kind = Activation::Kind::geglu};
  if (name == "gelu_pytorch_tanh" || name == "gelu_new" || name == "gelu_tanh")
    return {.kind = Activation::Kind::geglu_tanh};
  fields.fail(fmt::format("hidden_act {} is unknown; known: silu, swish, gelu, gelu_pytorch_tanh, gelu_new, "
                          "gelu_tanh",
                          quote(name)),
              Code::unsupported);
  return {};
}

void read_attention(Fields& fields, ModelConfig& config) {
  config.heads = fields.integer({"num_attention_heads"}, {1, max_size});
  config.kv_heads = fields.integer({"num_key_value_heads"}, {1, max_size}, config.heads);
  config.head_dim = fields.integer({"head_dim"}, {1, max_size}, 0);
  if (config.heads % config.kv_heads != 0)
    fields.fail(fmt::format("num_attention_heads {} is not a multiple of num_key_value_heads {}",
                            config.heads, config.kv_heads));
  if (config.head_dim == 0) {
    if (config.hidden % config.heads != 0)
      fields.fail(fmt::format("no head_dim, and hidden_size {} is not a multiple of num_attention_heads {}",
                              config.hidden, config.heads));
    config.head_dim = std::max(1, config.hidden / config.heads);
  }
  config.attention_bias = fields.boolean({"attention_bias"}, false);
  config.sliding_window = fields.integer({"sliding_window"}, {0, max_size}, 0);
}

bool read_dtype(Fields& fields, ModelConfig& config) {
  const std::string name = fields.text({"dtype", "torch_dtype"}, "");
  if (name == "float32")
    set_dtype(config, DType::f32);
  else if (name == "float16")
    set_dtype(config, DType::f16);
  else
    set_dtype(config, DType::bf16);
  if (!name.empty() && name != "float32" && name != "float16" && name != "bfloat16")
    fields.fail(fmt::format("dtype {} is unknown; known: bfloat16, float16, float32", quote(name)),
                Code::unsupported);
  return !name.empty();
}

}  // namespace

void replace_quantization(nlohmann::ordered_json& config, nlohmann::ordered_json quantization) {
  config.erase("compression_config");
  // What is in text_config goes before what is outside.
  if (const auto text = config.find("text_config"); text != config.end() && text->is_object())
    for (const char* key : {"quantization_config", "compression_config"}) text->erase(key);
  config["quantization_config"] = std::move(quantization);
}

void set_dtype(ModelConfig& config, DType dtype) {
  const bool half = dtype == DType::f16;
  config.dtype = dtype;
  config.moe.act_dtype = half ? DType::f16 : DType::bf16;
  config.moe.scheme = config.moe.shared.scheme = half ? SchemeId::f16 : SchemeId::bf16;
}

Result<ParsedConfig> parse_config(std::string_view text, const std::string& file) {
  auto root = parse_json(text, file, ordered_key);
  if (!root) return root.status();
  const nlohmann::json json = flatten(std::move(*root));
  Fields fields(json, file);

  ParsedConfig parsed;
  ModelConfig& config = parsed.model;
  config.model_type = fields.text({"model_type"});
  if (!fields.status().ok()) return fields.status();
  parsed.family = find_family(config.model_type);
  if (parsed.family == nullptr)
    return Status{Code::unsupported, fmt::format("{}: model_type {} is unknown; known: {}", file,
                                                 quote(config.model_type), known_families())};

  config.layers = fields.integer({"num_hidden_layers"}, {1, max_layers});
  config.hidden = fields.integer({"hidden_size"}, {1, max_size});
  config.vocab = fields.integer({"vocab_size"}, {1, max_size});
  if (parsed.family->has_dense)
    config.dense_intermediate = fields.integer({"intermediate_size"}, {1, max_size});
  config.max_positions = fields.integer({"max_position_embeddings"}, {1, max_size});
  config.rms_eps = fields.real({"rms_norm_eps"}, {0, 1}, config.rms_eps);
  config.tie_embeddings = fields.boolean({"tie_word_embeddings"}, false);
  parsed.has_dtype = read_dtype(fields, config);
  read_attention(fields, config);
  config.rope = read_rope(fields, config);

  config.moe.hidden = config.hidden;
  config.moe.top_k = fields.integer({"num_experts_per_tok", "experts_per_token", "moe_k"}, {1, max_experts});
  config.moe.activation = read_activation(fields);
  config.is_moe.assign(static_cast<std::size_t>(config.layers), false);
  config.slides.assign(config.is_moe.size(), true);
  parsed.family->read(fields, config);
  if (const nlohmann::json* found = fields.object({"quantization_config", "compression_config"}))
    parsed.quantization = *found;

  if (!fields.status().ok()) return fields.status();
  if (Status status = config.moe.validate(); !status.ok())
    return Status{status.code() == Code::invalid_argument ? Code::bad_file : status.code(),
                  file + ": " + status.message()};
  return parsed;
}

}  // namespace gatefold
