#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "checkpoint/compressed_tensors.h"
#include "checkpoint/json.h"

namespace gatefold::compressed_tensors {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

/// Calls that take a config apart throw this; parse_groups returns it.
struct Refused {
  Status status;
};

[[noreturn]] void refuse(Code code, const std::string& where, const std::string& what) {
  throw Refused{{code, fmt::format("{}{}", where, what)}};
}

/// A value that may be missing or null.
const json& member(const json& object, const char* key) {
  static const json null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::string text(const json& object, const char* key, const std::string& where) {
  const json& value = member(object, key);
  if (value.is_null()) return {};
  if (!value.is_string())
    refuse(Code::bad_file, where, fmt::format(".{} = {} is not a string", key, show_json(value)));
  std::string lower = value.get<std::string>();
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  return lower;
}

int positive(const json& value, const char* key, const std::string& where) {
  if (!value.is_number_integer() || value < 1 || value > 32767)
    refuse(Code::bad_file, where,
           fmt::format(".{} = {} is not a number from 1 to 32767", key, show_json(value)));
  return value.get<int>();
}

// --- Operand to QuantizationArgs and back ---

constexpr Format implied_value(bool is_float, int bits) {
  if (!is_float) return {Kind::integer, static_cast<std::uint8_t>(bits), 0, 0, Specials::none};
  return bits == 8 ? formats::e4m3 : bits == 4 ? formats::e2m1 : formats::none;
}

/// Whether num_bits and type do not say which format it is.
constexpr bool has_own_name(Format value) {
  return value.is_float() && value != implied_value(true, value.bits);
}

const char* strategy(const Operand& operand, bool is_weight) {
  const Granularity group = operand.group;
  if (group.n == 0) return "tensor";
  if (group.n > 1) return "block";
  if (group.k == 0) return is_weight ? "channel" : "token";
  return operand.tensor_scale.stored() ? "tensor_group" : "group";
}

ordered_json to_args(const Operand& operand, bool is_weight, bool static_input) {
  const Granularity group = operand.group;
  ordered_json args{{"num_bits", operand.value.bits},
                    {"type", operand.value.is_integer() ? "int" : "float"},
                    {"symmetric", !operand.zero_point.stored()},
                    {"strategy", strategy(operand, is_weight)}};
  if (group.n == 1 && group.k != 0) args["group_size"] = group.k;
  if (group.n > 1) args["block_structure"] = {group.n, group.k};
  args["dynamic"] = !is_weight && !static_input;
  if (static_input && operand.tensor_scale.stored()) args["dynamic"] = "local";
  if (operand.scale == formats::ue8m0) args["scale_dtype"] = "torch.uint8";
  if (operand.scale == formats::ue4m3) args["scale_dtype"] = "torch.float8_e4m3fn";
  // Our extension, for what num_bits and type cannot say. The packages refuse arguments that they do not
  // know; a quant_method of our own they would ignore with a warning, and misread the weights.
  if (has_own_name(operand.value)) args["element"] = name(operand.value);
  return args;
}

/// The kind of scale, which older writers leave to the name of the format.
void set_scale(const json& args, std::string_view format, const std::string& where, Operand& operand) {
  const std::string dtype = text(args, "scale_dtype", where);
  const bool wide = dtype == "torch.bfloat16" || dtype == "torch.float16" || dtype == "torch.float32";
  const bool mx = format.starts_with("mxfp") && operand.group == Granularity{1, 32};
  const bool exponents = dtype == "torch.uint8" || dtype == "torch.float8_e8m0fnu";
  const bool e4m3 = dtype == "torch.float8_e4m3fn";
  if (!wide && !exponents && !e4m3 && !dtype.empty())
    refuse(Code::unsupported, where, fmt::format(".scale_dtype = {} is not supported", quote(dtype)));
  operand.scale = formats::f32;
  if (exponents || (dtype.empty() && mx)) operand.scale = formats::ue8m0;
  if (e4m3 || (dtype.empty() && operand.tensor_scale.stored())) operand.scale = formats::ue4m3;
}

void set_group(const json& args, const std::string& where, Operand& operand) {
  std::string strategy = text(args, "strategy", where);
  const json& size = member(args, "group_size");
  if (strategy.empty()) strategy = size.is_null() ? "tensor" : size == -1 ? "channel" : "group";
  if (strategy == "tensor") return;
  if (strategy == "channel" || strategy == "token") {
    operand.group = {1, 0};
  } else if (strategy == "group" || strategy == "tensor_group") {
    operand.group = {1, static_cast<std::int16_t>(positive(size, "group_size", where))};
    if (strategy == "tensor_group") operand.tensor_scale = formats::f32;
  } else if (strategy == "block") {
    json block = member(args, "block_structure");
    if (block.is_string()) {  // "128x128", the older spelling
      const auto spelled = block.get<std::string>();
      const std::size_t x = std::min(spelled.find('x'), spelled.size());
      block = json::array({json::parse(spelled.substr(0, x), nullptr, false),
                           json::parse(spelled.substr(std::min(x + 1, spelled.size())), nullptr, false)});
    }
    if (!block.is_array() || block.size() != 2)
      refuse(Code::bad_file, where,
             fmt::format(".block_structure = {} is not [rows, columns]", show_json(block)));
    operand.group = {static_cast<std::int16_t>(positive(block[0], "block_structure", where)),
                     static_cast<std::int16_t>(positive(block[1], "block_structure", where))};
  } else {
    refuse(Code::unsupported, where, fmt::format(".strategy = {} is not supported", quote(strategy)));
  }
}

Operand from_args(const json& args, std::string_view format, const std::string& where) {
  if (!args.is_object())
    refuse(Code::bad_file, where, fmt::format(" = {} is not an object", show_json(args)));
  const json& symmetric = member(args, "symmetric");
  if (!symmetric.is_null() && !symmetric.is_boolean())
    refuse(Code::bad_file, where, fmt::format(".symmetric = {} is not a bool", show_json(symmetric)));
  const bool has_zero = symmetric == false;
  const json& num_bits = member(args, "num_bits");
  const int bits = num_bits.is_null() ? 8 : positive(num_bits, "num_bits", where);
  const std::string type = text(args, "type", where);
  if (!type.empty() && type != "int" && type != "float")
    refuse(Code::bad_file, where, fmt::format(".type = {} is neither int nor float", quote(type)));

  Operand operand;
  if (bits <= 16) operand.value = implied_value(type == "float", bits);
  const std::string element = text(args, "element", where);
  for (const formats::Named& known : formats::all)
    if (known.name == element && known.format.bits == bits) operand.value = known.format;
  if (!operand.value.stored() || (!element.empty() && name(operand.value) != element))
    refuse(Code::unsupported, where,
           fmt::format(": {} of {} bits {} are not supported", type.empty() ? "int" : type, bits, element));
  if (has_zero) {
    if (type == "float") refuse(Code::unsupported, where, ".symmetric = false is not supported for floats");
    operand.value.kind = Kind::unsigned_integer;
    operand.zero_point = operand.value;
  }
  set_group(args, where, operand);
  set_scale(args, format, where, operand);
  return operand;
}

/// With the type of a wide scale left out of account.
Operand widened(Operand operand) {
  if (is_wide(operand.scale)) operand.scale = formats::f32;
  return operand;
}

Group parse_group(const json& value, const std::string& global_format, const std::string& where) {
  if (!value.is_object())
    refuse(Code::bad_file, where, fmt::format(" = {} is not an object", show_json(value)));
  Group group;
  group.where = where;
  const json& targets = member(value, "targets");
  if (!targets.is_array()) refuse(Code::bad_file, where, ".targets is not a list");
  for (const json& target : targets) {
    if (!target.is_string()) refuse(Code::bad_file, where, fmt::format(".targets has {}", show_json(target)));
    group.targets.push_back(target.get<std::string>());
  }
  group.format = text(value, "format", where);
  if (group.format.empty() && global_format != "mixed-precision") group.format = global_format;
  const std::string& format = group.format;
  const json& weights = member(value, "weights");
  const json& input = member(value, "input_activations");
  try {
    if (weights.is_null()) refuse(Code::unsupported, where, ".weights is null");
    group.packed = format.find("pack-quantized") != std::string::npos;
    constexpr std::string_view known[] = {"",
                                          "pack-quantized",
                                          "int-quantized",
                                          "float-quantized",
                                          "naive-quantized",
                                          "nvfp4-pack-quantized",
                                          "mxfp4-pack-quantized",
                                          "mxfp8-quantized"};
    if (std::find(std::begin(known), std::end(known), format) == std::end(known))
      refuse(Code::unsupported, where, fmt::format(".format = {} is not supported", quote(format)));
    group.weight = from_args(weights, format, where + ".weights");
    if (const json& order = member(weights, "actorder"); order.is_boolean())
      group.act_order = order.get<bool>();
    else
      group.act_order = order == "group" || order == "dynamic";
    if (!input.is_null()) {
      group.activation = from_args(input, format, where + ".input_activations");
      const json& dynamic = member(input, "dynamic");
      if (!dynamic.is_null() && !dynamic.is_boolean() && dynamic != "local")
        refuse(Code::bad_file, where, fmt::format(".input_activations.dynamic = {}", show_json(dynamic)));
      group.static_input = dynamic != true;
    }
    if (!member(value, "output_activations").is_null())
      refuse(Code::unsupported, where, ".output_activations is not supported");
  } catch (const Refused& refused) {
    if (refused.status.code() != Code::unsupported) throw;
    group.unsupported = refused.status;
  }
  return group;
}

std::string words(const Operand& operand) {
  if (!operand.quantized()) return "16-bit";
  const Format value = operand.value;
  return fmt::format("{}{} per {} x {}",
                     value.is_integer() ? (operand.zero_point.stored() ? "uint" : "int") : name(value),
                     value.is_integer() ? std::to_string(value.bits) : "", operand.group.n, operand.group.k);
}

/// The name of the format in which the packages store these weights.
std::string_view format_name(const Scheme& scheme) {
  const Operand& weight = scheme.weight;
  if (weight.value.is_integer()) {
    const bool plain = weight.value.bits == 8 && scheme.activation.value.is_integer();
    return plain ? "int-quantized" : "pack-quantized";
  }
  if (weight.value.bits == 4)
    return weight.tensor_scale.stored() ? "nvfp4-pack-quantized" : "mxfp4-pack-quantized";
  return weight.scale == formats::ue8m0 ? "mxfp8-quantized" : "float-quantized";
}

ordered_json to_group(const Scheme& scheme, const std::vector<std::string>& targets, bool static_input) {
  ordered_json input = nullptr;
  if (scheme.quantizes_activations()) input = to_args(scheme.activation, false, static_input);
  return {{"targets", targets},
          {"weights", to_args(scheme.weight, true, false)},
          {"input_activations", input},
          {"output_activations", nullptr},
          {"format", format_name(scheme)}};
}

ordered_json from_groups(const std::vector<ordered_json>& groups, const std::vector<std::string>& ignore) {
  std::string format = groups.empty() ? "dense" : groups[0]["format"];
  ordered_json numbered = ordered_json::object();
  for (const ordered_json& group : groups) {
    if (group["format"] != format) format = "mixed-precision";
    numbered["group_" + std::to_string(numbered.size())] = group;
  }
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"quantization_status", "compressed"},
          {"config_groups", numbered},
          {"ignore", ignore},
          {"kv_cache_scheme", nullptr},
          {"global_compression_ratio", nullptr}};
}

