#pragma once
/// \file
/// Members of a JSON object with their types and ranges. The first problem is kept and the rest gets harmless
/// values, so that reading a config is a list of assignments with one check at its end.

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "gatefold/status.h"

namespace gatefold {

struct IntRange {
  std::int64_t min = 1, max = 1;
};
struct RealRange {
  double min = 0, max = 0;  ///< inclusive
};

class Fields {
 public:
  /// `where` begins every message: "config.json: rope_scaling". `object` must outlive this.
  Fields(const nlohmann::json& object, std::string where);

  /// Absent and null are the same everywhere. Without a default, absence is an error. Of several keys (names
  /// that changed over time) any may be given; if several are, they must agree.
  using Keys = std::initializer_list<std::string_view>;
  int integer(Keys keys, IntRange range, std::optional<int> otherwise = std::nullopt);
  double real(Keys keys, RealRange range, std::optional<double> otherwise = std::nullopt);
  bool boolean(Keys keys, std::optional<bool> otherwise = std::nullopt);
  std::string text(Keys keys, std::optional<std::string> otherwise = std::nullopt);
  /// nullptr if absent.
  const nlohmann::json* object(Keys keys);
  const nlohmann::json* array(Keys keys);
  bool has(std::string_view key) const;

  void fail(const std::string& what, Code code = Code::bad_file);
  /// The first problem of this, or of a part that was read by other Fields.
  const Status& status() const { return status_; }
  void merge(const Status& status);

  const std::string& where() const { return where_; }

 private:
  const nlohmann::json* find(Keys keys);
  const nlohmann::json* require(Keys keys, bool optional);
  void wrong(Keys keys, const nlohmann::json& value, const std::string& expected);

  const nlohmann::json& object_;
  std::string where_;
  Status status_;
};

}  // namespace gatefold
