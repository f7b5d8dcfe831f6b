#include "gatefold/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/config.h"
#include "checkpoint/convention.h"
#include "checkpoint/families.h"
#include "checkpoint/json.h"
#include "checkpoint/side_files.h"
#include "checkpoint/source.h"
#include "format/row_kernels.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t max_config_bytes = 16'000'000;
constexpr DType float_dtypes[] = {DType::bf16, DType::f16, DType::f32};

/// What the names of a model begin with when it is, or is not, a part of another one.
std::string find_prefix(const Source& source) {
  const auto tensors = source.tensors();
  for (std::string prefix : {"model.", "language_model.model.", "model.language_model.", ""}) {
    const std::string first = prefix + "layers.";
    const auto found =
        std::lower_bound(tensors.begin(), tensors.end(), first,
                         [](const TensorEntry& entry, const std::string& name) { return entry.name < name; });
    if (found != tensors.end() && found->name.starts_with(first)) return prefix;
  }
  return "model.";
}

/// The tensors of a layer's routed experts.
struct LayerExperts {
  bool fused[3] = {}, separate[3] = {};  // by Projection: how they are stored
  std::set<std::string_view> schemes;    // that they are stored in
  std::optional<SchemeId> scheme;        // of the first of them
  std::string other;                     // why the first of the rest is stored in none
  Status unsupported;                    // why there is no one scheme
  std::uint64_t bytes = 0;
};

}  // namespace

std::string_view name(Projection projection) {
  constexpr std::string_view names[] = {"gate", "up", "down"};
  return names[static_cast<std::size_t>(projection)];
}

/// Neither copied nor moved: the reader refers to the source and the config.
struct Checkpoint::State {
  State(fs::path directory_, std::string text_, ParsedConfig config_, Source source_)
      : directory(std::move(directory_)),
        config_path((directory / "config.json").string()),
        config_text(std::move(text_)),
        config(std::move(config_)),
        source(std::move(source_)),
        names(*config.family, find_prefix(source)) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  /// Checks all tensors of the MoE layers, as far as they exist, and notes how the experts are stored.
  Status scan();
  Status scan_expert_tensor(const TensorEntry& entry, const ExpertTensor& tensor);
  Status scan_block(int layer) const;

  Result<Linear> locate(int layer, int expert, Projection projection) const;
  Result<ExpertMatrix> read_expert(const Linear& linear) const;
  Result<SchemeId> shared_scheme(int layer) const;
  Status check_moe_layer(int layer) const;
  bool is_known(const ExpertTensor& tensor) const {
    return tensor.layer < config.model.layers;  // beyond them: modules that predict several tokens
  }

  const fs::path directory;
  const std::string config_path, config_text;
  ParsedConfig config;
  const Source source;
  const ModuleNames names;
  const Convention* convention = nullptr;
  std::unique_ptr<LinearReader> reader;
  std::map<int, LayerExperts> layers;
  std::string last_module;  // of the scan
};

Result<Checkpoint> Checkpoint::open(const fs::path& directory) {
  const std::string config_path = (directory / "config.json").string();
  auto text = read_text(config_path, max_config_bytes);
  if (!text) return text.status();
  auto config = parse_config(*text, config_path);
  if (!config) return config.status();
  if (Status status = read_side_files(directory, config_path, config->quantization); !status.ok())
    return status;
  auto source = Source::open(directory);
  if (!source) return source.status();

  auto state = std::make_shared<State>(directory, std::move(*text), std::move(*config), std::move(*source));
  auto convention = find_convention(state->config.quantization, config_path);
  if (!convention) return convention.status();
  state->convention = *convention;
  auto reader =
      (*convention)->open(state->source, state->config.quantization, state->config.model, config_path);
  if (!reader) return reader.status();
  state->reader = std::move(*reader);
  state->config.model.moe.activation_rule = state->reader->activation_rule();
  if (Status status = state->scan(); !status.ok()) return status;
  return Checkpoint(std::move(state));
}

