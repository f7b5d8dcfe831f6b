// NVIDIA ModelOpt. What the tensors of <module> are follows from quant_algo, of all layers or of one:
//   FP8                        .weight F8_E4M3 [N, K], .weight_scale [], .input_scale []
//   FP8_PER_CHANNEL_PER_TOKEN  .weight F8_E4M3 [N, K], .weight_scale [N] or [N, 1]
//   FP8_PB_WO                  .weight F8_E4M3 [N, K], .weight_scale [N / 128, K / 128], or with 1s between
//   NVFP4, W4A16_NVFP4         .weight U8 [N, K / 2], .weight_scale F8_E4M3 [N, K / 16], .weight_scale_2 [],
//   a
//                              factor; NVFP4 also .input_scale [], a factor
//   MXFP8                      .weight F8_E4M3 [N, K], .weight_scale U8 [N, K / 32], exponent + 127
// Factors of an fp8 KV cache are self_attn.k_proj.k_scale [] and self_attn.v_proj.v_scale [].

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/companion_reader.h"
#include "checkpoint/compressed_tensors.h"
#include "checkpoint/conventions.h"
#include "checkpoint/fields.h"
#include "checkpoint/json.h"
#include "checkpoint/modelopt.h"
#include "checkpoint/name_pattern.h"

namespace gatefold {
namespace modelopt {
namespace {

using namespace operands;

constexpr Algorithm table[] = {
    {"FP8", scaled(e4m3, f32, per_tensor), scaled(e4m3, f32, per_tensor), true},
    {"FP8_PER_CHANNEL_PER_TOKEN", scaled(e4m3, f32, per_channel), scaled(e4m3, f32, per_channel), false},
    {"FP8_PB_WO", scaled(e4m3, f32, per_block(128, 128)), act16, false},
    {"NVFP4", with_tensor_scale(e2m1, ue4m3, per_group(16)), with_tensor_scale(e2m1, ue4m3, per_group(16)),
     true},
    {"W4A16_NVFP4", with_tensor_scale(e2m1, ue4m3, per_group(16)), act16, false},
    {"MXFP8", scaled(e4m3, ue8m0, per_group(32)), scaled(e4m3, ue8m0, per_group(32)), false},
};

}  // namespace

std::span<const Algorithm> algorithms() {
  return table;
}

}  // namespace modelopt

namespace {

using modelopt::Algorithm;

constexpr std::string_view kSuffixes[] = {".weight",      ".weight_scale",    ".weight_scale_2",
                                          ".input_scale", ".pre_quant_scale", ".bias"};
constexpr LayerSuffixes kLayer{.all = kSuffixes, .companions = std::span(kSuffixes).subspan(1, 1)};

Result<const Algorithm*> find_algorithm(const std::string& name, const std::string& where) {
  std::string known;
  for (const Algorithm& algorithm : modelopt::algorithms()) {
    if (algorithm.name == name) return &algorithm;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", algorithm.name);
  }
  return Status(Code::unsupported,
                fmt::format("{}: quant_algo {} is unknown; known: {}", where, quote(name), known));
}

struct Config {
  const Algorithm* algorithm = nullptr;  ///< nullptr: as `layers` say
  std::map<std::string, const Algorithm*> layers;
  ModuleList ignore;
  Result<bool> fp8_kv_cache = false;
};

/// config.json has a kv_cache_scheme like that of compressed-tensors, hf_quant_config.json a name.
Result<bool> read_kv_cache(const nlohmann::json& quantization, const std::string& config) {
  const auto scheme = quantization.find("kv_cache_scheme");
  if (scheme != quantization.end() && !scheme->is_null())
    return compressed_tensors::parse_kv_cache(quantization, config);
  Fields fields(quantization, quantization_of(config));
  const std::string name = fields.text({"kv_cache_quant_algo"}, "");
  if (!name.empty() && name != "FP8")
    fields.fail(fmt::format("kv_cache_quant_algo {} is unknown; known: FP8", quote(name)), Code::unsupported);
  if (!fields.status().ok()) return fields.status();
  return !name.empty();
}

/// config_groups repeats what quant_algo says.
Status check_groups(const nlohmann::json& groups, const Algorithm& algorithm, const std::string& where) {
  for (const auto& [key, group] : groups.items()) {
    const auto weights = group.is_object() ? group.find("weights") : group.end();
    if (!group.is_object() || weights == group.end() || !weights->is_object()) continue;
    Fields fields(*weights, fmt::format("{}.config_groups.{}.weights", where, key));
    const int bits = fields.integer({"num_bits"}, {1, 64}, algorithm.weight.value.bits);
    const int group_k = algorithm.weight.group.k;
    const int size = fields.integer({"group_size"}, {-1, 1 << 20}, group_k);
    if (bits != algorithm.weight.value.bits)
      fields.fail(fmt::format("num_bits is {}, but quant_algo {} has {}", bits, algorithm.name,
                              algorithm.weight.value.bits));
    if (group_k != 0 && size != group_k)
      fields.fail(fmt::format("group_size is {}, but quant_algo {} has {}", size, algorithm.name, group_k));
    if (!fields.status().ok()) return fields.status();
  }
  return {};
}

Result<Config> read_config(const nlohmann::json& quantization, const std::string& config) {
  Config parsed;
  const std::string where = quantization_of(config);
  Fields fields(quantization, where);
  const std::string name = fields.text({"quant_algo"});
  if (!fields.status().ok()) return fields.status();
  if (name != "MIXED_PRECISION") {
    const auto algorithm = find_algorithm(name, where);
    if (!algorithm) return algorithm.status();
    parsed.algorithm = *algorithm;
    const int group = fields.integer({"group_size"}, {-1, 1 << 20}, parsed.algorithm->weight.group.k);
    if (const int own = parsed.algorithm->weight.group.k; own != 0 && group != own)
      fields.fail(fmt::format("group_size is {}, but quant_algo {} has {}", group, name, own));
    if (const nlohmann::json* groups = fields.object({"config_groups"}))
      if (Status status = check_groups(*groups, *parsed.algorithm, where); !status.ok()) return status;
  } else if (const nlohmann::json* layers = fields.object({"quantized_layers"})) {
    for (const auto& [module, layer] : layers->items()) {
      const std::string place = fmt::format("{}.quantized_layers[{}]", where, quote(module));
      if (!layer.is_object()) return Status(Code::bad_file, place + " is not an object");
      Fields layer_fields(layer, place);
      const auto algorithm = find_algorithm(layer_fields.text({"quant_algo"}), place);
      if (!layer_fields.status().ok()) return layer_fields.status();
      if (!algorithm) return algorithm.status();
      parsed.layers[module] = *algorithm;
    }
  } else {
    fields.fail("quant_algo is MIXED_PRECISION, but there are no quantized_layers");
  }
  if (!fields.status().ok()) return fields.status();
  auto ignore = ModuleList::read(quantization, {"ignore", "exclude_modules"}, where);
  if (!ignore) return ignore.status();
  parsed.ignore = std::move(*ignore);
  parsed.fp8_kv_cache = read_kv_cache(quantization, config);
  return parsed;
}

struct Parts {
  QuantizedMatrix matrix;
  const TensorEntry *values = nullptr, *scales = nullptr, *tensor_scale = nullptr, *input_scale = nullptr;
};

class Reader final : public CompanionReader<Parts> {
 public:
  Reader(const Source& source, const ModelConfig& model, std::string config, Config parsed)
      : CompanionReader(source, model, std::move(config), kLayer), parsed_(std::move(parsed)) {}

