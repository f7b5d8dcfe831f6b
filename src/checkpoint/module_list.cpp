#include "checkpoint/module_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "checkpoint/json.h"

namespace gatefold {
namespace {

constexpr std::size_t max_states = 8192;

/// A shell pattern to a regular expression of whole modules.
std::string to_regex(const std::string& shell) {
  std::string regex;
  for (const char c : shell) {
    const bool literal = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-';
    if (c == '*')
      regex += '.';  // followed by the star
    else if (!literal && c != '?' && c != '[' && c != ']')
      regex += '\\';
    regex += c == '?' ? '.' : c;
  }
  return regex + "($|\\.)";
}

}  // namespace

Result<ModuleList> ModuleList::read(const nlohmann::json& quantization,
                                    std::initializer_list<const char*> keys, const std::string& where) {
  ModuleList list;
  std::size_t states = 0;
  for (const char* key : keys) {
    const auto found = quantization.find(key);
    if (found == quantization.end() || found->is_null()) continue;
    list.key_ = key;
    if (!found->is_array()) return Status(Code::bad_file, fmt::format("{}.{} is not a list", where, key));
    for (const nlohmann::json& entry : *found) {
      if (!entry.is_string())
        return Status(Code::bad_file, fmt::format("{}.{}: {} is not a string", where, key, show_json(entry)));
      const auto name = entry.get<std::string>();
      if (name.find_first_of("*?") == std::string::npos) {
        list.modules_.push_back(name);
        continue;
      }
      auto pattern = NamePattern::compile(to_regex(name));
      if (!pattern)
        return Status(pattern.status().code(),
                      fmt::format("{}.{}: {}: {}", where, key, quote(name), pattern.status().message()));
      states += pattern->states();
      if (states > max_states)
        return Status(Code::unsupported,
                      fmt::format("{}.{}: patterns of more than {} states", where, key, max_states));
      list.patterns_.push_back(std::move(*pattern));
    }
    break;
  }
  return list;
}

bool ModuleList::names(const std::string& module) const {
  for (const std::string& entry : modules_)
    if (!entry.empty() && module.starts_with(entry) &&
        (module.size() == entry.size() || module[entry.size()] == '.'))
      return true;
  return std::any_of(patterns_.begin(), patterns_.end(),
                     [&](const NamePattern& pattern) { return pattern.matches(module); });
}

}  // namespace gatefold
