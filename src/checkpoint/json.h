#pragma once
/// \file
/// Strict JSON: what RFC 8259 leaves open is refused. The text is one object, from its first byte on; no key
/// twice in an object; bounded depth; valid UTF-8; nothing but white space behind it.

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "gatefold/status.h"

namespace gatefold {

/// Walks a text without building a tree; derived classes take what they need.
class JsonVisitor : private nlohmann::json_sax<nlohmann::json> {
 public:
  /// `file` begins every message.
  Status parse(std::string_view text, const std::string& file);

 protected:
  JsonVisitor() = default;
  ~JsonVisitor() override = default;

  /// A number, string, bool or null.
  virtual Status scalar(nlohmann::json value) = 0;
  virtual Status begin(bool is_object) = 0;  ///< an object or array; not called for the outermost
  virtual Status end() = 0;

  /// Containers around the current place: 1 within the outermost object.
  std::size_t depth() const { return levels_.size(); }
  /// The key at which the current place is within its i-th container; empty in arrays.
  const std::string& key(std::size_t i) const { return levels_[i].key; }
  bool in_object() const { return levels_.back().is_object; }

 private:
  struct Level {
    bool is_object;
    std::string key;
    std::set<std::string> keys;
  };

  bool null() override { return take(nullptr); }
  bool boolean(bool value) override { return take(value); }
  bool number_integer(number_integer_t value) override { return take(value); }
  bool number_unsigned(number_unsigned_t value) override { return take(value); }
  bool number_float(number_float_t value, const string_t&) override { return take(value); }
  bool string(string_t& value) override { return take(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(true); }
  bool start_array(std::size_t) override { return open(false); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& key) override;
  bool parse_error(std::size_t position, const std::string& token,
                   const nlohmann::json::exception& error) override;

  bool take(nlohmann::json value);
  bool open(bool is_object);
  bool close();
  bool fail(const std::string& what);
  bool check(Status status);

  std::string file_;
  std::vector<Level> levels_;
  Status status_;
};

/// The whole text as a tree. Trees sort keys: objects under the key `ordered`, whose order means something,
/// become arrays of [key, value].
Result<nlohmann::json> parse_json(std::string_view text, const std::string& file,
                                  const std::string& ordered = {});

/// A string from a file, for messages: quoted, cut to a sensible length, control characters replaced.
std::string quote(std::string_view text);
/// Its ASCII letters in lower case.
std::string lower_case(std::string text);
/// A value from a file, for messages.
std::string show_json(const nlohmann::json& value);

}  // namespace gatefold
