#include "moe/bench_gpu.h"

#include <algorithm>

#include "cuda/measure.h"
#include "format/median.h"
#include "moe/gpu_calls.h"

namespace gatefold {

const Result<double>& DenseRates::gflop_per_s(SchemeId id) {
  const Format activation = scheme(id).activation.value;
  const Format multiplied =
      activation == formats::e4m3 || activation == formats::int8 ? activation : formats::bf16;
  const auto found = rates_.find(name(multiplied));
  if (found != rates_.end()) return found->second;
  return rates_.emplace(name(multiplied), cuda::dense_gflop_per_s(multiplied, device_.index)).first->second;
}

Result<BenchRow> time_row_on_gpu(const SyntheticLayers& layers, int tokens, BenchFrom from,
                                 const BenchOptions& options, DenseRates& dense) {
  const MoeSpec& spec = layers.spec;
  Result<MoePlan> plan = MoePlan::create(spec,
                                         {.max_tokens = tokens,
                                          .batch_invariant = options.batch_invariant,
                                          .fast_accumulation = options.fast_accumulation},
                                         options.device);
  if (!plan) return plan.status();
  Result<GpuCalls> calls = GpuCalls::create(layers, tokens, from, options.routing, *plan);
  if (!calls) return calls.status();
  Result<cuda::Timer> timer = cuda::Timer::create(options.device.index);
  if (!timer) return timer.status();

  const auto run = [&](cuda::Stream stream) { return calls->run(*plan, stream); };
  const auto read = [&](cuda::Stream stream) { return calls->read(stream); };
  const auto each = static_cast<double>(calls->count());
  std::vector<double> times, launched, reads;
  const auto add = [&](const Result<std::vector<double>>& some, std::vector<double>& to) {
    if (!some) return some.status();
    for (const double us : *some) to.push_back(us / each);
    return Status();
  };
  constexpr int kRounds = 3, kReplays = 7;
  for (int round = 0; round < kRounds; ++round) {
    if (Status status = add(timer->rested(run, kReplays), times); !status.ok()) return status;
    if (Status status = add(timer->replayed(read, kReplays), reads); !status.ok()) return status;
    const auto some = timer->launched(run);
    if (!some) return some.status();
    launched.push_back(*some / each);
  }

  BenchRow row;
  if (const auto clocks = cuda::read_clocks(options.device.index)) {
    row.sm_mhz = clocks->sm_mhz;
    row.memory_mhz = clocks->memory_mhz;
  } else {
    row.unmeasured = clocks.status().message();
  }
  if (const Result<double>& rate = dense.gflop_per_s(spec.scheme))
    row.multiply_gflop_per_s = *rate;
  else
    row.unmeasured += (row.unmeasured.empty() ? "" : "; ") + rate.status().message();
  row.scheme = scheme(spec.scheme).name;
  row.kernel = plan->kernel_name();
  row.tokens = tokens;
  row.from = from;
  row.runs = static_cast<int>(times.size() * calls->count());
  row.us_median = median(times);
  row.us_min = *std::min_element(times.begin(), times.end());
  row.us_max = *std::max_element(times.begin(), times.end());
  row.us_launched = median(launched);
  const double bytes = calls->mean_weight_bytes();
  row.weight_bytes = static_cast<std::uint64_t>(bytes);
  row.gb_per_s = bytes / row.us_median / 1e3;
  row.read_gb_per_s = bytes / median(reads) / 1e3;
  row.read_ratio = row.gb_per_s / row.read_gb_per_s;
  row.gflop_per_s = flop(spec, tokens) / row.us_median / 1e3;
  row.multiply_ratio = row.multiply_gflop_per_s > 0 ? row.gflop_per_s / row.multiply_gflop_per_s : 0;
  set_floor(row, spec);
  return row;
}

}  // namespace gatefold
