#include "checkpoint/fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <utility>

#include "checkpoint/json.h"

namespace gatefold {

Fields::Fields(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

int Fields::integer(Keys keys, IntRange range, std::optional<int> otherwise) {
  const nlohmann::json* value = require(keys, otherwise.has_value());
  if (value == nullptr) return otherwise.value_or(static_cast<int>(range.min));
  // A number above the signed range is unsigned in the tree; it must not wrap around.
  const bool fits = value->is_number_integer() &&
                    (!value->is_number_unsigned() ||
                     value->get<std::uint64_t>() <= static_cast<std::uint64_t>(range.max)) &&
                    value->get<std::int64_t>() >= range.min && value->get<std::int64_t>() <= range.max;
  if (fits) return value->get<int>();
  wrong(keys, *value, fmt::format("an integer in [{}, {}]", range.min, range.max));
  return static_cast<int>(range.min);
}

double Fields::real(Keys keys, RealRange range, std::optional<double> otherwise) {
  const nlohmann::json* value = require(keys, otherwise.has_value());
  if (value == nullptr) return otherwise.value_or(range.min);
  if (value->is_number()) {
    const double number = value->get<double>();
    if (number >= range.min && number <= range.max) return number;
  }
  wrong(keys, *value, fmt::format("a number in [{}, {}]", range.min, range.max));
  return range.min;
}

bool Fields::boolean(Keys keys, std::optional<bool> otherwise) {
  const nlohmann::json* value = require(keys, otherwise.has_value());
  if (value == nullptr) return otherwise.value_or(false);
  if (!value->is_boolean()) wrong(keys, *value, "true or false");
  return value->is_boolean() && value->get<bool>();
}

std::string Fields::text(Keys keys, std::optional<std::string> otherwise) {
  const nlohmann::json* value = require(keys, otherwise.has_value());
  if (value == nullptr) return otherwise.value_or("");
  if (value->is_string()) return value->get<std::string>();
  wrong(keys, *value, "a string");
  return "";
}

const nlohmann::json* Fields::object(Keys keys) {
  const nlohmann::json* value = find(keys);
  if (value == nullptr || value->is_object()) return value;
  wrong(keys, *value, "an object");
  return nullptr;
}

const nlohmann::json* Fields::array(Keys keys) {
  const nlohmann::json* value = find(keys);
  if (value == nullptr || value->is_array()) return value;
  wrong(keys, *value, "an array");
  return nullptr;
}

bool Fields::has(std::string_view key) const {
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

void Fields::fail(const std::string& what, Code code) {
  if (status_.ok()) status_ = {code, where_ + ": " + what};
}

void Fields::merge(const Status& status) {
  if (status_.ok()) status_ = status;
}

const nlohmann::json* Fields::find(Keys keys) {
  const nlohmann::json* first = nullptr;
  for (const std::string_view key : keys) {
    if (!has(key)) continue;
    const nlohmann::json& value = *object_.find(key);
    if (first != nullptr && value != *first)
      fail(fmt::format("{} disagree: {} and {}", fmt::join(keys, " and "), show_json(*first),
                       show_json(value)));
    if (first == nullptr) first = &value;
  }
  return first;
}

const nlohmann::json* Fields::require(Keys keys, bool optional) {
  const nlohmann::json* value = find(keys);
  if (value == nullptr && !optional) fail(fmt::format("no {}", fmt::join(keys, " or ")));
  return value;
}

void Fields::wrong(Keys keys, const nlohmann::json& value, const std::string& expected) {
  fail(fmt::format("{} is {}, not {}", fmt::join(keys, " or "), show_json(value), expected));
}

}  // namespace gatefold
