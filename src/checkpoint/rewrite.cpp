#include <fmt/format.h>
#include <omp.h>

#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/companions.h"
#include "checkpoint/config.h"
#include "checkpoint/linear_writer.h"
#include "checkpoint/safetensors_writer.h"
#include "checkpoint/staging.h"
#include "gatefold/checkpoint.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

/// A quantized layer to be written.
struct Layer {
  std::string module;
  std::function<Result<QuantizedMatrix>()> read;
  WrittenLayer written;
  std::size_t first_output = 0;
  std::vector<PlannedTensor> outputs;
};

class Rewriter {
 public:
  Rewriter(const Checkpoint& source, const LinearWriter& writer, const RewriteOptions& options,
           const std::function<void(const ConvertProgress&)>& progress)
      : source_(source), writer_(writer), options_(options), report_progress_(progress) {}

  /// Reads all layers and asks the writer for them; afterwards all is known but data.
  Status plan();
  Status write(const SafetensorsWriter& writer);
  Result<nlohmann::ordered_json> quantization() const;
  std::vector<PlannedTensor> outputs() const;
  std::uint64_t source_bytes() const { return progress_.total_bytes / 2; }

 private:
  Status find_layers();
  Status check_kv_cache();
  std::string output_name(const TensorEntry& entry) const;
  void find_others();
  Status for_each_layer(const std::function<Status(Layer&, std::vector<WrittenTensor>)>& use);
  Status use_layer(Layer& layer, const std::function<Status(Layer&, std::vector<WrittenTensor>)>& use);

  const Checkpoint& source_;
  const LinearWriter& writer_;
  const RewriteOptions& options_;
  const std::function<void(const ConvertProgress&)>& report_progress_;
  std::vector<Layer> layers_;
  std::vector<const TensorEntry*> others_;  ///< copied
  bool moves_kv_scales_ = false;            ///< to where another convention has them
  std::mutex mutex_;
  ConvertProgress progress_;  ///< all bytes count twice, as they are read twice
};

Status Rewriter::find_layers() {
  const ModelConfig& model = source_.config();
  if (model.moe.bias)
    return {Code::unsupported, fmt::format("{}: {} has no place for the biases of experts",
                                           source_.directory().string(), writer_.name)};
  for (const ExpertGroup& group : source_.expert_groups())
    for (int expert = 0; expert < model.moe.experts; ++expert)
      for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
        Layer layer;
        layer.module = source_.expert_module(group.layer, expert, projection);
        layer.read = [this, at = group.layer, expert, projection]() -> Result<QuantizedMatrix> {
          auto matrix = source_.expert(at, expert, projection);
          if (!matrix) return matrix.status();
          if (auto* quantized = std::get_if<QuantizedMatrix>(&*matrix);
              quantized != nullptr && scheme(quantized->scheme).weight.quantized())
            return std::move(*quantized);
          return Status(Code::invalid_argument, "is not quantized: `gatefold quantize` does that");
        };
        layers_.push_back(std::move(layer));
      }
  for (const StoredLayer& stored : source_.other_quantized_layers()) {
    Layer layer;
    layer.module = stored.module;
    layer.read = [this, stored] { return source_.quantized_layer(stored); };
    layers_.push_back(std::move(layer));
  }
  if (layers_.empty())
    return {Code::invalid_argument, source_.directory().string() + ": there is no quantized layer"};
  return check_kv_cache();
}

/// Says that it is written in the new way, if there is one.
Status Rewriter::check_kv_cache() {
  if (source_.convention() == writer_.name) return {};
  const auto cache = source_.fp8_kv_cache();
  if (cache && !*cache) return {};
  if (!cache || writer_.kv_cache == nullptr)
    return {Code::unsupported,
            fmt::format("{}: {} has no place for the kv_cache_scheme{}", source_.directory().string(),
                        writer_.name, cache ? "" : ": " + cache.status().message())};
  moves_kv_scales_ = true;
  for (const TensorEntry& entry : source_.tensors()) {
    const std::string name = output_name(entry);
    if ((name.ends_with(".k_scale") || name.ends_with(".v_scale")) &&
        !name.substr(0, name.rfind('.')).ends_with(".self_attn"))
      return {Code::unsupported, fmt::format("{}: {} has no name for the factor {} of an fp8 KV cache",
                                             source_.directory().string(), writer_.name, entry.name)};
  }
  return {};
}

