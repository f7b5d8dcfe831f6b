#include "gatefold/bench.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "cpu/probe.h"
#include "format/median.h"
#include "moe/bench_gpu.h"
#include "moe/synthetic.h"
#include "moe/weights.h"

namespace gatefold {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Reads and multiplies as fast as the machine can. What is read are packed weights: on virtual machines the
/// rate depends on where memory lies, so that reading elsewhere is no measure.
class Ceilings {
 public:
  explicit Ceilings(int threads) : threads_(threads) {}

  /// The better of reading with and without prefetches: CPUs differ.
  void read(const HostWeights& memory) { reads_.push_back(std::max(read(memory, 0), read(memory, 4096))); }

  /// The best rate for activations of 8 or 16 bits.
  void multiply(bool int8) {
    double best = rate(int8 ? probe_.multiply_int8 : probe_.multiply_f32);
    if (!int8 && probe_.multiply_bf16 != nullptr) best = std::max(best, rate(probe_.multiply_bf16));
    multiplies_.push_back(best);
  }

  void forget() {
    reads_.clear();
    multiplies_.clear();
  }
  double read_gb_per_s() const { return median(reads_); }
  double gflop_per_s() const { return median(multiplies_); }

 private:
  double read(const HostWeights& memory, std::int64_t prefetch) const {
    const auto* data = reinterpret_cast<const float*>(memory.data());
    const auto floats = static_cast<std::int64_t>(memory.bytes() / sizeof(float));
    // In the probe's steps of 128; the smallest layer of panels has more.
    const std::int64_t piece_floats = std::min<std::int64_t>(1 << 14, floats / 128 * 128);
    const std::int64_t pieces = floats / piece_floats;
    const auto start = Clock::now();
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t piece = 0; piece < pieces; ++piece)
      probe_.read(data + piece * piece_floats, piece_floats, prefetch);
    return static_cast<double>(pieces * piece_floats) * sizeof(float) / seconds_since(start) / 1e9;
  }

  double rate(Probe::Multiply probe) const {
    const auto start = Clock::now();
    double operations = 0;
#pragma omp parallel num_threads(threads_) reduction(+ : operations)
    {
      alignas(64) float scratch[64] = {};
      operations += probe(500'000, scratch);
    }
    return operations / seconds_since(start) / 1e9;
  }

  const Probe& probe_ = probe(best_isa());
  int threads_;
  std::vector<double> reads_, multiplies_;
};

Result<BenchRow> time_row(const SyntheticLayers& layers, int tokens, BenchFrom from,
                          const BenchOptions& options, Ceilings& ceilings) {
  const MoeSpec& spec = layers.spec;
  Result<MoePlan> plan = MoePlan::create(spec, {.max_tokens = tokens, .threads = options.threads});
  if (!plan) return plan.status();
  SyntheticCalls calls(layers, tokens, from, options.routing);
  std::vector<double> times, rates, bytes;
  ceilings.forget();
  const auto start = Clock::now();
  for (std::size_t run = 0; times.size() < 3 || seconds_since(start) < options.seconds; ++run) {
    const Result<double> seconds = calls.run(*plan);
    if (!seconds) return seconds.status();
    ceilings.read(static_cast<const HostWeights&>(*calls.other_layer().state().memory));
    ceilings.multiply(scheme(spec.scheme).activation.value == formats::int8);
    if (run != 0) {  // first touch of the workspace
      times.push_back(*seconds * 1e6);
      bytes.push_back(static_cast<double>(calls.weight_bytes()));
      rates.push_back(bytes.back() / *seconds / 1e9);
    }
    calls.next();
  }

  BenchRow row;
  row.scheme = scheme(spec.scheme).name;
  row.kernel = plan->kernel_name();
  row.tokens = tokens;
  row.from = from;
  row.runs = static_cast<int>(times.size());
  row.us_median = median(times);
  row.us_min = *std::min_element(times.begin(), times.end());
  row.us_max = *std::max_element(times.begin(), times.end());
  row.weight_bytes = static_cast<std::uint64_t>(std::accumulate(bytes.begin(), bytes.end(), 0.0) /
                                                static_cast<double>(bytes.size()));
  row.gb_per_s = median(rates);
  row.gflop_per_s = flop(spec, tokens) / row.us_median / 1e3;
  row.read_gb_per_s = ceilings.read_gb_per_s();
  row.read_ratio = row.gb_per_s / row.read_gb_per_s;
  row.multiply_gflop_per_s = ceilings.gflop_per_s();
  row.multiply_ratio = row.gflop_per_s / row.multiply_gflop_per_s;
  set_floor(row, spec);
  return row;
}

}  // namespace

std::span<const BenchShape> bench_presets() {
  static const std::vector<BenchShape> presets = {
      {"qwen3-30b-a3b", 2048, 768, 128, 8},   {"gpt-oss-120b", 2880, 2880, 128, 4},
      {"deepseek-v3", 7168, 2048, 32, 8},     {"mixtral-8x7b", 4096, 14336, 8, 2},
      {"deepseek-v4-pro", 7168, 3072, 48, 6},
  };
  return presets;
}

namespace {

/// Why calls cannot be given what they are to have, in words; empty if they can.
std::string refuses_from(const BenchOptions& options) {
  const auto are_from = [&](BenchFrom from) {
    return std::ranges::find(options.from, from) != options.from.end();
  };
  if (are_from(BenchFrom::hidden) && options.routing != BenchRouting::uniform)
    return "calls from hidden states alone are routed by the layer, uniformly";
  if (options.shape.ep_size > 1 && (are_from(BenchFrom::hidden) || are_from(BenchFrom::logits)))
    return "a part of the experts is not routed to: calls have ids";
  if (!are_from(BenchFrom::codes)) return {};
  if (options.device.kind == Device::Kind::cpu) return "calls from codes are for GPUs only";
  if (options.layers.ordered_inputs) return "calls from codes: experts have orders of numbers, not of codes";
  for (const SchemeId id : options.schemes)
    if (!scheme(id).quantizes_activations())
      return fmt::format("calls from codes: {} leaves activations in 16 bits", scheme(id).name);
  return {};
}

}  // namespace

Result<std::vector<BenchRow>> bench(const BenchOptions& requested,
                                    const std::function<void(const BenchRow&)>& on_row) {
  BenchOptions options = requested;
  if (options.threads == 0) options.threads = omp_get_max_threads();
  if (std::string why = refuses_from(options); !why.empty())
    return Status(Code::invalid_argument, std::move(why));
  Ceilings ceilings(options.threads);
  DenseRates dense(options.device);
  const auto time = [&](const SyntheticLayers& layers, int tokens, BenchFrom from) {
    return options.device.kind == Device::Kind::cpu ? time_row(layers, tokens, from, options, ceilings)
                                                    : time_row_on_gpu(layers, tokens, from, options, dense);
  };
  std::vector<BenchRow> rows;
  for (const SchemeId id : options.schemes) {
    const Result<SyntheticLayers> layers =
        SyntheticLayers::create(options.shape, id, options.weight_bytes, options.device, options.layers);
    if (!layers) return layers.status();
    for (const int tokens : options.tokens)
      for (const BenchFrom from : options.from) {
        Result<BenchRow> row = time(*layers, tokens, from);
        if (!row) return row.status();
        rows.push_back(*row);
        if (on_row) on_row(*row);
      }
  }
  return rows;
}

}  // namespace gatefold
