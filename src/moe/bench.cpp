#include "gatefold/bench.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>

#include "cpu/probe.h"
#include "gatefold/moe.h"
#include "moe/weights.h"

namespace gatefold {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// Reads and multiplies as fast as the machine can. What is read are packed weights: on virtual machines the
/// rate depends on where memory lies, so that reading elsewhere is no measure.
class Ceilings {
 public:
  explicit Ceilings(int threads) : threads_(threads) {}

  /// The better of reading with and without prefetches: CPUs differ.
  void read(const Arena& memory) { reads_.push_back(std::max(read(memory, 0), read(memory, 4096))); }

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
  double read(const Arena& memory, std::int64_t prefetch) const {
    constexpr std::int64_t kPiece = 1 << 14;  // floats
    const auto* data = reinterpret_cast<const float*>(memory.data());
    const auto pieces = static_cast<std::int64_t>(memory.bytes() / sizeof(float)) / kPiece;
    const auto start = Clock::now();
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t piece = 0; piece < pieces; ++piece)
      probe_.read(data + piece * kPiece, kPiece, prefetch);
    return static_cast<double>(pieces * kPiece) * sizeof(float) / seconds_since(start) / 1e9;
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

/// Random weights: one expert is quantized, the others are copies in memory of their own.
Result<ExpertWeights> random_layer(const MoeSpec& spec, std::mt19937& random) {
  std::vector<QuantizedMatrix> matrices;
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    const bool down = projection == Projection::down;
    const std::int64_t n = down ? spec.hidden : spec.intermediate, k = down ? spec.intermediate : spec.hidden;
    std::normal_distribution<float> normal(0, 1.0f / std::sqrt(static_cast<float>(k)));
    std::vector<float> pattern(4099), w(static_cast<std::size_t>(n * k));
    for (float& x : pattern) x = normal(random);
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = pattern[i % pattern.size()];
    Result<QuantizedMatrix> matrix = quantize(spec.scheme, {w.data(), DType::f32, n, k});
    if (!matrix) return matrix.status();
    matrices.push_back(std::move(*matrix));
  }
  return ExpertWeights::pack(spec, Device::cpu(), {},
                             [&](int, Projection projection) -> Result<QuantizedMatrix> {
                               return matrices[static_cast<std::size_t>(projection)];
                             });
}

/// top_k different experts for every token.
void random_routing(const MoeSpec& spec, std::mt19937& random, std::vector<std::int32_t>& ids) {
  std::vector<std::int32_t> experts(static_cast<std::size_t>(spec.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (std::size_t token = 0; token < ids.size(); token += static_cast<std::size_t>(spec.top_k))
    for (int slot = 0; slot < spec.top_k; ++slot) {
      std::swap(experts[slot], experts[slot + random() % (experts.size() - slot)]);
      ids[token + slot] = experts[slot];
    }
}

std::size_t distinct(std::vector<std::int32_t> ids) {
  std::sort(ids.begin(), ids.end());
  return static_cast<std::size_t>(std::unique(ids.begin(), ids.end()) - ids.begin());
}

Result<BenchRow> time_row(const MoeSpec& spec, const std::vector<ExpertWeights>& layers, int tokens,
                          const BenchOptions& options, Ceilings& ceilings, std::mt19937& random) {
  Result<MoePlan> plan = MoePlan::create(spec, {.max_tokens = tokens, .threads = options.threads});
  if (!plan) return plan.status();
  const auto slots = static_cast<std::size_t>(tokens) * spec.top_k,
             size = static_cast<std::size_t>(tokens) * spec.hidden;
  std::vector<std::byte> workspace(plan->workspace_bytes());
  std::vector<float> hidden(size), out(size), weights(slots, 1.0f / static_cast<float>(spec.top_k));
  std::vector<std::int32_t> ids(slots);
  std::normal_distribution<float> normal;
  for (float& x : hidden) x = normal(random);

  std::vector<double> times, rates, bytes;
  ceilings.forget();
  const auto start = Clock::now();
  for (std::size_t run = 0; times.size() < 3 || seconds_since(start) < options.seconds; ++run) {
    random_routing(spec, random, ids);
    const ExpertWeights& layer = layers[run % layers.size()];
    const auto began = Clock::now();
    const Status status = plan->run(layer,
                                    {.hidden = {hidden.data(), DType::f32, tokens, spec.hidden},
                                     .topk_ids = ids.data(),
                                     .topk_weights = weights.data()},
                                    {.hidden = {out.data(), DType::f32, tokens, spec.hidden}}, workspace);
    const double seconds = seconds_since(began);
    if (!status.ok()) return status;
    ceilings.read(layers[(run + layers.size() / 2) % layers.size()].state().arena);
    ceilings.multiply(scheme(spec.scheme).activation.value == formats::int8);
    if (run == 0) continue;  // first touch of the workspace
    times.push_back(seconds * 1e6);
    bytes.push_back(static_cast<double>(distinct(ids) * layer.packed_expert_bytes()));
    rates.push_back(bytes.back() / seconds / 1e9);
  }

  BenchRow row;
  row.scheme = scheme(spec.scheme).name;
  row.kernel = plan->kernel_name();
  row.tokens = tokens;
  row.runs = static_cast<int>(times.size());
  row.us_median = median(times);
  row.us_min = *std::min_element(times.begin(), times.end());
  row.us_max = *std::max_element(times.begin(), times.end());
  row.weight_bytes = static_cast<std::uint64_t>(std::accumulate(bytes.begin(), bytes.end(), 0.0) /
                                                static_cast<double>(bytes.size()));
  row.gb_per_s = median(rates);
  row.gflop_per_s = 6.0 * static_cast<double>(slots) * spec.hidden * spec.intermediate / row.us_median / 1e3;
  row.read_gb_per_s = ceilings.read_gb_per_s();
  row.read_ratio = row.gb_per_s / row.read_gb_per_s;
  row.multiply_gflop_per_s = ceilings.gflop_per_s();
  row.multiply_ratio = row.gflop_per_s / row.multiply_gflop_per_s;
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

Result<std::vector<BenchRow>> bench(const BenchOptions& requested,
                                    const std::function<void(const BenchRow&)>& on_row) {
  BenchOptions options = requested;
  if (options.threads == 0) options.threads = omp_get_max_threads();
  Ceilings ceilings(options.threads);
  std::mt19937 random(1);
  std::vector<BenchRow> rows;
  for (const SchemeId id : options.schemes) {
    MoeSpec spec;
    spec.scheme = id;
    spec.hidden = options.shape.hidden;
    spec.intermediate = options.shape.intermediate;
    spec.experts = options.shape.experts;
    spec.top_k = options.shape.top_k;
    if (Status status = spec.validate(); !status.ok())
      return Status(status.code(), fmt::format("scheme {}: {}", scheme(id).name, status.message()));
    std::vector<ExpertWeights> layers;
    do {
      Result<ExpertWeights> layer = random_layer(spec, random);
      if (!layer) return layer.status();
      layers.push_back(std::move(*layer));
    } while (layers.front().packed_bytes() * layers.size() < options.weight_bytes);
    for (const int tokens : options.tokens) {
      Result<BenchRow> row = time_row(spec, layers, tokens, options, ceilings, random);
      if (!row) return row.status();
      rows.push_back(*row);
      if (on_row) on_row(*row);
    }
  }
  return rows;
}

}  // namespace gatefold