Status Checkpoint::State::scan() {
  if (!config.has_dtype)
    for (const TensorEntry& entry : source.tensors())
      if (std::find(std::begin(float_dtypes), std::end(float_dtypes), entry.dtype) !=
          std::end(float_dtypes)) {
        set_dtype(config.model, entry.dtype);
        break;
      }
  for (const TensorEntry& entry : source.tensors())
    if (const auto tensor = names.parse(entry.name); tensor && is_known(*tensor))
      if (Status status = scan_expert_tensor(entry, *tensor); !status.ok()) return status;
  for (int layer = 0; layer < config.model.layers; ++layer)
    if (config.model.is_moe[static_cast<std::size_t>(layer)])
      if (Status status = scan_block(layer); !status.ok()) return status;
  return {};
}

Status Checkpoint::State::scan_expert_tensor(const TensorEntry& entry, const ExpertTensor& tensor) {
  const ModelConfig& model = config.model;
  const auto error = [&](const std::string& what) {
    return Status{Code::bad_file, source.where(entry) + ": " + what};
  };
  if (!model.is_moe[static_cast<std::size_t>(tensor.layer)])
    return error(fmt::format("{} says that layer {} has no experts", config_path, tensor.layer));
  if (tensor.expert && *tensor.expert >= model.moe.experts)
    return error(fmt::format("{} says that there are {} experts", config_path, model.moe.experts));
  const bool fused = !tensor.expert.has_value();
  if (model.moe.bias && fused && tensor.suffix == "_bias") {
    layers[tensor.layer].bytes += entry.bytes();
    const std::int64_t rows = tensor.gate_up ? 2 * model.moe.intermediate : model.moe.hidden;
    return require_tensor(source, entry.name, {{model.moe.experts, rows}}, float_dtypes).status();
  }
  const auto suffixes = reader->suffixes(fused);
  if (std::find(suffixes.begin(), suffixes.end(), tensor.suffix) == suffixes.end())
    return error(fmt::format(
        "an expert has no such tensor in the convention {}, which {} {}", convention->name, config_path,
        config.quantization.is_null() ? "implies by having no quantization_config" : "names"));

  LayerExperts& layer = layers[tensor.layer];
  layer.bytes += entry.bytes();
  for (const Projection projection :
       {tensor.projection, tensor.gate_up ? Projection::up : tensor.projection}) {
    const auto p = static_cast<std::size_t>(projection);
    (fused ? layer.fused : layer.separate)[p] = true;
    if (layer.fused[p] && layer.separate[p])
      return error("the experts of this layer are stored twice, fused and one by one");
  }

  const Linear linear = fused ? names.fused_expert(model.moe, tensor.layer, 0, tensor.projection)
                              : names.expert(model.moe, tensor.layer, *tensor.expert, tensor.projection);
  if (linear.module == last_module) return {};
  last_module = linear.module;
  const auto scheme = reader->scheme(linear);
  if (!scheme && scheme.status().code() != Code::unsupported) return scheme.status();
  if (!scheme) {
    if (layer.unsupported.ok()) layer.unsupported = scheme.status();
    if (layer.other.empty()) layer.other = scheme.status().message();
    return {};
  }
  const bool plain = !gatefold::scheme(*scheme).weight.quantized();
  layer.schemes.insert(plain && entry.dtype == DType::f32 ? std::string_view("f32")
                                                          : gatefold::scheme(*scheme).name);
  if (!layer.scheme) layer.scheme = *scheme;
  if (*layer.scheme != *scheme && layer.unsupported.ok())
    layer.unsupported = {Code::unsupported,
                         fmt::format("{}: stored as {}, but experts before it as {}", source.where(entry),
                                     gatefold::scheme(*scheme).name, gatefold::scheme(*layer.scheme).name)};
  return {};
}

/// Router and shared expert: what exists must have the right shape.
Status Checkpoint::State::scan_block(int layer) const {
  const MoeSpec& moe = config.model.moe;
  const auto check = [&](const std::string& name, std::initializer_list<std::int64_t> shape) -> Status {
    if (source.find(name) == nullptr) return {};
    return require_tensor(source, name, {shape.begin(), shape.size()}, float_dtypes).status();
  };
  Status status = check(names.router(layer) + ".weight", {moe.experts, moe.hidden});
  if (status.ok()) status = check(names.router(layer) + ".bias", {moe.experts});
  const TensorEntry* bias = source.find(names.correction_bias(layer));
  if (status.ok() && bias != nullptr)  // ERNIE has a row of them
    status = bias->shape.size() == 2 ? check(bias->name, {1, moe.experts}) : check(bias->name, {moe.experts});
  if (status.ok() && moe.shared.gated)
    status = check(names.shared_expert_gate(layer) + ".weight", {1, moe.hidden});
  return status;
}