  std::optional<Quantized> quantized(const std::string& module) const override {
    const TensorEntry* weight = entry(module, ".weight");
    if (weight == nullptr || weight->shape.size() != 2 || entry(module, ".weight_scale") == nullptr)
      return std::nullopt;
    const Algorithm* algorithm = algorithm_of(module);
    return Quantized{weight->shape[0], weight->shape[1] * (weight->dtype == DType::u8 ? 2 : 1),
                     fmt::format("modelopt {}", algorithm == nullptr ? "(no quant_algo)" : algorithm->name)};
  }

  ScaleRule activation_rule() const override { return ScaleRule::modelopt; }
  Result<bool> fp8_kv_cache() const override { return parsed_.fp8_kv_cache; }

 private:
  Status load(const Linear&, Parts& parts) const override {
    QuantizedMatrix& matrix = parts.matrix;
    if (gatefold::scheme(matrix.scheme).weight.scale == formats::ue4m3)
      if (Status status = check_unsigned(source_, *parts.scales); !status.ok()) return status;
    matrix.values = read_bytes(source_, *parts.values);
    matrix.scales = read_bytes(source_, *parts.scales);
    if (parts.tensor_scale != nullptr) {
      const auto value = read_single(source_, *parts.tensor_scale);
      if (!value) return value.status();
      matrix.tensor_scale = {*value, false};
    }
    if (parts.input_scale != nullptr) {
      const auto value = read_single(source_, *parts.input_scale);
      if (!value) return value.status();
      matrix.input_scale = {*value, false};
    }
    return {};
  }

