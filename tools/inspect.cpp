#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "gatefold/checkpoint.h"
#include "tools/cli.h"

namespace gatefold::cli {
namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

/// "model.layers.*.mlp.experts.*.up_proj.weight": tensors whose names differ only in numbers are one group.
std::string pattern(std::string_view name) {
  std::string result;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    if (begin > 0) result += '.';
    result += number ? "*" : part;
    begin = end + 1;
  }
  return result;
}

struct Group {
  std::string pattern, convention;
  DType dtype = DType::u8;
  std::vector<std::int64_t> shape;
  std::int64_t count = 0;
  std::uint64_t bytes = 0;
};

/// Tensors of one pattern, convention, type and shape; the largest first.
std::vector<Group> groups(const Checkpoint& checkpoint) {
  std::map<std::tuple<std::string, std::string, DType, std::vector<std::int64_t>>, Group> by_key;
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    std::string key = pattern(tensor.name);
    std::string convention = checkpoint.convention(tensor);
    Group& group = by_key[{key, convention, tensor.dtype, tensor.shape}];
    group.pattern = std::move(key);
    group.convention = std::move(convention);
    group.dtype = tensor.dtype;
    group.shape = tensor.shape;
    ++group.count;
    group.bytes += tensor.bytes();
  }
  std::vector<Group> sorted;
  sorted.reserve(by_key.size());
  for (auto& [key, group] : by_key) sorted.push_back(std::move(group));
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  return sorted;
}

std::vector<const TensorEntry*> largest(const Checkpoint& checkpoint, std::size_t count) {
  std::vector<const TensorEntry*> sorted;
  sorted.reserve(checkpoint.tensors().size());
  for (const TensorEntry& tensor : checkpoint.tensors()) sorted.push_back(&tensor);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto* a, const auto* b) { return a->bytes() > b->bytes(); });
  sorted.resize(std::min(count, sorted.size()));
  return sorted;
}

/// Runs of layers that store their experts in the same way: "0-3", "bf16", bytes.
struct Layers {
  int first = 0, last = 0;
  std::string stored;
  std::uint64_t bytes = 0;
};

std::vector<Layers> expert_layers(const Checkpoint& checkpoint) {
  std::vector<Layers> runs;
  for (const ExpertGroup& group : checkpoint.expert_groups()) {
    if (runs.empty() || runs.back().last + 1 != group.layer || runs.back().stored != group.stored)
      runs.push_back({group.layer, group.layer, group.stored, 0});
    runs.back().last = group.layer;
    runs.back().bytes += group.bytes;
  }
  return runs;
}

std::string kv_cache(const Checkpoint& checkpoint) {
  const auto fp8 = checkpoint.fp8_kv_cache();
  if (!fp8) return "other: " + fp8.status().message();
  return *fp8 ? "fp8_e4m3" : "unquantized";
}

Json to_json(const Checkpoint& checkpoint, std::uint64_t bytes) {
  const ModelConfig& config = checkpoint.config();
  Json json = {{"model_type", config.model_type},
               {"dtype", name(config.dtype)},
               {"layers", config.layers},
               {"moe_layers", std::count(config.is_moe.begin(), config.is_moe.end(), true)},
               {"hidden", config.hidden},
               {"vocab", config.vocab},
               {"experts", config.moe.experts},
               {"top_k", config.moe.top_k},
               {"expert_intermediate", config.moe.intermediate},
               {"shared_intermediate", config.moe.shared.intermediate},
               {"convention", checkpoint.convention()},
               {"files", checkpoint.files().size()},
               {"tensors", checkpoint.tensors().size()},
               {"bytes", bytes}};
  const Result<SchemeId> stored = checkpoint.stored_scheme();
  json["scheme"] = stored ? Json(scheme(*stored).name) : Json(nullptr);
  json["kv_cache"] = kv_cache(checkpoint);
  json["expert_layers"] = Json::array();
  for (const Layers& run : expert_layers(checkpoint))
    json["expert_layers"].push_back(
        {{"first", run.first}, {"last", run.last}, {"stored", run.stored}, {"bytes", run.bytes}});
  json["groups"] = Json::array();
  for (const Group& group : groups(checkpoint))
    json["groups"].push_back({{"name", group.pattern},
                              {"convention", group.convention},
                              {"dtype", name(group.dtype)},
                              {"shape", group.shape},
                              {"count", group.count},
                              {"bytes", group.bytes}});
  json["largest"] = Json::array();
  for (const TensorEntry* tensor : largest(checkpoint, 10))
    json["largest"].push_back({{"name", tensor->name},
                               {"dtype", name(tensor->dtype)},
                               {"shape", tensor->shape},
                               {"bytes", tensor->bytes()}});
  return json;
}