/// Of a routed or a shared expert, to which nothing adds a bias of its own. Some writers give every layer one
/// of zeros.
Result<ExpertMatrix> Checkpoint::State::read_expert(const Linear& linear) const {
  if (const TensorEntry* bias = source.find(linear.module + ".bias")) {
    const TensorView view = source.view(*bias);
    if (std::any_of(view.data, view.data + view.bytes, [](std::byte byte) { return byte != std::byte{0}; }))
      return Status{Code::unsupported, source.where(*bias) + ": experts of this family have no biases"};
  }
  return reader->read(linear);
}

Result<SchemeId> Checkpoint::State::shared_scheme(int layer) const {
  std::optional<SchemeId> first;
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    const Linear linear = names.shared_expert(config.model.moe, layer, projection);
    const auto scheme = reader->scheme(linear);
    if (!scheme) return scheme.status();
    if (first && *first != *scheme)
      return Status{
          Code::unsupported,
          fmt::format("{}: {} is stored as {}, but others of the shared expert as {}", directory.string(),
                      linear.module, gatefold::scheme(*scheme).name, gatefold::scheme(*first).name)};
    first = *scheme;
  }
  return *first;
}

Status Checkpoint::State::check_moe_layer(int layer) const {
  if (layer < 0 || layer >= config.model.layers)
    return {Code::invalid_argument,
            fmt::format("{}: no layer {}; there are {}", directory.string(), layer, config.model.layers)};
  if (!config.model.is_moe[static_cast<std::size_t>(layer)])
    return {Code::invalid_argument,
            fmt::format("{}: layer {} is dense: it has no experts", directory.string(), layer)};
  return {};
}

Result<Linear> Checkpoint::State::locate(int layer, int expert, Projection projection) const {
  const MoeSpec& moe = config.model.moe;
  if (Status status = check_moe_layer(layer); !status.ok()) return status;
  if (expert < 0 || expert >= moe.experts)
    return Status{Code::invalid_argument,
                  fmt::format("{}: no expert {}; there are {}", directory.string(), expert, moe.experts)};
  const auto found = layers.find(layer);
  if (found != layers.end() && found->second.fused[static_cast<std::size_t>(projection)])
    return names.fused_expert(moe, layer, expert, projection);
  Linear linear = names.expert(moe, layer, expert, projection);
  for (const std::string_view suffix : reader->suffixes(false))
    if (source.find(linear.module + std::string(suffix)) != nullptr) return linear;
  return Status{Code::bad_file,
                fmt::format("{}: no tensor {}, nor {}", directory.string(), quote(linear.module + ".weight"),
                            quote(names.fused_expert(moe, layer, expert, projection).module))};
}

// --- The public interface ---

Checkpoint::Checkpoint(std::shared_ptr<const State> state) : state_(std::move(state)) {}

const fs::path& Checkpoint::directory() const {
  return state_->directory;
}
const ModelConfig& Checkpoint::config() const {
  return state_->config.model;
}
const std::string& Checkpoint::config_text() const {
  return state_->config_text;
}
std::string Checkpoint::quantization_text() const {
  return state_->config.quantization.dump();
}
std::span<const fs::path> Checkpoint::files() const {
  return state_->source.files();
}
std::span<const TensorEntry> Checkpoint::tensors() const {
  return state_->source.tensors();
}
const TensorEntry* Checkpoint::find(std::string_view name) const {
  return state_->source.find(name);
}
TensorView Checkpoint::view(const TensorEntry& entry) const {
  return state_->source.view(entry);
}
void Checkpoint::release(const TensorEntry& entry) const {
  state_->source.release(entry);
}
std::string_view Checkpoint::convention() const {
  return state_->convention->name;
}

Result<TensorView> Checkpoint::tensor(std::string_view name) const {
  const TensorEntry* entry = find(name);
  if (entry == nullptr)
    return Status{Code::bad_file, fmt::format("{}: no tensor {}", directory().string(), quote(name))};
  return view(*entry);
}

