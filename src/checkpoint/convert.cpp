#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/companions.h"
#include "checkpoint/compressed_tensors.h"
#include "checkpoint/families.h"
#include "checkpoint/fused_amax.h"
#include "checkpoint/safetensors_writer.h"
#include "checkpoint/staging.h"
#include "gatefold/checkpoint.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t copy_bytes = 16 << 20;        ///< of an unquantized tensor at a time
constexpr std::uint64_t memory_limit = 512ull << 20;  ///< of all jobs at work, unless one alone needs more

/// A piece of work: copy a part of a tensor, or quantize one expert's matrix. Its output is tensors
/// first_output, ... of the plan.
struct Job {
  const TensorEntry* source = nullptr;
  std::uint64_t begin = 0, end = 0;  ///< bytes of the source's file
  std::size_t first_output = 0;
  std::optional<ExpertTensor> matrix;  ///< none: copy
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
  Converter(const Checkpoint& source, const ConvertOptions& options,
            const std::function<void(const ConvertProgress&)>& progress)
      : source_(source),
        options_(options),
        report_progress_(progress),
        names_(*find_family(source.config().model_type), prefix(source)) {}

  Status make_plan();
  Status run(const SafetensorsWriter& writer);
  std::string config() const;

  std::vector<PlannedTensor>& outputs() { return plan_.outputs; }
  std::uint64_t source_bytes() const { return progress_.total_bytes; }

 private:
  static std::string prefix(const Checkpoint& source);
  Status check_complete() const;
  Status plan_matrix(const TensorEntry& entry, const ExpertTensor& tensor, std::uint64_t& begin);
  Status quantize_matrix(const Job& job, const SafetensorsWriter& writer) const;
  Status run_job(const Job& job, const SafetensorsWriter& writer);
  std::string where(const Job& job) const;
  Linear linear(const ExpertTensor& tensor) const {
    return names_.expert(source_.config().moe, tensor.layer, *tensor.expert, tensor.projection);
  }