/// ModelOpt has the factors of an fp8 KV cache at the projections, others one level above.
std::string Rewriter::output_name(const TensorEntry& entry) const {
  for (const std::string_view letter : {"k", "v"}) {
    const std::string scale = fmt::format(".{}_scale", letter), at = fmt::format(".{}_proj{}", letter, scale);
    if (moves_kv_scales_ && entry.name.ends_with(".self_attn" + at))
      return entry.name.substr(0, entry.name.size() - at.size()) + scale;
  }
  return entry.name;
}

void Rewriter::find_others() {
  for (const TensorEntry& entry : source_.tensors()) {
    progress_.total_bytes += 2 * entry.bytes();
    if (!source_.is_expert_tensor(entry.name) && source_.quantized_module(entry).empty())
      others_.push_back(&entry);
  }
}

Status Rewriter::for_each_layer(const std::function<Status(Layer&, std::vector<WrittenTensor>)>& use) {
  const int threads = options_.threads > 0 ? options_.threads : omp_get_max_threads();
  std::size_t failed = layers_.size();
  Status failure;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    {
      const std::lock_guard lock(mutex_);
      if (failed < i) continue;
    }
    const bool cancelled = options_.cancelled && options_.cancelled();
    const Status status =
        cancelled ? Status(Code::io_error, "conversion interrupted") : use_layer(layers_[i], use);
    const std::lock_guard lock(mutex_);
    if (!status.ok() && i < failed) failed = i, failure = status;
    progress_.done_bytes += progress_.total_bytes / 2 / (layers_.size() + 1);
    if (report_progress_) report_progress_(progress_);
  }
  return failure;
}

Status Rewriter::use_layer(Layer& layer,
                           const std::function<Status(Layer&, std::vector<WrittenTensor>)>& use) try {
  const auto place = [&](const Status& status) {
    return Status(status.code(),
                  fmt::format("{}: {}: {}", source_.directory().string(), layer.module, status.message()));
  };
  auto matrix = layer.read();
  if (!matrix) return place(matrix.status());
  layer.written = {layer.module, matrix->scheme, !matrix->input_order.empty(),
                   matrix->input_scale.has_value()};
  auto tensors = writer_.store(std::move(*matrix));
  if (!tensors) return place(tensors.status());
  return use(layer, std::move(*tensors));
} catch (const std::bad_alloc&) {
  return {Code::io_error, layer.module + ": out of memory"};
}

Status Rewriter::plan() {
  if (Status status = find_layers(); !status.ok()) return status;
  find_others();
  Status status = for_each_layer([](Layer& layer, std::vector<WrittenTensor> tensors) {
    for (WrittenTensor& tensor : tensors)
      layer.outputs.push_back(
          {layer.module + std::string(tensor.suffix), tensor.dtype, std::move(tensor.shape)});
    return Status();
  });
  std::size_t next = others_.size();
  for (Layer& layer : layers_) {
    layer.first_output = next;
    next += layer.outputs.size();
  }
  return status;
}

std::vector<PlannedTensor> Rewriter::outputs() const {
  std::vector<PlannedTensor> outputs;
  for (const TensorEntry* entry : others_)
    outputs.push_back({output_name(*entry), entry->dtype, entry->shape});
  for (const Layer& layer : layers_)
    outputs.insert(outputs.end(), layer.outputs.begin(), layer.outputs.end());
  return outputs;
}