Result<SchemeId> Checkpoint::stored_scheme() const {
  if (state_->layers.empty())
    return Status{Code::bad_file,
                  fmt::format("{}: no tensors of routed experts, such as {}.weight", directory().string(),
                              state_->names.expert(config().moe, 0, 0, Projection::gate).module)};
  const int first = state_->layers.begin()->first;
  for (const auto& [layer, experts] : state_->layers) {
    if (!experts.unsupported.ok()) return experts.unsupported;
    const SchemeId expected = *state_->layers.begin()->second.scheme;
    if (*experts.scheme != expected)
      return Status{Code::unsupported,
                    fmt::format("{}: experts of layer {} are stored as {}, those of layer {} as {}",
                                directory().string(), layer, scheme(*experts.scheme).name, first,
                                scheme(expected).name)};
  }
  return *state_->layers.begin()->second.scheme;
}

Result<SchemeId> Checkpoint::stored_scheme(int layer) const {
  if (Status status = state_->check_moe_layer(layer); !status.ok()) return status;
  const auto found = state_->layers.find(layer);
  if (found == state_->layers.end())
    return Status{
        Code::bad_file,
        fmt::format("{}: no tensors of routed experts of layer {}, such as {}.weight", directory().string(),
                    layer, state_->names.expert(config().moe, layer, 0, Projection::gate).module)};
  if (!found->second.unsupported.ok()) return found->second.unsupported;
  return *found->second.scheme;
}

Result<ExpertMatrix> Checkpoint::expert(int layer, int expert, Projection projection) const {
  const auto linear = state_->locate(layer, expert, projection);
  if (!linear) return linear.status();
  return state_->read_expert(*linear);
}

Result<std::vector<std::int32_t>> Checkpoint::input_order(int layer, int expert,
                                                          Projection projection) const {
  const auto linear = state_->locate(layer, expert, projection);
  if (!linear) return linear.status();
  return state_->reader->input_order(*linear);
}

Result<std::vector<float>> Checkpoint::expert_biases(int layer, Projection projection) const {
  if (Status status = state_->check_moe_layer(layer); !status.ok()) return status;
  const auto found = tensor(state_->names.fused_bias(layer, projection));
  if (!found) return found.status();
  std::vector<float> all(found->bytes * 8 / static_cast<std::size_t>(bits(found->dtype)));
  row_kernels().widen(found->dtype, found->data, 0, static_cast<std::int64_t>(all.size()), all.data());
  const Linear linear = state_->names.fused_expert(config().moe, layer, 0, projection);
  std::vector<float> biases;
  for (std::int64_t expert = 0; expert < config().moe.experts; ++expert)
    for (std::int64_t n = 0; n < linear.n; ++n)
      biases.push_back(all[static_cast<std::size_t>(expert * linear.fused->rows + linear.fused->first_row +
                                                    n * linear.fused->row_step)]);
  return biases;
}

std::string Checkpoint::quantized_module(const TensorEntry& entry) const {
  for (const bool fused : {false, true})
    for (const std::string_view suffix : state_->reader->suffixes(fused)) {
      if (suffix.empty() || suffix == ".bias" || !entry.name.ends_with(suffix)) continue;
      std::string module = entry.name.substr(0, entry.name.size() - suffix.size());
      if (state_->reader->quantized(module)) return module;
    }
  return {};
}

std::string Checkpoint::convention(const TensorEntry& entry) const {
  const std::string module = quantized_module(entry);
  return module.empty() ? "unquantized" : state_->reader->quantized(module)->stored_as;
}

std::string Checkpoint::expert_module(int layer, int expert, Projection projection) const {
  return state_->names.expert(config().moe, layer, expert, projection).module;
}

std::string Checkpoint::shared_expert_module(int layer, Projection projection) const {
  return state_->names.shared_expert(config().moe, layer, projection).module;
}

std::string Checkpoint::experts_pattern(const std::string& layers) const {
  return state_->names.experts_pattern(layers);
}

Result<bool> Checkpoint::fp8_kv_cache() const {
  return state_->reader->fp8_kv_cache();
}

