#include "checkpoint/side_files.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checkpoint/config.h"
#include "checkpoint/json.h"
#include "checkpoint/mapped_file.h"

namespace gatefold {
namespace {

constexpr std::uint64_t max_bytes = 16'000'000;

struct SideFile {
  const char* name;
  const char* method;  ///< its quant_method, which it may leave out
  const char* member;  ///< what holds the config; nullptr: the whole file
};
constexpr SideFile side_files[] = {{"quantize_config.json", "gptq", nullptr},
                                   {"quant_config.json", "awq", nullptr},
                                   {"hf_quant_config.json", "modelopt", "quantization"}};

constexpr const char* kv_cache = "kv_cache_quant_algo";
/// What decides how tensors are read.
constexpr const char* keys[] = {"quant_method", "quant_algo",        "bits",       "group_size", "desc_act",
                                "sym",          "checkpoint_format", "zero_point", "version",    kv_cache};

bool has(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && !found->is_null();
}

/// AutoAWQ writes its version as "gemm" into one file and as "GEMM" into the other.
bool agree(std::string_view key, const nlohmann::json& a, const nlohmann::json& b) {
  if (key != "version" || !a.is_string() || !b.is_string()) return a == b;
  return lower_case(a.get<std::string>()) == lower_case(b.get<std::string>());
}

Status compare(const nlohmann::json& config, const std::string& config_path, const nlohmann::json& side,
               const std::string& path) {
  for (const char* key : keys) {
    if (has(config, key) && has(side, key) && !agree(key, config[key], side[key]))
      return {Code::bad_file, fmt::format("{}: quantization_config.{} is {}, but {} says {}", config_path,
                                          key, show_json(config[key]), path, show_json(side[key]))};
  }
  return {};
}

}  // namespace

Status read_side_files(const std::filesystem::path& directory, const std::string& config_path,
                       nlohmann::json& quantization) {
  for (const SideFile& file : side_files) {
    const std::filesystem::path path = directory / file.name;
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) continue;
    const auto text = read_text(path, max_bytes);
    if (!text) return text.status();
    auto parsed = parse_json(*text, path.string(), ordered_key);
    if (!parsed) return parsed.status();
    if (file.member != nullptr) {
      const auto member = parsed->find(file.member);
      if (member == parsed->end() || !member->is_object())
        return {Code::bad_file, fmt::format("{}: no {}", path.string(), file.member)};
      parsed = nlohmann::json(*member);
    }
    if (!quantization.is_null()) {
      if (Status status = compare(quantization, config_path, *parsed, path.string()); !status.ok())
        return status;
      // config.json need not repeat it.
      if (const auto cache = parsed->find(kv_cache);
          cache != parsed->end() && !has(quantization, kv_cache) && !has(quantization, "kv_cache_scheme"))
        quantization[kv_cache] = *cache;
      continue;
    }
    quantization = std::move(*parsed);
    if (!quantization.contains("quant_method")) quantization["quant_method"] = file.method;
  }
  return {};
}

}  // namespace gatefold
