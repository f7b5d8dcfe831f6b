#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/companions.h"
#include "checkpoint/compressed_tensors.h"
#include "checkpoint/config.h"
#include "checkpoint/families.h"
#include "checkpoint/fused_amax.h"
#include "checkpoint/plain_view.h"
#include "checkpoint/quantizable.h"
#include "checkpoint/safetensors_writer.h"
#include "checkpoint/staging.h"
#include "gatefold/checkpoint.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view weight_suffix = ".weight";
constexpr std::uint64_t copy_bytes = 16 << 20;        ///< of an unquantized tensor at a time
constexpr std::uint64_t memory_limit = 512ull << 20;  ///< of all jobs at work, unless one alone needs more

std::string module_of(const TensorEntry& entry) {
  return entry.name.substr(0, entry.name.size() - weight_suffix.size());
}

/// A piece of work: copy a part of a tensor, or quantize a matrix. Its output is tensors first_output, ... of
/// the plan.
struct Job {
  const TensorEntry* source = nullptr;
  std::uint64_t begin = 0, end = 0;  ///< bytes of the source's file
  std::size_t first_output = 0;
  std::optional<SchemeId> scheme;      ///< none: copy
  std::optional<ExpertTensor> expert;  ///< whose matrix it is; none: the source's only one
  std::uint64_t bytes() const { return end - begin; }
};

struct Plan {
  std::vector<Job> jobs;  ///< in the order of the source's files
  std::vector<PlannedTensor> outputs;
};

/// Lets jobs begin as long as what they hold together stays below a limit.
class MemoryGate {
 public:
  class Pass {
   public:
    Pass(MemoryGate& gate, std::uint64_t bytes) : gate_(gate), bytes_(bytes) {
      std::unique_lock lock(gate_.mutex_);
      gate_.changed_.wait(lock, [&] { return gate_.held_ == 0 || gate_.held_ + bytes_ <= memory_limit; });
      gate_.held_ += bytes_;
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    ~Pass() {
      const std::lock_guard lock(gate_.mutex_);
      gate_.held_ -= bytes_;
      gate_.changed_.notify_all();
    }

   private:
    MemoryGate& gate_;
    std::uint64_t bytes_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t held_ = 0;
};

class Converter {
 public:
  Converter(const Checkpoint& source, const ConvertOptions& options, ModelSchemes schemes,
            const std::function<void(const ConvertProgress&)>& progress)
      : source_(source),
        options_(options),
        schemes_(std::move(schemes)),
        report_progress_(progress),
        names_(*find_family(source.config().model_type), prefix(source)) {}

  Status make_plan();
  Status run(const SafetensorsWriter& writer);
  std::string config() const;

  const std::vector<PlannedTensor>& outputs() const { return plan_.outputs; }
  std::uint64_t source_bytes() const { return progress_.total_bytes; }

 private:
  static std::string prefix(const Checkpoint& source);
  Status check_complete() const;
  void plan_copy(const TensorEntry& entry);
  Status plan_experts(const TensorEntry& entry, ExpertTensor tensor);
  Status plan_matrix(const std::string& module, std::int64_t n, std::int64_t k, Job job);
  Status plan_kv_scales();
  bool has_static_input(SchemeId id) const {
    return options_.static_input && scheme(id).activation.may_be_static();
  }
  std::optional<SchemeId> scheme_of(const TensorEntry& entry,
                                    const std::optional<ExpertTensor>& expert) const;
  std::span<const std::byte> bytes_of(const TensorEntry& entry) const;
  Result<QuantizedMatrix> quantized(const Job& job) const;
  Status quantize_matrix(const Job& job, const SafetensorsWriter& writer) const;
  Status write_kv_scales(const SafetensorsWriter& writer) const;
  compressed_tensors::Targets targets() const;
  Status run_job(const Job& job, const SafetensorsWriter& writer);
  std::string where(const Job& job) const;
  Linear linear(const ExpertTensor& tensor) const {
    return names_.expert(source_.config().moe, tensor.layer, *tensor.expert, tensor.projection);
  }

