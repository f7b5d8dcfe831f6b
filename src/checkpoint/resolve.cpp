// A recipe applied to a model.

#include <fmt/format.h>

#include "checkpoint/json.h"
#include "checkpoint/name_pattern.h"
#include "checkpoint/quantizable.h"
#include "gatefold/checkpoint.h"
#include "gatefold/recipe.h"

namespace gatefold {
namespace {

constexpr std::size_t max_states = 8192;  ///< of all patterns: each is tried on every matrix of a model

std::string_view name_of(const std::optional<SchemeId>& id) {
  return id ? scheme(*id).name : "none";
}

/// Which rule decides on each module, and what it says.
class Rules {
 public:
  struct Choice {
    std::size_t rule = 0;  // their number: none
    std::optional<SchemeId> scheme;
  };

  explicit Rules(const Recipe& recipe) : recipe_(recipe), uses_(recipe.rules.size()) {}

  Status compile() {
    std::size_t states = 0;
    for (std::size_t i = 0; i < recipe_.rules.size(); ++i) {
      auto pattern = NamePattern::compile(recipe_.rules[i].modules);
      if (!pattern) return at(i, pattern.status().code(), pattern.status().message());
      states += pattern->states();
      if (states > max_states)
        return at(i, Code::unsupported, fmt::format("patterns of more than {} states", max_states));
      patterns_.push_back(std::move(*pattern));
    }
    return {};
  }

  /// Error: the scheme cannot store the matrix.
  Result<Choice> choose(const StoredLayer& layer) {
    Choice choice{recipe_.rules.size(), {}};
    for (std::size_t i = patterns_.size(); i-- > 0;)
      if (patterns_[i].matches(layer.module)) {
        choice = {i, recipe_.rules[i].scheme};
        uses_[i].matched = true;
      }
    if (choice.rule == recipe_.rules.size()) return choice;
    uses_[choice.rule].decided = true;
    if (!choice.scheme) return choice;
    const Status fits = check_shape(*choice.scheme, layer.n, layer.k);
    if (!fits.ok()) return at(choice.rule, fits.code(), fmt::format("{}: {}", layer.module, fits.message()));
    return choice;
  }

  Status check_used() const {
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      if (!uses_[i].matched) return at(i, Code::invalid_argument, "matches no matrix that can be quantized");
      if (!uses_[i].decided)
        return at(i, Code::invalid_argument, "matches only what rules before it have decided");
    }
    return {};
  }

  /// Of matrices that share a scheme.
  Status check_same(const Choice& first, const std::string& first_module, const Choice& other,
                    const std::string& module) const {
    if (first.scheme == other.scheme) return {};
    return {Code::unsupported,
            fmt::format("{}: {} is to be {} ({}), but {} {} ({}): they run together, in one scheme",
                        recipe_.name, first_module, name_of(first.scheme), said_by(first.rule), module,
                        name_of(other.scheme), said_by(other.rule))};
  }

 private:
  struct Uses {
    bool matched = false, decided = false;
  };

  std::string said_by(std::size_t rule) const {
    return rule == recipe_.rules.size() ? "no rule" : fmt::format("rules[{}]", rule);
  }
  Status at(std::size_t rule, Code code, const std::string& what) const {
    return {code, fmt::format("{}: rules[{}]: {} to {}: {}", recipe_.name, rule,
                              quote(recipe_.rules[rule].modules), name_of(recipe_.rules[rule].scheme), what)};
  }

  const Recipe& recipe_;
  std::vector<NamePattern> patterns_;
  std::vector<Uses> uses_;
};

constexpr Projection projections[] = {Projection::gate, Projection::up, Projection::down};

Result<std::optional<SchemeId>> scheme_of_experts(Rules& rules, const Checkpoint& checkpoint, int layer) {
  const MoeSpec& moe = checkpoint.config().moe;
  std::optional<Rules::Choice> first;
  std::string first_module;
  for (int expert = 0; expert < moe.experts; ++expert)
    for (const Projection p : projections) {
      const bool down = p == Projection::down;
      const StoredLayer matrix{checkpoint.expert_module(layer, expert, p),
                               down ? moe.hidden : moe.intermediate, down ? moe.intermediate : moe.hidden};
      const auto choice = rules.choose(matrix);
      if (!choice) return choice.status();
      if (!first) {
        first = *choice;
        first_module = matrix.module;
      }
      if (Status status = rules.check_same(*first, first_module, *choice, matrix.module); !status.ok())
        return status;
    }
  return first->scheme;
}

}  // namespace

ModelSchemes uniform_schemes(const Checkpoint& checkpoint, SchemeId scheme) {
  ModelSchemes schemes;
  for (const bool is_moe : checkpoint.config().is_moe)
    schemes.experts.push_back(is_moe ? std::optional(scheme) : std::nullopt);
  return schemes;
}

Result<ModelSchemes> resolve(const Recipe& recipe, const Checkpoint& checkpoint) {
  if (Status status = check_unquantized(checkpoint); !status.ok()) return status;
  const ModelConfig& config = checkpoint.config();
  Rules rules(recipe);
  if (Status status = rules.compile(); !status.ok()) return status;
  ModelSchemes schemes{.experts = {}, .others = {}, .fp8_kv_cache = recipe.fp8_kv_cache};
  schemes.experts.resize(config.is_moe.size());
  for (int layer = 0; layer < config.layers; ++layer) {
    if (!config.is_moe[static_cast<std::size_t>(layer)]) continue;
    auto scheme = scheme_of_experts(rules, checkpoint, layer);
    if (!scheme) return scheme.status();
    schemes.experts[static_cast<std::size_t>(layer)] = *scheme;
  }
  std::map<std::string, Rules::Choice> chosen;
  for (const StoredLayer& layer : checkpoint.other_unquantized_layers()) {
    const auto choice = rules.choose(layer);
    if (!choice) return choice.status();
    chosen[layer.module] = *choice;
    if (choice->scheme) schemes.others[layer.module] = *choice->scheme;
  }
  for (int layer = 0; config.moe.shared.intermediate > 0 && layer < config.layers; ++layer) {
    const std::string first = checkpoint.shared_expert_module(layer, Projection::gate);
    for (const Projection p : {Projection::up, Projection::down}) {
      const std::string other = checkpoint.shared_expert_module(layer, p);
      if (!chosen.contains(first) || !chosen.contains(other)) continue;
      if (Status status = rules.check_same(chosen[first], first, chosen[other], other); !status.ok())
        return status;
    }
  }
  if (Status status = rules.check_used(); !status.ok()) return status;
  return schemes;
}

}  // namespace gatefold
