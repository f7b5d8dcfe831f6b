#include "moe/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

namespace gatefold {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

namespace {

/// Random weights of one expert: gate, up, down.
Result<std::vector<QuantizedMatrix>> random_expert(const MoeSpec& spec) {
  std::mt19937 random(1);
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
  return matrices;
}

std::size_t distinct(std::vector<std::int32_t> ids) {
  std::sort(ids.begin(), ids.end());
  return static_cast<std::size_t>(std::unique(ids.begin(), ids.end()) - ids.begin());
}

}  // namespace

void random_routing(const MoeSpec& spec, std::mt19937& random, std::vector<std::int32_t>& ids) {
  std::vector<std::int32_t> experts(static_cast<std::size_t>(spec.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (std::size_t token = 0; token < ids.size(); token += static_cast<std::size_t>(spec.top_k))
    for (int slot = 0; slot < spec.top_k; ++slot) {
      std::swap(experts[slot], experts[slot + random() % (experts.size() - slot)]);
      ids[token + slot] = experts[slot];
    }
}

Result<SyntheticLayers> SyntheticLayers::create(const BenchShape& shape, SchemeId id, std::uint64_t bytes,
                                                const Device& device) {
  SyntheticLayers result;
  MoeSpec& spec = result.spec;
  spec.scheme = id;
  spec.hidden = shape.hidden;
  spec.intermediate = shape.intermediate;
  spec.experts = shape.experts;
  spec.top_k = shape.top_k;
  if (Status status = spec.validate(); !status.ok())
    return Status(status.code(), fmt::format("scheme {}: {}", scheme(id).name, status.message()));
  const Result<std::vector<QuantizedMatrix>> expert = random_expert(spec);
  if (!expert) return expert.status();
  do {  // all experts are copies of one, in memory of their own
    Result<ExpertWeights> layer =
        ExpertWeights::pack(spec, device, {}, [&](int, Projection projection) -> Result<QuantizedMatrix> {
          return (*expert)[static_cast<std::size_t>(projection)];
        });
    if (!layer) return layer.status();
    result.layers.push_back(std::move(*layer));
  } while (result.layers.front().packed_bytes() * result.layers.size() < bytes);
  return result;
}

SyntheticCalls::SyntheticCalls(const SyntheticLayers& layers, int tokens)
    : layers_(layers),
      tokens_(tokens),
      hidden_(static_cast<std::size_t>(tokens) * layers.spec.hidden),
      out_(hidden_.size()),
      weights_(static_cast<std::size_t>(tokens) * layers.spec.top_k,
               1.0f / static_cast<float>(layers.spec.top_k)),
      ids_(weights_.size()) {
  std::normal_distribution<float> normal;
  for (float& x : hidden_) x = normal(random_);
  random_routing(layers.spec, random_, ids_);
}

void SyntheticCalls::next() {
  ++call_;
  random_routing(layers_.spec, random_, ids_);
}

Result<double> SyntheticCalls::run(const MoePlan& plan) {
  workspace_.resize(std::max(workspace_.size(), plan.workspace_bytes()));
  const auto start = std::chrono::steady_clock::now();
  const Status status =
      plan.run(layer(),
               {.hidden = {hidden_.data(), DType::f32, tokens_, layers_.spec.hidden},
                .topk_ids = ids_.data(),
                .topk_weights = weights_.data()},
               {.hidden = {out_.data(), DType::f32, tokens_, layers_.spec.hidden}}, workspace_);
  if (!status.ok()) return status;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::uint64_t SyntheticCalls::weight_bytes() const {
  return distinct(ids_) * layer().packed_expert_bytes();
}

}  // namespace gatefold
