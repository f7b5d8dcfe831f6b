#include "moe/tune_gpu.h"

#include <algorithm>

#include "cuda/measure.h"
#include "format/median.h"
#include "moe/gpu_calls.h"

namespace gatefold {

Result<TuneRow> tune_row_on_gpu(const SyntheticLayers& layers, int tokens, const TuneOptions& options) {
  /// What has to be gained to leave what the model says.
  constexpr double kGain = 0.99;
  constexpr int kRounds = 3, kReplays = 5;
  PlanOptions forced{.max_tokens = tokens, .fast_accumulation = options.fast_accumulation};
  const Result<MoePlan> any = MoePlan::create(layers.spec, forced, options.device);
  if (!any) return any.status();
  const std::vector<CudaCandidate> candidates = any->candidates(tokens);
  std::vector<MoePlan> plans;
  for (const CudaCandidate& candidate : candidates) {
    forced.cuda_tuning = candidate.tuning;
    Result<MoePlan> plan = MoePlan::create(layers.spec, forced, options.device);
    if (!plan) return plan.status();
    plans.push_back(std::move(*plan));
  }
  const Result<GpuCalls> calls = GpuCalls::create(layers, tokens, BenchFrom::ids, options.routing, *any);
  if (!calls) return calls.status();
  Result<cuda::Timer> timer = cuda::Timer::create(options.device.index);
  if (!timer) return timer.status();

  std::vector<std::vector<double>> times(plans.size());
  for (int round = 0; round < kRounds; ++round)
    for (std::size_t i = 0; i < plans.size(); ++i) {
      // Else those that are timed later would be slower: candidates before them have heated the device.
      const auto some =
          timer->rested([&](cuda::Stream stream) { return calls->run(plans[i], stream); }, kReplays);
      if (!some) return some.status();
      for (const double us : *some) times[i].push_back(us / static_cast<double>(calls->count()));
    }

  TuneRow row{.scheme = scheme(layers.spec.scheme).name, .tokens = tokens};
  std::size_t model = 0, best = 0;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    row.candidates.push_back({candidates[i].tuning, candidates[i].clocks, median(times[i])});
    if (candidates[i].clocks < candidates[model].clocks) model = i;
    if (row.candidates[i].us < row.candidates[best].us) best = i;
  }
  row.us_default = row.candidates[model].us;
  if (row.candidates[best].us > kGain * row.us_default) best = model;
  row.us_best = row.candidates[best].us;
  row.cuda_default = candidates[model].tuning;
  row.cuda_best = candidates[best].tuning;
  if (const auto clocks = cuda::read_clocks(options.device.index)) row.sm_mhz = clocks->sm_mhz;
  return row;
}

}  // namespace gatefold
