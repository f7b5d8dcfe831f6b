#pragma once
/// \file
/// Recipes: which matrices of a model are stored in which scheme. docs/recipes.md has the file format.
///
///   {"rules": [{"modules": ".*\\.experts\\.", "scheme": "mxfp4"}, {"modules": ".*", "scheme": "fp8_block"}],
///    "kv_cache": "fp8_e4m3"}

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gatefold/scheme.h"
#include "gatefold/status.h"

namespace gatefold {

class Checkpoint;

struct RecipeRule {
  /// A regular expression; it selects the modules of whose names it matches the beginning, or all
  /// ("model.layers.0.self_attn.q_proj"; for experts always "...experts.<e>.<projection>").
  std::string modules;
  std::optional<SchemeId> scheme;  ///< one that quantizes; none: left as it is
};

struct Recipe {
  std::string name;               ///< the file, for messages and tables
  std::vector<RecipeRule> rules;  ///< the first that matches decides
  bool fp8_kv_cache = false;      ///< keys and values are kept as e4m3
  std::string comment;
};

/// Errors name the file, the rule (from 0) and the value.
Result<Recipe> parse_recipe(std::string_view text, const std::string& name);
Result<Recipe> read_recipe(const std::filesystem::path& file);
/// JSON that parse_recipe reads.
std::string recipe_text(const Recipe& recipe);
/// Replaces the file, whole or not at all.
Status write_recipe(const Recipe& recipe, const std::filesystem::path& file);

/// A recipe applied to a model.
struct ModelSchemes {
  std::vector<std::optional<SchemeId>> experts;  ///< by layer, of all its routed experts
  std::map<std::string, SchemeId> others;        ///< by module
  bool fp8_kv_cache = false;

  /// Of a module that is no routed expert's.
  std::optional<SchemeId> other(const std::string& module) const {
    const auto found = others.find(module);
    return found == others.end() ? std::nullopt : std::optional(found->second);
  }
};

/// All routed experts in one scheme, nothing else quantized.
ModelSchemes uniform_schemes(const Checkpoint& checkpoint, SchemeId scheme);

/// Routers, gates of shared experts, embeddings and norms are no modules that a rule could select. Errors: a
/// model that is quantized already; a rule that matches nothing, or only what rules before it have decided;
/// a scheme that cannot store a matrix; experts of one layer, or parts of a shared expert, in different
/// schemes, since a layer runs in one.
Result<ModelSchemes> resolve(const Recipe& recipe, const Checkpoint& checkpoint);

}  // namespace gatefold
