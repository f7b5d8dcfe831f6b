#include "moe/bench_gpu.h"

#include <algorithm>
#include <numeric>

#include "cuda/measure.h"
#include "gatefold/codec.h"
#include "moe/weights.h"

namespace gatefold {
namespace {

/// Device arrays of several calls, each with another layer and another routing.
class GpuCalls {
 public:
  /// As many as read several times what the L2 cache holds.
  static Result<GpuCalls> create(const SyntheticLayers& layers, int tokens, BenchFrom from,
                                 BenchRouting routing, const MoePlan& plan) {
    const auto device = cuda::device_info(plan.device().index);
    if (!device) return device.status();
    GpuCalls calls(layers, tokens, from);
    for (std::uint64_t bytes = 0; bytes < 5 * device->l2_bytes || calls.routings_.size() < 4;) {
      calls.add(routing);
      bytes += calls.weight_bytes(calls.routings_.size() - 1);
    }
    if (Status status = calls.copy(plan); !status.ok()) return status;
    return calls;
  }

  std::size_t count() const { return routings_.size(); }
  double mean_weight_bytes() const {
    double bytes = 0;
    for (std::size_t i = 0; i < count(); ++i) bytes += static_cast<double>(weight_bytes(i));
    return bytes / static_cast<double>(count());
  }

  Status run(const MoePlan& plan, cuda::Stream stream) const {
    const MoeSpec& spec = layers_->spec;
    for (std::size_t i = 0; i < count(); ++i) {
      MoeInputs inputs{.hidden = {hidden_.data(), spec.act_dtype, tokens_, spec.hidden}};
      if (from_ == BenchFrom::logits) {
        inputs.router_logits = logits_.as<float>() + i * logits_of_call();
      } else {
        inputs.topk_ids = ids_.as<std::int32_t>() + i * slots();
        inputs.topk_weights = weights_.as<float>();
      }
      Status status =
          plan.run(layer(i), inputs, {.hidden = {out_.data(), spec.act_dtype, tokens_, spec.hidden}},
                   {workspace_.data(), workspace_.bytes()}, stream);
      if (!status.ok()) return status;
    }
    return {};
  }

  Status read(cuda::Stream stream) const {
    for (std::size_t i = 0; i < count(); ++i) {
      const auto& routed = layer(i).state().routed;
      const auto bytes = static_cast<std::int64_t>(layer(i).packed_expert_bytes());
      cuda::ReadArgs args{.base = routed[0].gate.data,
                          .stride = routed.size() > 1 ? routed[1].gate.data - routed[0].gate.data : 0,
                          .bytes = bytes / 16 * 16,
                          .count = static_cast<int>(routings_[i].distinct.size())};
      std::copy(routings_[i].distinct.begin(), routings_[i].distinct.end(), args.indices);
      if (Status status = cuda::launch_read(args, layer(i).device().index, stream); !status.ok())
        return status;
    }
    return {};
  }

 private:
  struct Routed {
    std::vector<std::int32_t> ids, distinct;
  };

  GpuCalls(const SyntheticLayers& layers, int tokens, BenchFrom from)
      : layers_(&layers), tokens_(tokens), from_(from) {}

  std::size_t slots() const {
    return static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(layers_->spec.top_k);
  }
  std::size_t logits_of_call() const {
    return from_ == BenchFrom::ids ? 0 : static_cast<std::size_t>(tokens_ * layers_->spec.experts);
  }
  const ExpertWeights& layer(std::size_t call) const {
    return layers_->layers[call % layers_->layers.size()];
  }
  std::uint64_t weight_bytes(std::size_t call) const {
    return routings_[call].distinct.size() * layer(call).packed_expert_bytes();
  }

  void add(BenchRouting routing) {
    Routed routed;
    routed.ids.resize(slots());
    random_routing(layers_->spec, routing, random_, routed.ids);
    routed.distinct = routed.ids;
    std::sort(routed.distinct.begin(), routed.distinct.end());
    routed.distinct.erase(std::unique(routed.distinct.begin(), routed.distinct.end()), routed.distinct.end());
    routings_.push_back(std::move(routed));
  }

  Status copy(const MoePlan& plan) {
    const auto device = plan.device().index;
    const std::size_t elements =
        static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(layers_->spec.hidden);
    const std::pair<cuda::Memory*, std::size_t> all[] = {
        {&hidden_, elements * 2},       {&out_, elements * 2},
        {&ids_, count() * slots() * 4}, {&logits_, count() * logits_of_call() * 4},
        {&weights_, slots() * 4},       {&workspace_, plan.workspace_bytes()}};
    for (const auto& [memory, bytes] : all) {
      auto allocated = cuda::Memory::allocate(bytes, "a bench", device);
      if (!allocated) return allocated.status();
      *memory = std::move(*allocated);
    }
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> x(elements);
    for (std::uint16_t& code : x) code = static_cast<std::uint16_t>(encode<formats::bf16>(normal(random_)));
    const std::vector<float> weights(slots(), 1.0f / static_cast<float>(layers_->spec.top_k));
    if (Status status = cuda::copy(hidden_.data(), x.data(), elements * 2); !status.ok()) return status;
    if (Status status = cuda::copy(weights_.data(), weights.data(), slots() * 4); !status.ok()) return status;
    for (std::size_t i = 0; i < count(); ++i) {
      const Routed& routed = routings_[i];
      if (Status status = cuda::copy(ids_.as<std::int32_t>() + i * slots(), routed.ids.data(), slots() * 4);
          !status.ok())
        return status;
      if (from_ == BenchFrom::ids) continue;
      const std::vector<float> logits = random_logits(layers_->spec, random_, routed.ids);
      if (Status status =
              cuda::copy(logits_.as<float>() + i * logits.size(), logits.data(), logits.size() * 4);
          !status.ok())
        return status;
    }
    return cuda::synchronize();
  }

  const SyntheticLayers* layers_;
  int tokens_;
  BenchFrom from_;
  std::mt19937 random_{1};
  std::vector<Routed> routings_;
  cuda::Memory hidden_, out_, ids_, weights_, logits_, workspace_;
};

}  // namespace

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
  Result<MoePlan> plan = MoePlan::create(spec, {.max_tokens = tokens}, options.device);
  if (!plan) return plan.status();
  Result<GpuCalls> calls = GpuCalls::create(layers, tokens, from, options.routing, *plan);
  if (!calls) return calls.status();
  Result<cuda::Timer> timer = cuda::Timer::create(options.device.index);
  if (!timer) return timer.status();

  const auto run = [&](cuda::Stream stream) { return calls->run(*plan, stream); };
  const auto read = [&](cuda::Stream stream) { return calls->read(stream); };
  const auto each = static_cast<double>(calls->count());
  std::vector<double> times, launched, reads;
  constexpr int kRounds = 3, kReplays = 7;  // reads and runs in turn: clocks change
  for (int round = 0; round < kRounds; ++round) {
    for (auto [work, to] : {std::pair<cuda::Work, std::vector<double>*>{read, &reads}, {run, &times}}) {
      const auto some = timer->replayed(work, kReplays);
      if (!some) return some.status();
      for (const double us : *some) to->push_back(us / each);
    }
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
  row.gflop_per_s = 6.0 * tokens * spec.top_k * spec.hidden * spec.intermediate / row.us_median / 1e3;
  row.multiply_ratio = row.multiply_gflop_per_s > 0 ? row.gflop_per_s / row.multiply_gflop_per_s : 0;
  set_floor(row, spec);
  return row;
}

}  // namespace gatefold