  const Checkpoint& source_;
  const ConvertOptions& options_;
  const std::function<void(const ConvertProgress&)>& report_progress_;
  ModuleNames names_;
  std::vector<std::uint64_t> file_ends_;
  Plan plan_;
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
    if (!source_.is_expert_tensor(entry->name)) {
      std::uint64_t begin = entry->begin;
      do {
        const std::uint64_t end = std::min(begin + copy_bytes, entry->end);
        plan_.jobs.push_back({entry, begin, end, plan_.outputs.size(), std::nullopt});
        begin = end;
      } while (begin < entry->end);
      plan_.outputs.push_back({entry->name, entry->dtype, entry->shape});
      continue;
    }
    std::optional<ExpertTensor> tensor = names_.parse(entry->name);
    if (!tensor) return {Code::internal, fmt::format("'{}' is no expert's tensor", entry->name)};
    std::uint64_t begin = entry->begin;
    const bool fused = !tensor->expert;
    const int first = fused ? 0 : *tensor->expert, count = fused ? source_.config().moe.experts : 1;
    for (int expert = first; expert < first + count; ++expert) {
      tensor->expert = expert;
      if (Status status = plan_matrix(*entry, *tensor, begin); !status.ok()) return status;
      if (!tensor->gate_up) continue;
      ExpertTensor up = *tensor;
      up.projection = Projection::up;
      if (Status status = plan_matrix(*entry, up, begin); !status.ok()) return status;
    }
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

/// `begin`: where the matrix lies in its file; moved to its end.
Status Converter::plan_matrix(const TensorEntry& entry, const ExpertTensor& tensor, std::uint64_t& begin) {
  const Linear matrix = linear(tensor);
  const std::uint64_t bytes = static_cast<std::uint64_t>(matrix.n) * static_cast<std::uint64_t>(matrix.k) *
                              static_cast<std::uint64_t>(bits(entry.dtype)) / 8;
  plan_.jobs.push_back({&entry, begin, begin + bytes, plan_.outputs.size(), tensor});
  begin += bytes;
  if (Status status = check_shape(options_.scheme, matrix.n, matrix.k); !status.ok())
    return {status.code(), fmt::format("{}: {}", where(plan_.jobs.back()), status.message())};
  QuantizedMatrix described;
  described.scheme = options_.scheme;
  described.n = matrix.n;
  described.k = matrix.k;
  described.scale_format = scheme(options_.scheme).weight.scale;
  if (options_.static_input) described.input_scale.emplace();
  for (compressed_tensors::StoredTensor& stored : compressed_tensors::layout(described))
    plan_.outputs.push_back(
        {matrix.module + std::string(stored.suffix), stored.dtype, std::move(stored.shape)});
  return {};
}

std::string Converter::where(const Job& job) const {
  return fmt::format("{}: {}", source_.files()[static_cast<std::size_t>(job.source->file)].string(),
                     job.matrix ? linear(*job.matrix).module : job.source->name);
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
  return failure_;
}

Status Converter::run_job(const Job& job, const SafetensorsWriter& writer) try {
  if (options_.cancelled && options_.cancelled()) return {Code::io_error, "conversion interrupted"};
  const MemoryGate::Pass pass(memory_, job.bytes() * 2);  // the source and what is made of it
  Status status;
  if (job.matrix) {
    status = quantize_matrix(job, writer);
  } else {
    const std::uint64_t offset = job.begin - job.source->begin;
    const TensorView view = source_.view(*job.source);
    std::span<const std::byte> bytes{view.data, view.bytes};
    if (options_.replacement) bytes = options_.replacement(*job.source).value_or(bytes);
    if (bytes.size() != view.bytes)
      return {Code::invalid_argument,
              fmt::format("{}: {} bytes cannot replace {}", where(job), bytes.size(), view.bytes)};
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

Status Converter::quantize_matrix(const Job& job, const SafetensorsWriter& writer) const {
  const ExpertTensor& tensor = *job.matrix;
  const auto failed = [&](const Status& status) {
    return Status(status.code(), fmt::format("{}: {}", where(job), status.message()));
  };
  Result<QuantizedMatrix> quantized = [&]() -> Result<QuantizedMatrix> {
    if (options_.matrix) return options_.matrix(tensor.layer, *tensor.expert, tensor.projection);
    const Result<ExpertMatrix> matrix = source_.expert(tensor.layer, *tensor.expert, tensor.projection);
    if (!matrix.ok()) return matrix.status();
    const auto amax = fused_amax(source_, options_.scheme, tensor.layer, *tensor.expert, tensor.projection);
    if (!amax.ok()) return amax.status();
    QuantizeOptions options = options_.quantize;
    options.tensor_amax = *amax;
    return quantize(options_.scheme, std::get<MatrixView>(*matrix), options);
  }();
  if (!quantized.ok()) return failed(quantized.status());
  Result<std::vector<std::vector<std::byte>>> stored = compressed_tensors::store(std::move(*quantized));
  if (!stored.ok()) return failed(stored.status());
  for (std::size_t i = 0; i < stored->size(); ++i)
    if (Status status = writer.write(job.first_output + i, (*stored)[i]); !status.ok()) return status;
  return {};
}

/// The source's config and, for a scheme that quantizes, a quantization_config.
std::string Converter::config() const {
  auto config = nlohmann::ordered_json::parse(source_.config_text());
  const Scheme& row = scheme(options_.scheme);
  if (row.weight.quantized()) {
    // Every matrix that could be a Linear. The head is one even where it has no tensor of its own.
    std::set<std::string> ignore{"lm_head"};
    for (const TensorEntry& entry : source_.tensors())
      if (entry.shape.size() == 2 && entry.name.ends_with(".weight") && !source_.is_expert_tensor(entry.name))
        ignore.insert(entry.name.substr(0, entry.name.size() - std::string_view(".weight").size()));
    config["quantization_config"] =
        compressed_tensors::config(row, {ignore.begin(), ignore.end()}, options_.static_input);
  }
  return config.dump(2) + "\n";
}

Status check_source(const Checkpoint& source) {
  if (find_family(source.config().model_type) == nullptr)
    return {Code::unsupported,
            fmt::format("{}: no family '{}'", source.directory().string(), source.config().model_type)};
  const Result<SchemeId> stored = source.stored_scheme();
  if (stored.ok() && !scheme(*stored).weight.quantized()) return {};
  return {Code::invalid_argument,
          fmt::format("{}: its experts are quantized already ({}, {}); convert the unquantized model instead",
                      source.directory().string(), source.convention(),
                      stored.ok() ? scheme(*stored).name : stored.status().message())};
}

}  // namespace

Result<ConvertReport> convert(const Checkpoint& source, const fs::path& destination,
                              const ConvertOptions& options,
                              const std::function<void(const ConvertProgress&)>& progress) {
  const auto start = std::chrono::steady_clock::now();
  if (options.shard_bytes == 0 || options.threads < 0)
    return Status(Code::invalid_argument,
                  fmt::format("shards of {} bytes, {} threads", options.shard_bytes, options.threads));
  if (Status status = check_source(source); !status.ok()) return status;
  Converter converter(source, options, progress);
  if (Status status = converter.make_plan(); !status.ok()) return status;

  Result<StagingDirectory> staging = StagingDirectory::create(destination);
  if (!staging.ok()) return staging.status();
  Result<SafetensorsWriter> writer =
      SafetensorsWriter::create(staging->path(), std::move(converter.outputs()), options.shard_bytes);
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