/// Of keys and values.
constexpr Operand kv_cache_operand = operands::scaled(formats::e4m3, formats::f32, operands::per_tensor);

}  // namespace

ordered_json config(const Scheme& scheme, const std::vector<std::string>& ignore, bool static_input) {
  return from_groups({to_group(scheme, {"Linear"}, static_input)}, ignore);
}

ordered_json config(const Targets& targets, const std::vector<std::string>& ignore, bool fp8_kv_cache) {
  std::vector<ordered_json> groups;
  for (const auto& [kind, names] : targets) {
    const std::vector<std::string> all = {"Linear"};
    groups.push_back(to_group(scheme(kind.scheme), targets.size() == 1 ? all : names, kind.static_input));
  }
  ordered_json config = from_groups(groups, ignore);
  if (fp8_kv_cache) config["kv_cache_scheme"] = kv_cache_scheme();
  return config;
}

ordered_json kv_cache_scheme() {
  return to_args(kv_cache_operand, false, true);
}

bool needs_extension(const Scheme& scheme) {
  return has_own_name(scheme.weight.value) || has_own_name(scheme.activation.value);
}

Result<std::vector<Group>> parse_groups(const json& quantization, const std::string& config) {
  try {
    const std::string where = config + ": quantization_config";
    const std::string format = text(quantization, "format", where);
    for (const char* key : {"transform_config", "sparsity_config"})
      if (const json& value = member(quantization, key); !value.is_null() && !value.empty())
        refuse(Code::unsupported, where, fmt::format(".{} is not supported", key));
    const json& groups = member(quantization, "config_groups");
    if (!groups.is_object()) refuse(Code::bad_file, where, ".config_groups is not an object");
    if (groups.size() > 100)
      refuse(Code::bad_file, where,
             fmt::format(".config_groups has {} groups; the limit is 100", groups.size()));
    std::vector<Group> parsed;
    for (const auto& [key, value] : groups.items())
      parsed.push_back(parse_group(value, format, fmt::format("{}: config_groups.{}", config, key)));
    return parsed;
  } catch (const Refused& refused) {
    return refused.status;
  }
}