std::vector<StoredLayer> Checkpoint::other_unquantized_layers() const {
  constexpr std::string_view suffix = ".weight";
  std::vector<StoredLayer> list;
  for (const TensorEntry& entry : tensors()) {
    const bool is_float =
        std::find(std::begin(float_dtypes), std::end(float_dtypes), entry.dtype) != std::end(float_dtypes);
    if (entry.shape.size() != 2 || !is_float || !entry.name.ends_with(suffix)) continue;
    std::string module = entry.name.substr(0, entry.name.size() - suffix.size());
    const bool embedding = module.find("embed", module.rfind('.') + 1) != std::string::npos;
    if (embedding || state_->names.is_router_or_gate(module) || is_expert_tensor(entry.name)) continue;
    if (quantized_module(entry).empty()) list.push_back({std::move(module), entry.shape[0], entry.shape[1]});
  }
  return list;
}

std::vector<StoredLayer> Checkpoint::other_quantized_layers() const {
  std::map<std::string, StoredLayer> layers;
  for (const TensorEntry& entry : tensors()) {
    if (is_expert_tensor(entry.name)) continue;
    const std::string module = quantized_module(entry);
    if (module.empty() || layers.contains(module)) continue;
    const auto quantized = *state_->reader->quantized(module);
    layers[module] = {module, quantized.n, quantized.k};
  }
  std::vector<StoredLayer> list;
  list.reserve(layers.size());
  for (auto& [module, layer] : layers) list.push_back(std::move(layer));
  return list;
}

Result<QuantizedMatrix> Checkpoint::quantized_layer(const StoredLayer& layer) const {
  const Linear linear{.module = layer.module, .n = layer.n, .k = layer.k, .fused = {}};
  if (const auto scheme = state_->reader->scheme(linear); !scheme) return scheme.status();
  auto matrix = state_->reader->read(linear);
  if (!matrix) return matrix.status();
  if (auto* quantized = std::get_if<QuantizedMatrix>(&*matrix)) return std::move(*quantized);
  return Status{Code::invalid_argument,
                fmt::format("{}: {} is not quantized", directory().string(), layer.module)};
}

bool Checkpoint::is_expert_tensor(std::string_view name) const {
  const auto tensor = state_->names.parse(name);
  return tensor && state_->is_known(*tensor) && find(name) != nullptr;
}

Result<TensorView> Checkpoint::router(int layer) const {
  if (Status status = state_->check_moe_layer(layer); !status.ok()) return status;
  return tensor(state_->names.router(layer) + ".weight");
}

const TensorEntry* Checkpoint::router_correction_bias(int layer) const {
  return find(state_->names.correction_bias(layer));
}

const TensorEntry* Checkpoint::router_bias(int layer) const {
  const std::string name = state_->names.router(layer) + ".bias";
  return name == state_->names.correction_bias(layer) ? nullptr : find(name);
}

bool Checkpoint::chooses_by_token(int layer) const {
  return find(state_->names.router(layer) + ".tid2eid") != nullptr;
}

Result<ExpertMatrix> Checkpoint::shared_expert(int layer, Projection projection) const {
  if (Status status = state_->check_moe_layer(layer); !status.ok()) return status;
  if (config().moe.shared.intermediate == 0)
    return Status{Code::invalid_argument, directory().string() + ": the model has no shared expert"};
  return state_->read_expert(state_->names.shared_expert(config().moe, layer, projection));
}

Result<SchemeId> Checkpoint::shared_scheme(int layer) const {
  if (Status status = state_->check_moe_layer(layer); !status.ok()) return status;
  if (config().moe.shared.intermediate == 0)
    return Status{Code::invalid_argument, directory().string() + ": the model has no shared expert"};
  return state_->shared_scheme(layer);
}

Result<TensorView> Checkpoint::shared_expert_gate(int layer) const {
  if (Status status = state_->check_moe_layer(layer); !status.ok()) return status;
  if (!config().moe.shared.gated)
    return Status{Code::invalid_argument,
                  directory().string() + ": the model has no gate of a shared expert"};
  return tensor(state_->names.shared_expert_gate(layer) + ".weight");
}

std::vector<ExpertGroup> Checkpoint::expert_groups() const {
  std::vector<ExpertGroup> groups;
  for (const auto& [layer, experts] : state_->layers) {
    std::vector<std::string_view> stored(experts.schemes.begin(), experts.schemes.end());
    if (!experts.other.empty()) stored.push_back(experts.other);
    const bool one = stored.size() == 1 && experts.other.empty();
    groups.push_back(
        {layer, fmt::format("{}{}", one ? "" : "other: ", fmt::join(stored, " and ")), experts.bytes});
  }
  return groups;
}

}  // namespace gatefold