void print(const Checkpoint& checkpoint, std::uint64_t bytes) {
  const ModelConfig& config = checkpoint.config();
  const MoeSpec& moe = config.moe;
  fmt::print("{}\n", checkpoint.directory().string());
  fmt::print("  family   {}, {}\n", config.model_type, name(config.dtype));
  fmt::print("  layers   {}, of which {} with experts; hidden {}, vocabulary {}\n", config.layers,
             std::count(config.is_moe.begin(), config.is_moe.end(), true), config.hidden, config.vocab);
  fmt::print("  experts  {} per layer, {} per token, width {}", moe.experts, moe.top_k, moe.intermediate);
  if (moe.shared.intermediate > 0)
    fmt::print("; shared, width {}{}", moe.shared.intermediate, moe.shared.gated ? ", gated" : "");
  fmt::print("\n  KV cache {}", kv_cache(checkpoint));
  fmt::print("\n  files    {}, {} tensors, {}\n\n", checkpoint.files().size(), checkpoint.tensors().size(),
             human_bytes(bytes));

  const Table experts({{"experts of", -12}, {"bytes", 9}, {"stored as", -1}});
  for (const Layers& run : expert_layers(checkpoint))
    experts.row({run.first == run.last ? fmt::format("layer {}", run.first)
                                       : fmt::format("layers {}-{}", run.first, run.last),
                 human_bytes(run.bytes), fmt::format("{} ({})", run.stored, checkpoint.convention())});

  fmt::print("\n");
  const std::vector<Group> all = groups(checkpoint);
  std::size_t width = 10;
  for (const Group& group : all) width = std::max(width, group.convention.size());
  const Table table({{"tensors", 7},
                     {"bytes", 9},
                     {"type", -7},
                     {"shape", -18},
                     {"convention", -static_cast<int>(width)},
                     {"name", -1}});
  for (const Group& group : all)
    table.row({fmt::to_string(group.count), human_bytes(group.bytes), std::string(name(group.dtype)),
               shape_text(group.shape), group.convention, group.pattern});

  fmt::print("\n");
  const Table big({{"largest", 9}, {"type", -7}, {"shape", -18}, {"name", -1}});
  for (const TensorEntry* tensor : largest(checkpoint, 5))
    big.row({human_bytes(tensor->bytes()), std::string(name(tensor->dtype)), shape_text(tensor->shape),
             tensor->name});
}

Status inspect(const std::string& directory, Json* json) {
  const Result<Checkpoint> checkpoint = Checkpoint::open(directory);
  if (!checkpoint) return checkpoint.status();
  std::uint64_t bytes = 0;
  for (const TensorEntry& tensor : checkpoint->tensors()) bytes += tensor.bytes();
  if (json != nullptr)
    *json = to_json(*checkpoint, bytes);
  else
    print(*checkpoint, bytes);
  return {};
}

}  // namespace

void add_inspect(Cli& cli) {
  auto directory = std::make_shared<std::string>();
  CLI::App* command = cli.add("inspect", "What a checkpoint holds, and how its experts are stored",
                              [directory](Json* json) { return inspect(*directory, json); });
  add_directory(command, *directory);
}

}  // namespace gatefold::cli