Result<bool> parse_kv_cache(const json& quantization, const std::string& config) {
  const json& scheme = member(quantization, "kv_cache_scheme");
  if (scheme.is_null()) return false;
  try {
    const std::string where = config + ": quantization_config.kv_cache_scheme";
    const Operand operand = from_args(scheme, "", where);
    const json& dynamic = member(scheme, "dynamic");
    if (operand != kv_cache_operand || (!dynamic.is_null() && dynamic != false))
      refuse(Code::unsupported, where,
             fmt::format(": {} is not 8-bit floats with one static scale per tensor", show_json(scheme)));
    return true;
  } catch (const Refused& refused) {
    return refused.status;
  }
}

IntegerFormat integer_format(const Group& group) {
  return {.bits = group.weight.value.bits,
          .symmetric = !group.weight.zero_point.stored(),
          .group = group.weight.group.k};
}

Result<SchemeId> find_row(const Group& group, std::span<const std::int64_t> k) {
  if (!group.unsupported.ok()) return group.unsupported;
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    const Scheme& row = all_schemes()[i];
    const auto fits = [&](std::int64_t size) {
      return row.weight.group.n != 1 || row.weight.group.k == 0 || size % row.weight.group.k == 0;
    };
    if (widened(row.weight) == widened(group.weight) &&
        widened(row.activation) == widened(group.activation) &&
        (!row.weight.value.is_integer() || std::all_of(k.begin(), k.end(), fits)))
      return static_cast<SchemeId>(i);
  }
  const Operand& weight = group.weight;
  if (weight.value.is_integer() && is_wide(weight.scale) && weight.group.n <= 1) {
    auto row = integer_row(integer_format(group), widened(group.activation), k);
    if (row.ok()) return row;
  }
  return Status(Code::unsupported, fmt::format("{}: no scheme has {} weights with {} activations",
                                               group.where, words(group.weight), words(group.activation)));
}

}  // namespace gatefold::compressed_tensors