  const Checkpoint& source_;
  const ConvertOptions& options_;
  const ModelSchemes schemes_;
  const std::function<void(const ConvertProgress&)>& report_progress_;
  ModuleNames names_;
  std::vector<std::uint64_t> file_ends_;
  Plan plan_;
  std::size_t first_kv_scale_ = 0;  // of the outputs
  MemoryGate memory_;
  std::mutex mutex_;
  ConvertProgress progress_;
  std::size_t failed_job_ = 0;
  Status failure_;
};

/// What comes before "layers." in the names of this model.
std::string Converter::prefix(const Checkpoint& source) {
  for (const TensorEntry& entry : source.tensors())
    if (source.is_expert_tensor(entry.name)) return entry.name.substr(0, entry.name.find("layers."));
  return "model.";
}

Status Converter::make_plan() {
  std::vector<const TensorEntry*> entries;
  for (const TensorEntry& entry : source_.tensors()) entries.push_back(&entry);
  std::sort(entries.begin(), entries.end(), [](const TensorEntry* a, const TensorEntry* b) {
    return std::pair(a->file, a->begin) < std::pair(b->file, b->begin);
  });
  if (Status status = check_complete(); !status.ok()) return status;
  file_ends_.resize(source_.files().size());
  for (const TensorEntry* entry : entries) {
    file_ends_[static_cast<std::size_t>(entry->file)] = entry->end;
    progress_.total_bytes += entry->bytes();
    std::optional<ExpertTensor> expert;
    if (source_.is_expert_tensor(entry->name)) {
      expert = names_.parse(entry->name);
      if (!expert) return {Code::internal, fmt::format("'{}' is no expert's tensor", entry->name)};
      if (expert->suffix.ends_with("bias")) expert.reset();  // stays as it is
    }
    const std::optional<SchemeId> id = scheme_of(*entry, expert);
    Status status;
    if (!id)
      plan_copy(*entry);
    else if (expert)
      status = plan_experts(*entry, *expert);
    else
      status = plan_matrix(module_of(*entry), entry->shape[0], entry->shape[1],
                           {entry, entry->begin, entry->end, 0, id, std::nullopt});
    if (!status.ok()) return status;
  }
  return plan_kv_scales();
}

/// Nothing: it stays as it is.
std::optional<SchemeId> Converter::scheme_of(const TensorEntry& entry,
                                             const std::optional<ExpertTensor>& expert) const {
  if (expert) return schemes_.experts[static_cast<std::size_t>(expert->layer)];
  return entry.name.ends_with(weight_suffix) ? schemes_.other(module_of(entry)) : std::nullopt;
}

void Converter::plan_copy(const TensorEntry& entry) {
  std::uint64_t begin = entry.begin;
  do {
    const std::uint64_t end = std::min(begin + copy_bytes, entry.end);
    plan_.jobs.push_back({&entry, begin, end, plan_.outputs.size(), std::nullopt, std::nullopt});
    begin = end;
  } while (begin < entry.end);
  plan_.outputs.push_back({entry.name, entry.dtype, entry.shape});
}

/// The matrices of a tensor lie one behind the other.
Status Converter::plan_experts(const TensorEntry& entry, ExpertTensor tensor) {
  std::uint64_t begin = entry.begin;
  const auto add = [&] {
    const Linear matrix = linear(tensor);
    const std::uint64_t bytes = static_cast<std::uint64_t>(matrix.n) * static_cast<std::uint64_t>(matrix.k) *
                                static_cast<std::uint64_t>(bits(entry.dtype)) / 8;
    begin += bytes;
    return plan_matrix(matrix.module, matrix.n, matrix.k,
                       {&entry, begin - bytes, begin, 0, scheme_of(entry, tensor), tensor});
  };
  const bool fused = !tensor.expert;
  const int first = fused ? 0 : *tensor.expert, count = fused ? source_.config().moe.experts : 1;
  for (int expert = first; expert < first + count; ++expert) {
    tensor.expert = expert;
    if (Status status = add(); !status.ok()) return status;
    if (!tensor.gate_up) continue;
    tensor.projection = Projection::up;
    if (Status status = add(); !status.ok()) return status;
    tensor.projection = Projection::gate;
  }
  return {};
}

/// All experts are there.
Status Converter::check_complete() const {
  const ModelConfig& model = source_.config();
  for (int layer = 0; layer < model.layers; ++layer)
    for (int expert = 0; model.is_moe[static_cast<std::size_t>(layer)] && expert < model.moe.experts;
         ++expert)
      for (const Projection projection : {Projection::gate, Projection::up, Projection::down})
        if (const auto matrix = source_.expert(layer, expert, projection); !matrix.ok())
          return matrix.status();
  return {};
}

Status Converter::plan_matrix(const std::string& module, std::int64_t n, std::int64_t k, Job job) {
  job.first_output = plan_.outputs.size();
  plan_.jobs.push_back(job);
  if (Status status = check_shape(*job.scheme, n, k); !status.ok())
    return {status.code(), fmt::format("{}: {}", where(job), status.message())};
  QuantizedMatrix described;
  described.scheme = *job.scheme;
  described.n = n;
  described.k = k;
  described.scale_format = scheme(*job.scheme).weight.scale;
  if (job.expert && has_static_input(*job.scheme)) described.input_scale.emplace();
  for (compressed_tensors::StoredTensor& stored : compressed_tensors::layout(described))
    plan_.outputs.push_back({module + std::string(stored.suffix), stored.dtype, std::move(stored.shape)});
  return {};
}

/// Two tensors a layer, behind all others.
Status Converter::plan_kv_scales() {
  first_kv_scale_ = plan_.outputs.size();
  if (!schemes_.fp8_kv_cache) return {};
  const std::string before = prefix(source_) + "layers.";
  for (int layer = 0; layer < source_.config().layers; ++layer) {
    const std::string attention = fmt::format("{}{}.self_attn.", before, layer);
    if (source_.find(attention + "k_proj.weight") == nullptr)
      return {Code::unsupported,
              fmt::format("{}: no tensor {}k_proj.weight: an fp8 KV cache is for attention "
                          "with keys and values of its own",
                          source_.directory().string(), attention)};
    for (const char* name : {"k_scale", "v_scale"})
      plan_.outputs.push_back({attention + name, DType::f32, {1}});
  }
  return {};
}

Status Converter::write_kv_scales(const SafetensorsWriter& writer) const {
  for (std::size_t i = first_kv_scale_; i < plan_.outputs.size(); ++i) {
    const std::size_t at = i - first_kv_scale_;
    const KvScales scales = options_.kv_scales.empty() ? KvScales{} : options_.kv_scales[at / 2];
    const float scale = at % 2 == 0 ? scales.key : scales.value;
    if (Status status = writer.write(i, std::as_bytes(std::span(&scale, 1))); !status.ok()) return status;
  }
  return {};
}

std::string Converter::where(const Job& job) const {
  return fmt::format("{}: {}", source_.files()[static_cast<std::size_t>(job.source->file)].string(),
                     job.expert ? linear(*job.expert).module : job.source->name);
}

Status Converter::run(const SafetensorsWriter& writer) {
  const int threads = options_.threads > 0 ? options_.threads : omp_get_max_threads();
  bool stopped = false;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::size_t i = 0; i < plan_.jobs.size(); ++i) {
    bool skip = false;
#pragma omp atomic read
    skip = stopped;
    if (skip) continue;
    const bool cancelled = options_.cancelled && options_.cancelled();
    const Status status = cancelled ? Status(Code::io_error, "cancelled") : run_job(plan_.jobs[i], writer);
    if (status.ok()) continue;
#pragma omp atomic write
    stopped = true;
    const std::lock_guard lock(mutex_);
    if (failure_.ok() || i < failed_job_) failure_ = status, failed_job_ = i;
  }
  return failure_.ok() ? write_kv_scales(writer) : failure_;
}

/// Those of an entry that is no expert's.
std::span<const std::byte> Converter::bytes_of(const TensorEntry& entry) const {
  const TensorView view = source_.view(entry);
  const std::span<const std::byte> bytes{view.data, view.bytes};
  return options_.replacement ? options_.replacement(entry).value_or(bytes) : bytes;
}

Status Converter::run_job(const Job& job, const SafetensorsWriter& writer) try {
  if (options_.cancelled && options_.cancelled()) return {Code::io_error, "conversion interrupted"};
  const MemoryGate::Pass pass(memory_, job.bytes() * 2);  // the source and what is made of it
  Status status;
  if (job.scheme) {
    status = quantize_matrix(job, writer);
  } else {
    const std::uint64_t offset = job.begin - job.source->begin;
    const std::span<const std::byte> bytes = bytes_of(*job.source);
    if (bytes.size() != job.source->bytes())
      return {Code::invalid_argument,
              fmt::format("{}: {} bytes cannot replace {}", where(job), bytes.size(), job.source->bytes())};
    status = writer.write(job.first_output, bytes.subspan(offset, job.bytes()), offset);
  }
  // The system maps pages around those that are touched, too: give back all that this job can have mapped.
  constexpr std::uint64_t window = 64 << 10;
  TensorEntry touched = *job.source;
  touched.begin = job.begin / window * window;
  touched.end =
      std::min((job.end + window - 1) / window * window, file_ends_[static_cast<std::size_t>(touched.file)]);
  source_.release(touched);
  if (!status.ok()) return status;

  const std::lock_guard lock(mutex_);
  progress_.done_bytes += job.bytes();
  if (report_progress_) report_progress_(progress_);
  return {};
} catch (const std::bad_alloc&) {
  return {Code::io_error, where(job) + ": out of memory"};
}

Result<QuantizedMatrix> Converter::quantized(const Job& job) const {
  if (!job.expert) {
    const TensorEntry& entry = *job.source;
    const std::span<const std::byte> bytes = bytes_of(entry);
    if (bytes.size() != entry.bytes())
      return Status(Code::invalid_argument,
                    fmt::format("{} bytes cannot replace {}", bytes.size(), entry.bytes()));
    return quantize(*job.scheme, {bytes.data(), entry.dtype, entry.shape[0], entry.shape[1]},
                    options_.quantize);
  }
  const ExpertTensor& tensor = *job.expert;
  if (options_.matrix) return options_.matrix(tensor.layer, *tensor.expert, tensor.projection);
  const Result<ExpertMatrix> matrix = source_.expert(tensor.layer, *tensor.expert, tensor.projection);
  if (!matrix.ok()) return matrix.status();
  const auto amax = fused_amax(source_, *job.scheme, tensor.layer, *tensor.expert, tensor.projection);
  if (!amax.ok()) return amax.status();
  QuantizeOptions options = options_.quantize;
  options.tensor_amax = *amax;
  return quantize(*job.scheme, *plain_view(*matrix), options);
}

Status Converter::quantize_matrix(const Job& job, const SafetensorsWriter& writer) const {
  const auto failed = [&](const Status& status) {
    return Status(status.code(), fmt::format("{}: {}", where(job), status.message()));
  };
  Result<QuantizedMatrix> quantized = this->quantized(job);
  if (!quantized.ok()) return failed(quantized.status());
  Result<std::vector<std::vector<std::byte>>> stored = compressed_tensors::store(std::move(*quantized));
  if (!stored.ok()) return failed(stored.status());
  for (std::size_t i = 0; i < stored->size(); ++i)
    if (Status status = writer.write(job.first_output + i, (*stored)[i]); !status.ok()) return status;
  return {};
}

/// What each kind of layer is called in the config.
compressed_tensors::Targets Converter::targets() const {
  std::map<SchemeId, std::string> experts;  // "0|1|5"
  for (std::size_t layer = 0; layer < schemes_.experts.size(); ++layer) {
    const auto& id = schemes_.experts[layer];
    if (!id || !scheme(*id).weight.quantized()) continue;
    std::string& layers = experts[*id];
    layers += fmt::format("{}{}", layers.empty() ? "" : "|", layer);
  }
  compressed_tensors::Targets targets;
  for (const auto& [id, layers] : experts)
    targets[{id, has_static_input(id)}].push_back(fmt::format("re:{}", names_.experts_pattern(layers)));
  for (const auto& [module, id] : schemes_.others) targets[{id, false}].push_back(module);
  return targets;
}

/// The source's config and, if something is quantized, a quantization_config.
std::string Converter::config() const {
  auto config = nlohmann::ordered_json::parse(source_.config_text());
  const compressed_tensors::Targets targets = this->targets();
  if (!targets.empty() || schemes_.fp8_kv_cache) {
    // Every matrix that could be a Linear. The head is one even where it has no tensor of its own.
    std::set<std::string> ignore{"lm_head"};
    for (const TensorEntry& entry : source_.tensors())
      if (entry.shape.size() == 2 && entry.name.ends_with(weight_suffix) &&
          !source_.is_expert_tensor(entry.name))
        ignore.insert(module_of(entry));
    for (const auto& [module, id] : schemes_.others) ignore.erase(module);
    for (std::size_t layer = 0; layer < schemes_.experts.size(); ++layer) {
      const auto& id = schemes_.experts[layer];
      const bool plain = !id || !scheme(*id).weight.quantized();
      if (source_.config().is_moe[layer] && plain)
        ignore.insert(fmt::format("re:{}", names_.experts_pattern(std::to_string(layer))));
    }
    replace_quantization(
        config, compressed_tensors::config(targets, {ignore.begin(), ignore.end()}, schemes_.fp8_kv_cache));
  }
  return config.dump(2) + "\n";
}

Status check_source(const Checkpoint& source) {
  if (find_family(source.config().model_type) == nullptr)
    return {Code::unsupported,
            fmt::format("{}: no family '{}'", source.directory().string(), source.config().model_type)};
  return check_unquantized(source);
}

}  // namespace

