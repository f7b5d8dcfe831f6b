#include "gatefold/recipe.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/fields.h"
#include "checkpoint/json.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/name_pattern.h"
#include "checkpoint/safetensors_writer.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::uint64_t max_bytes = 1'000'000;
constexpr std::string_view untouched = "none", fp8_cache = "fp8_e4m3";

void refuse_unknown(Fields& fields, const json& object, std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : object.items())
    if (std::find(known.begin(), known.end(), key) == known.end())
      fields.fail(fmt::format("{} is none of {}", quote(key), fmt::join(known, ", ")));
}

Result<RecipeRule> parse_rule(const json& value, const std::string& where) {
  if (!value.is_object())
    return Status(Code::bad_file, fmt::format("{}: {} is not an object", where, show_json(value)));
  Fields fields(value, where);
  refuse_unknown(fields, value, {"modules", "scheme"});
  RecipeRule rule{.modules = fields.text({"modules"}), .scheme = {}};
  const std::string name = fields.text({"scheme"});
  if (!fields.status().ok()) return fields.status();
  rule.scheme = find_scheme(name);
  if (name != untouched && !rule.scheme)
    fields.fail(fmt::format("scheme {} is neither a scheme (gatefold schemes lists them) nor {}", quote(name),
                            untouched));
  else if (rule.scheme && !scheme(*rule.scheme).weight.quantized())
    fields.fail(fmt::format("scheme {} does not quantize; {} leaves matrices as they are", name, untouched));
  if (auto pattern = NamePattern::compile(rule.modules); !pattern)
    fields.fail(fmt::format("modules {}: {}", quote(rule.modules), pattern.status().message()));
  if (!fields.status().ok()) return fields.status();
  return rule;
}

}  // namespace

Result<Recipe> parse_recipe(std::string_view text, const std::string& name) {
  const auto tree = parse_json(text, name);
  if (!tree) return tree.status();
  Fields fields(*tree, name);
  refuse_unknown(fields, *tree, {"rules", "kv_cache", "comment"});
  Recipe recipe{.name = name, .rules = {}, .fp8_kv_cache = false, .comment = fields.text({"comment"}, "")};
  const std::string cache = fields.text({"kv_cache"}, std::string(untouched));
  recipe.fp8_kv_cache = cache == fp8_cache;
  if (!recipe.fp8_kv_cache && cache != untouched)
    fields.fail(fmt::format("kv_cache {} is neither {} nor {}", quote(cache), fp8_cache, untouched));
  const json* rules = fields.array({"rules"});
  if (rules == nullptr && !recipe.fp8_kv_cache) fields.fail("no rules, and no kv_cache");
  if (!fields.status().ok()) return fields.status();
  for (std::size_t i = 0; rules != nullptr && i < rules->size(); ++i) {
    auto rule = parse_rule((*rules)[i], fmt::format("{}: rules[{}]", name, i));
    if (!rule) return rule.status();
    recipe.rules.push_back(std::move(*rule));
  }
  return recipe;
}

Result<Recipe> read_recipe(const fs::path& file) {
  const auto text = read_text(file, max_bytes);
  if (!text) return text.status();
  return parse_recipe(*text, file.string());
}

std::string recipe_text(const Recipe& recipe) {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  if (!recipe.comment.empty()) out["comment"] = recipe.comment;
  out["rules"] = nlohmann::ordered_json::array();
  for (const RecipeRule& rule : recipe.rules)
    out["rules"].push_back(
        {{"modules", rule.modules}, {"scheme", rule.scheme ? scheme(*rule.scheme).name : untouched}});
  out["kv_cache"] = recipe.fp8_kv_cache ? fp8_cache : untouched;
  return out.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

Status write_recipe(const Recipe& recipe, const fs::path& file) {
  const fs::path temporary = file.string() + fmt::format(".{}", getpid());
  Status status = write_file(temporary, recipe_text(recipe));
  std::error_code error;
  if (status.ok()) fs::rename(temporary, file, error);
  if (error) status = {Code::io_error, fmt::format("{}: {}", file.string(), error.message())};
  if (!status.ok()) fs::remove(temporary, error);
  return status;
}

}  // namespace gatefold
