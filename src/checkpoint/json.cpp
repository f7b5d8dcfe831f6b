#include "checkpoint/json.h"

#include <fmt/format.h>

#include <utility>

namespace gatefold {
namespace {

constexpr std::size_t max_depth = 32;
constexpr std::size_t max_quoted = 200;

std::string printable(std::string_view text) {
  std::string result(text.substr(0, max_quoted));
  for (char& c : result)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  if (text.size() > max_quoted) result += "...";
  return result;
}

class TreeBuilder final : public JsonVisitor {
 public:
  explicit TreeBuilder(std::string ordered) : ordered_(std::move(ordered)) {}
  nlohmann::json take() { return std::move(root_); }

 private:
  Status scalar(nlohmann::json value) override {
    place() = std::move(value);
    return {};
  }
  Status begin(bool is_object) override {
    nlohmann::json& here = place();
    const bool is_ordered = !ordered_.empty() && key(depth() - 1) == ordered_;
    here = is_object && !is_ordered ? nlohmann::json::object() : nlohmann::json::array();
    open_.push_back(&here);
    return {};
  }
  Status end() override {
    open_.pop_back();
    return {};
  }

  /// The new element. A container does not move while it is open: its own parent gets no elements then.
  nlohmann::json& place() {
    nlohmann::json& container = *open_.back();
    if (container.is_object()) return container[key(depth() - 1)];
    container.push_back(nullptr);
    if (!in_object()) return container.back();
    container.back() = {key(depth() - 1), nullptr};
    return container.back()[1];
  }

  const std::string ordered_;
  nlohmann::json root_ = nlohmann::json::object();
  std::vector<nlohmann::json*> open_{&root_};
};

}  // namespace

std::string quote(std::string_view text) {
  return fmt::format("'{}'", printable(text));
}

std::string lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return text;
}

std::string show_json(const nlohmann::json& value) {
  return printable(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

Status JsonVisitor::parse(std::string_view text, const std::string& file) {
  file_ = file;
  levels_.clear();
  status_ = {};
  // The parser would take a NUL byte as the end of the text and skip a byte order mark.
  if (const std::size_t nul = text.find('\0'); nul != text.npos)
    fail(fmt::format("a NUL byte at {} in JSON text", nul));
  else if (text.empty() || text.front() != '{')
    fail("not a JSON object: it does not begin with '{'");
  else
    nlohmann::json::sax_parse(text.begin(), text.end(),
                              static_cast<nlohmann::json_sax<nlohmann::json>*>(this));
  return std::move(status_);
}

bool JsonVisitor::key(string_t& key) {
  Level& level = levels_.back();
  if (!level.keys.insert(key).second) return fail(fmt::format("key {} twice in one object", quote(key)));
  level.key = std::move(key);
  return true;
}

bool JsonVisitor::parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) {
  return fail(printable(error.what()));
}

bool JsonVisitor::take(nlohmann::json value) {
  return check(scalar(std::move(value)));
}

bool JsonVisitor::open(bool is_object) {
  if (depth() == max_depth) return fail(fmt::format("JSON nested deeper than {} levels", max_depth));
  const bool outermost = levels_.empty();
  if (!outermost && !check(begin(is_object))) return false;
  levels_.push_back({is_object, {}, {}});
  return true;
}

bool JsonVisitor::close() {
  levels_.pop_back();
  return levels_.empty() || check(end());
}

bool JsonVisitor::fail(const std::string& what) {
  return check({Code::bad_file, what});
}

bool JsonVisitor::check(Status status) {
  if (status.ok()) return true;
  status_ = {status.code(), file_ + ": " + status.message()};
  return false;
}

Result<nlohmann::json> parse_json(std::string_view text, const std::string& file,
                                  const std::string& ordered) {
  TreeBuilder tree(ordered);
  if (Status status = tree.parse(text, file); !status.ok()) return status;
  return tree.take();
}

}  // namespace gatefold