Result<ConvertReport> convert(const Checkpoint& source, const fs::path& destination,
                              const ConvertOptions& options,
                              const std::function<void(const ConvertProgress&)>& progress) {
  const auto start = std::chrono::steady_clock::now();
  if (options.shard_bytes == 0 || options.threads < 0)
    return Status(Code::invalid_argument,
                  fmt::format("shards of {} bytes, {} threads", options.shard_bytes, options.threads));
  if (!options.kv_scales.empty() && options.kv_scales.size() != source.config().is_moe.size())
    return Status(Code::invalid_argument, fmt::format("KV scales of {} layers, but there are {}",
                                                      options.kv_scales.size(), source.config().layers));
  if (Status status = check_source(source); !status.ok()) return status;
  Result<ModelSchemes> schemes =
      options.recipe ? resolve(*options.recipe, source) : uniform_schemes(source, options.scheme);
  if (!schemes) return schemes.status();
  Converter converter(source, options, std::move(*schemes), progress);
  if (Status status = converter.make_plan(); !status.ok()) return status;

  Result<StagingDirectory> staging = StagingDirectory::create(destination);
  if (!staging.ok()) return staging.status();
  Result<SafetensorsWriter> writer =
      SafetensorsWriter::create(staging->path(), converter.outputs(), options.shard_bytes);
  if (!writer.ok()) return writer.status();
  if (Status status = converter.run(*writer); !status.ok()) return status;
  if (Status status = writer->finish(); !status.ok()) return status;
  if (Status status = copy_companions(source.directory(), staging->path()); !status.ok()) return status;
  // Last: what has no config.json is not a model.
  if (Status status = write_file(staging->path() / "config.json", converter.config()); !status.ok())
    return status;
  if (Status status = staging->publish(); !status.ok()) return status;
  return ConvertReport{
      .source_bytes = converter.source_bytes(),
      .written_bytes = writer->file_bytes(),
      .shards = writer->shards(),
      .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
}

}  // namespace gatefold