Status Rewriter::write(const SafetensorsWriter& writer) {
  for (std::size_t i = 0; i < others_.size(); ++i) {
    if (options_.cancelled && options_.cancelled()) return {Code::io_error, "conversion interrupted"};
    const TensorView view = source_.view(*others_[i]);
    if (Status status = writer.write(i, {view.data, view.bytes}); !status.ok()) return status;
    source_.release(*others_[i]);
  }
  return for_each_layer([&](Layer& layer, std::vector<WrittenTensor> tensors) {
    Status status;
    for (std::size_t i = 0; i < tensors.size() && status.ok(); ++i)
      status = writer.write(layer.first_output + i, tensors[i].data);
    return status;
  });
}

/// The quantization_config of what is written.
Result<nlohmann::ordered_json> Rewriter::quantization() const {
  std::vector<WrittenLayer> layers;
  for (const Layer& layer : layers_) layers.push_back(layer.written);
  std::set<std::string> ignore{"lm_head"};
  for (const TensorEntry* entry : others_)
    if (entry->shape.size() == 2 && entry->name.ends_with(".weight"))
      ignore.insert(entry->name.substr(0, entry->name.size() - std::string_view(".weight").size()));
  for (const Layer& layer : layers_) ignore.erase(layer.module);
  auto config = writer_.config(layers, {ignore.begin(), ignore.end()});
  if (config && moves_kv_scales_) (*config)["kv_cache_scheme"] = writer_.kv_cache();
  return config;
}

/// The source's config with another quantization_config.
std::string new_config(const Checkpoint& source, nlohmann::ordered_json quantization) {
  auto config = nlohmann::ordered_json::parse(source.config_text());
  const auto old = nlohmann::ordered_json::parse(source.quantization_text());
  if (old.is_object() && old.value("quant_method", "") == quantization["quant_method"]) {
    // The version says by whose rules activations are quantized.
    if (old.contains("version") && !quantization.contains("version"))
      quantization["version"] = old["version"];
    for (const char* key : {"kv_cache_scheme", "kv_cache_quant_algo"})
      if (old.contains(key)) quantization[key] = old[key];
  }
  replace_quantization(config, std::move(quantization));
  return config.dump(2) + "\n";
}

}  // namespace

Result<ConvertReport> rewrite(const Checkpoint& source, const fs::path& destination,
                              const RewriteOptions& options,
                              const std::function<void(const ConvertProgress&)>& progress) {
  const auto start = std::chrono::steady_clock::now();
  const LinearWriter* convention = find_writer(options.to);
  if (convention == nullptr)
    return Status(Code::invalid_argument,
                  fmt::format("no convention '{}' to write; known: {}", options.to, writer_names()));
  if (options.shard_bytes == 0 || options.threads < 0)
    return Status(Code::invalid_argument,
                  fmt::format("shards of {} bytes, {} threads", options.shard_bytes, options.threads));
  Rewriter rewriter(source, *convention, options, progress);
  if (Status status = rewriter.plan(); !status.ok()) return status;
  auto quantization = rewriter.quantization();
  if (!quantization) return quantization.status();

  Result<StagingDirectory> staging = StagingDirectory::create(destination);
  if (!staging.ok()) return staging.status();
  Result<SafetensorsWriter> writer =
      SafetensorsWriter::create(staging->path(), rewriter.outputs(), options.shard_bytes);
  if (!writer.ok()) return writer.status();
  if (Status status = rewriter.write(*writer); !status.ok()) return status;
  if (Status status = writer->finish(); !status.ok()) return status;
  if (Status status = copy_companions(source.directory(), staging->path()); !status.ok()) return status;
  if (!convention->side_file.empty())
    if (Status status = write_file(staging->path() / convention->side_file, quantization->dump(2) + "\n");
        !status.ok())
      return status;
  // Last: what has no config.json is not a model.
  if (Status status = write_file(staging->path() / "config.json", new_config(source, *quantization));
      !status.ok())
    return status;
  if (Status status = staging->publish(); !status.ok()) return status;
  return ConvertReport{
      .source_bytes = rewriter.source_bytes(),
      .written_bytes = writer->file_bytes(),
      .shards = writer->shards(),
      .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
}

}  // namespace gatefold
