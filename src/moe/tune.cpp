#include "gatefold/tune.h"

#include <omp.h>

#include <chrono>
#include <functional>

#include "format/median.h"
#include "format/options.h"
#include "moe/kernel.h"
#include "moe/synthetic.h"
#include "moe/tune_gpu.h"
#include "moe/tuning_file.h"

namespace gatefold {
namespace {

/// One thing to choose, and what it may be.
struct Choice {
  int CpuTuning::*field;
  std::vector<int> values;
};

const std::vector<Choice>& choices() {
  static const std::vector<Choice> all = {
      {&CpuTuning::split, {1, 2, 4, 8}},
      {&CpuTuning::serial_tokens, {0, 16}},
      {&CpuTuning::prefetch, {-1, 0, 1024, 2048, 4096, 8192}},
  };
  return all;
}

/// Medians of the times of candidates, measured in turns for `seconds`.
Result<std::vector<double>> measure(SyntheticCalls& calls, const MoeSpec& spec, int tokens, int threads,
                                    const std::vector<CpuTuning>& candidates, double seconds) {
  std::vector<MoePlan> plans;
  for (const CpuTuning& tuning : candidates) {
    Result<MoePlan> plan =
        MoePlan::create(spec, {.max_tokens = tokens, .threads = threads, .tuning = tuning});
    if (!plan) return plan.status();
    plans.push_back(std::move(*plan));
  }
  std::vector<std::vector<double>> times(plans.size());
  const auto start = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  while (times.back().size() < 3 || spent() < seconds)
    for (std::size_t i = 0; i < plans.size(); ++i) {
      calls.next();
      const Result<double> time = calls.run(plans[i]);
      if (!time) return time.status();
      times[i].push_back(*time);
    }
  std::vector<double> medians;
  medians.reserve(times.size());
  for (std::vector<double>& each : times) medians.push_back(median(std::move(each)));
  return medians;
}

Result<TuneRow> tune_row(const SyntheticLayers& layers, int tokens, BenchRouting routing, int threads,
                         double seconds) {
  /// What has to be gained to leave the default.
  constexpr double kGain = 0.99;
  SyntheticCalls calls(layers, tokens, BenchFrom::ids, routing);
  TuneRow row{.scheme = scheme(layers.spec.scheme).name, .tokens = tokens};
  for (const Choice& choice : choices()) {
    std::vector<CpuTuning> candidates = {row.best};
    candidates.reserve(choice.values.size() + 1);
    for (const int value : choice.values)
      if (value != row.best.*choice.field) {
        candidates.push_back(row.best);
        candidates.back().*choice.field = value;
      }
    const auto times = measure(calls, layers.spec, tokens, threads, candidates, seconds);
    if (!times) return times.status();
    std::size_t best = 0;
    for (std::size_t i = 1; i < times->size(); ++i)
      if ((*times)[i] < kGain * (*times)[0] && (*times)[i] < (*times)[best]) best = i;
    row.best = candidates[best];
  }
  const auto times = measure(calls, layers.spec, tokens, threads, {CpuTuning{}, row.best}, seconds);
  if (!times) return times.status();
  row.us_default = (*times)[0] * 1e6;
  row.us_best = (*times)[1] * 1e6;
  if (row.us_best >= row.us_default) row.best = {};  // it was noise
  return row;
}

}  // namespace

Result<std::vector<TuneRow>> tune(const TuneOptions& options,
                                  const std::function<void(const TuneRow&)>& on_row) {
  const int threads = options.threads == 0 ? omp_get_max_threads() : options.threads;
  const std::string path = options.file.empty() ? tuning_path() : options.file;
  if (path.empty()) return Status(Code::invalid_argument, "there is no place for a tuning file: give one");
  Result<TuningFile> file = TuningFile::read(path);
  if (!file) return file.status();
  const bool gpu = options.device.kind == Device::Kind::cuda;
  std::string gpu_name;
  if (gpu) {
    const auto info = cuda::device_info(options.device.index);
    if (!info) return info.status();
    gpu_name = info->name;
  }
  std::vector<TuneRow> rows;
  for (const SchemeId id : options.schemes) {
    const Result<SyntheticLayers> layers =
        SyntheticLayers::create(options.shape, id, options.weight_bytes, options.device);
    if (!layers) return layers.status();
    for (const int tokens : options.tokens) {
      Result<TuneRow> row = gpu ? tune_row_on_gpu(*layers, tokens, options)
                                : tune_row(*layers, tokens, options.routing, threads, options.seconds);
      if (!row) return row.status();
      if (gpu)
        file->set(
            TuningFile::cuda_key(layers->spec, gpu_name, cuda_token_class(tokens), options.fast_accumulation),
            row->cuda_best);
      else
        file->set(TuningFile::key(layers->spec, threads, token_class(tokens)), row->best);
      if (Status status = file->write(path); !status.ok()) return status;
      rows.push_back(*row);
      if (on_row) on_row(*row);
    }
  }
  return rows;
}

std::string tuning_warning() {
  return TuningFile::was_read() ? TuningFile::installed().warning : "";
}

}  // namespace gatefold
