#include "checkpoint/index.h"

#include <fmt/format.h>

#include <utility>

#include "checkpoint/json.h"

namespace gatefold {
namespace {

bool is_plain_name(std::string_view name) {
  constexpr std::string_view extension = ".safetensors";
  return name.size() > extension.size() && name.ends_with(extension) && name.size() < 256 &&
         name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
}

class IndexVisitor final : public JsonVisitor {
 public:
  ShardIndex shards;
  bool found = false;

 private:
  Status scalar(nlohmann::json value) override {
    if (key(0) != "weight_map") return {};
    if (depth() == 1) return {Code::bad_file, "weight_map is not an object"};
    if (!value.is_string() || !is_plain_name(value.get_ref<const std::string&>()))
      return {Code::bad_file, fmt::format("weight_map: tensor {}: {} is not the plain name of a "
                                          ".safetensors file",
                                          quote(key(1)), show_json(value))};
    shards.emplace(key(1), value.get<std::string>());
    return {};
  }

  Status begin(bool is_object) override {
    if (key(0) != "weight_map") return {};
    if (depth() == 1 && is_object) {
      found = true;
      return {};
    }
    if (depth() == 1) return {Code::bad_file, "weight_map is not an object"};
    return {Code::bad_file,
            fmt::format("weight_map: tensor {}: not a file name, but an object or array", quote(key(1)))};
  }

  Status end() override { return {}; }
};

}  // namespace

Result<ShardIndex> parse_index(std::string_view text, const std::string& file) {
  IndexVisitor visitor;
  if (Status status = visitor.parse(text, file); !status.ok()) return status;
  if (!visitor.found) return Status{Code::bad_file, file + ": no weight_map"};
  if (visitor.shards.empty()) return Status{Code::bad_file, file + ": weight_map is empty"};
  return std::move(visitor.shards);
}

}  // namespace gatefold