  const Algorithm* algorithm_of(const std::string& module) const {
    if (parsed_.algorithm != nullptr) return parsed_.algorithm;
    const auto found = parsed_.layers.find(module);
    return found == parsed_.layers.end() ? nullptr : found->second;
  }

  Result<Parts> find(const Linear& linear) const override {
    const std::int64_t n = linear.n, k = linear.k;
    const std::string where = quantization_of(config_);
    const Algorithm* algorithm = algorithm_of(linear.module);
    const TensorEntry* scale = entry(linear.module, ".weight_scale");
    if (algorithm == nullptr || parsed_.ignore.names(linear.module))
      return Status(Code::bad_file, fmt::format("{} says that the layer is quantized, but {}.{}",
                                                source_.where(*scale), where,
                                                algorithm == nullptr ? "quantized_layers does not name it"
                                                                     : parsed_.ignore.key() + " names it"));
    const Operand& weight = algorithm->weight;
    const auto row = find_scheme(weight, algorithm->activation);
    if (!row)
      return Status(Code::unsupported,
                    fmt::format("{}: no scheme has the operands of {}", where, algorithm->name));
    if (Status status = check_shape(*row, n, k); !status.ok())
      return Status(Code::bad_file, fmt::format("{}: {}: {}", where, linear.module, status.message()));

    Parts parts;
    parts.matrix = matrix_of(*row, linear);
    TensorFinder finder(source_, linear, fmt::format("{}: quant_algo {}", where, algorithm->name));
    finder.refuse(".pre_quant_scale", "inputs with scales of their own are not supported", Code::unsupported);
    if (!weight.tensor_scale.stored()) finder.refuse(".weight_scale_2", "there is one scale only");
    constexpr DType bytes[] = {DType::u8};
    if (weight.value.bits == 4)
      parts.values = finder.require(".weight", {n, k / 2}, bytes);
    else
      parts.values = finder.require(".weight", {n, k}, kE4m3);
    const QuantizedLayout layout = parts.matrix.layout();
    const bool is_wide = weight.scale == formats::f32;
    parts.scales = finder.require(".weight_scale", scale_shape(weight, layout, *scale),
                                  is_wide                          ? std::span<const DType>(kWideDtypes)
                                  : weight.scale == formats::ue8m0 ? std::span<const DType>(kExponents)
                                                                   : std::span<const DType>(kE4m3));
    if (weight.tensor_scale.stored())
      parts.tensor_scale = finder.require(".weight_scale_2", {1}, kWideDtypes);
    // Weight-only files may have scales of inputs, which are of no use.
    if (algorithm->static_input) parts.input_scale = finder.require(".input_scale", {1}, kWideDtypes);
    if (!finder.status().ok()) return finder.status();
    if (is_wide) parts.matrix.scale_format = wide_format(parts.scales->dtype);
    return parts;
  }

  /// Among the ways to write a shape, the one of the tensor, if it is one of them.
  static std::vector<std::int64_t> scale_shape(const Operand& weight, const QuantizedLayout& layout,
                                               const TensorEntry& entry) {
    using Shape = std::vector<std::int64_t>;
    if (weight.group == per_tensor) return {1};
    Shape own{layout.scale_rows, layout.scale_cols};
    const Shape others[] = {{layout.scale_rows, 1, layout.scale_cols, 1}, {layout.scale_rows}};
    if (weight.group.n > 1 && entry.shape == others[0]) return others[0];
    if (weight.group == per_channel && entry.shape == others[1]) return others[1];
    return own;
  }

  static constexpr Granularity per_tensor = operands::per_tensor, per_channel = operands::per_channel;

  Config parsed_;
};

Result<std::unique_ptr<LinearReader>> open(const Source& source, const nlohmann::json& quantization,
                                           const ModelConfig& model, const std::string& config) {
  auto parsed = read_config(quantization, config);
  if (!parsed) return parsed.status();
  return std::unique_ptr<LinearReader>(std::make_unique<Reader>(source, model, config, std::move(*parsed)));
}

}  // namespace

const Convention modelopt_convention{
    "modelopt", [](const nlohmann::json& quantization) { return has_method(quantization, {"modelopt"}); },
    open};

}  // namespace gatefold
