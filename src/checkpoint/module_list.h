#pragma once
/// \file
/// A list of modules that a quantization_config leaves unquantized (ignore, exclude_modules,
/// modules_to_not_convert).

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "checkpoint/name_pattern.h"

namespace gatefold {

class ModuleList {
 public:
  /// The first of `keys` that `quantization` has; none of them is an empty list. Errors: not a list of
  /// strings.
  static Result<ModuleList> read(const nlohmann::json& quantization, std::initializer_list<const char*> keys,
                                 const std::string& where);

  /// Whether an entry is this module, one that it is part of, or a shell pattern of such. (Entries like
  /// "gate" that are meant as parts of names do not count: they would name gate_proj, too.)
  bool names(const std::string& module) const;
  /// The key that was found.
  const std::string& key() const { return key_; }

 private:
  std::string key_;
  std::vector<std::string> modules_;
  std::vector<NamePattern> patterns_;
};

}  // namespace gatefold
