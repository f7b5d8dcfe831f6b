#include "moe/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "format/matrix.h"
#include "gatefold/codec.h"

namespace gatefold {

namespace {

/// [n, k], of numbers that come again and again, but not in the same columns.
std::vector<float> random_matrix(std::int64_t n, std::int64_t k, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 1.0f / std::sqrt(static_cast<float>(k)));
  std::vector<float> pattern(4099), w(static_cast<std::size_t>(n * k));
  for (float& x : pattern) x = normal(random);
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = pattern[i % pattern.size()];
  return w;
}

/// Random weights of one expert: gate, up, down.
Result<std::vector<QuantizedMatrix>> random_expert(const MoeSpec& spec) {
  std::mt19937 random(1);
  std::vector<QuantizedMatrix> matrices;
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    const bool down = projection == Projection::down;
    const std::int64_t n = down ? spec.hidden : spec.intermediate, k = down ? spec.intermediate : spec.hidden;
    const std::vector<float> w = random_matrix(n, k, random);
    Result<QuantizedMatrix> matrix = quantize(spec.scheme, {w.data(), DType::f32, n, k});
    if (!matrix) return matrix.status();
    if (spec.act_dtype == DType::f16 && matrix->scale_format == formats::bf16)
      convert_scales(*matrix, formats::f16);
    matrices.push_back(std::move(*matrix));
  }
  return matrices;
}

/// A random router of a layer, of bf16 numbers, as in checkpoints.
std::vector<float> random_router(const MoeSpec& spec, std::size_t layer) {
  std::mt19937 random(static_cast<unsigned>(layer) + 1);
  std::vector<float> w = random_matrix(spec.experts, spec.hidden, random);
  for (float& x : w) x = decode<formats::bf16>(encode<formats::bf16>(x));
  return w;
}

/// That of an expert: its own, as in checkpoints, for numbers of up to about 4.
TensorScale static_scale(const Operand& activation, int expert) {
  const float largest = 4.0f * (1.0f + 0.01f * static_cast<float>(expert % 16));
  if (activation.tensor_scale.stored()) return {448 * 6 / largest, true};
  return {largest / 448, false};
}

std::size_t distinct(std::vector<std::int32_t> ids) {
  std::erase(ids, -1);
  std::sort(ids.begin(), ids.end());
  return static_cast<std::size_t>(std::unique(ids.begin(), ids.end()) - ids.begin());
}

}  // namespace

void random_routing(const MoeSpec& spec, BenchRouting routing, std::mt19937& random,
                    std::vector<std::int32_t>& ids) {
  const auto top_k = static_cast<std::size_t>(spec.top_k);
  std::vector<std::int32_t> experts(static_cast<std::size_t>(spec.experts) *
                                    static_cast<std::size_t>(spec.ep_size));
  std::iota(experts.begin(), experts.end(), 0);
  const auto draw_first = [&](std::size_t count) {  // of `experts`, uniformly
    for (std::size_t i = 0; i < count; ++i)
      std::swap(experts[i], experts[i + random() % (experts.size() - i)]);
  };
  const auto draw_skewed = [&](std::int32_t* to) {  // experts are by rank
    std::vector<double> chances(experts.size());
    for (std::size_t rank = 0; rank < chances.size(); ++rank)
      chances[rank] = 1 / (1 + static_cast<double>(rank));
    for (std::size_t slot = 0; slot < top_k; ++slot) {
      std::discrete_distribution<std::size_t> distribution(chances.begin(), chances.end());
      const std::size_t rank = distribution(random);
      to[slot] = experts[rank];
      chances[rank] = 0;
    }
  };
  if (routing == BenchRouting::skew) draw_first(experts.size() - 1);
  if (routing == BenchRouting::single) draw_first(top_k);
  for (std::size_t token = 0; token < ids.size(); token += top_k) {
    if (routing == BenchRouting::skew) {
      draw_skewed(&ids[token]);
      continue;
    }
    if (routing == BenchRouting::uniform) draw_first(top_k);
    std::copy_n(experts.begin(), top_k, ids.begin() + static_cast<std::ptrdiff_t>(token));
  }
  for (std::int32_t& id : ids)
    if (id >= spec.experts) id = -1;
}

std::vector<float> random_logits(const MoeSpec& spec, std::mt19937& random,
                                 const std::vector<std::int32_t>& ids) {
  const auto top_k = static_cast<std::size_t>(spec.top_k), experts = static_cast<std::size_t>(spec.experts);
  std::uniform_real_distribution<float> below(-4.0f, 0.0f);
  std::vector<float> logits(ids.size() / top_k * experts);
  for (float& logit : logits) logit = below(random);
  for (std::size_t slot = 0; slot < ids.size(); ++slot)
    logits[slot / top_k * experts + static_cast<std::size_t>(ids[slot])] =
        1.0f + 0.125f * static_cast<float>(top_k - slot % top_k);
  return logits;
}

std::vector<std::int32_t> random_orders(const MoeSpec& spec) {
  std::mt19937 random(1);
  std::vector<std::int32_t> order(static_cast<std::size_t>(spec.hidden)), orders;
  std::iota(order.begin(), order.end(), 0);
  for (int e = 0; e < spec.experts; ++e) {
    std::shuffle(order.begin(), order.end(), random);
    orders.insert(orders.end(), order.begin(), order.end());
  }
  return orders;
}

double flop(const MoeSpec& spec, int tokens) {
  const double width =
      static_cast<double>(spec.top_k) / spec.ep_size * spec.intermediate + spec.shared.intermediate;
  return 6.0 * tokens * spec.hidden * width;
}

std::uint64_t bytes_of(const ExpertWeights& layer, std::size_t experts) {
  return (experts + (layer.spec().shared.intermediate > 0 ? 1 : 0)) * layer.packed_expert_bytes();
}

void set_floor(BenchRow& row, const MoeSpec& spec) {
  row.us_read = static_cast<double>(row.weight_bytes) / row.read_gb_per_s / 1e3;
  row.us_multiply =
      row.multiply_gflop_per_s > 0 ? flop(spec, row.tokens) / row.multiply_gflop_per_s / 1e3 : 0;
  row.us_floor = std::max(row.us_read, row.us_multiply);
}

Result<SyntheticLayers> SyntheticLayers::create(const BenchShape& shape, SchemeId id, std::uint64_t bytes,
                                                const Device& device, const BenchLayers& like) {
  SyntheticLayers result;
  MoeSpec& spec = result.spec;
  spec.scheme = id;
  spec.hidden = shape.hidden;
  spec.intermediate = shape.intermediate;
  spec.experts = shape.experts;
  spec.top_k = shape.top_k;
  spec.ep_size = shape.ep_size;
  spec.act_dtype = like.dtype;
  spec.ordered_inputs = like.ordered_inputs;
  if (like.shared_expert) spec.shared = {.intermediate = shape.intermediate, .scheme = id};
  if (Status status = spec.validate(); !status.ok())
    return Status(status.code(), fmt::format("scheme {}: {}", scheme(id).name, status.message()));
  const Result<std::vector<QuantizedMatrix>> expert = random_expert(spec);
  if (!expert) return expert.status();
  const auto matrix = [&](int e, Projection projection) -> Result<QuantizedMatrix> {
    QuantizedMatrix matrix = (*expert)[static_cast<std::size_t>(projection)];
    if (like.static_scales && scheme(id).activation.may_be_static())
      matrix.input_scale = static_scale(scheme(id).activation, e);
    return matrix;
  };
  do {  // all experts are copies of one, in memory of their own
    LayerVectors vectors{.router = random_router(spec, result.layers.size())};
    if (spec.ordered_inputs) vectors.input_order = random_orders(spec);
    Result<ExpertWeights> layer = ExpertWeights::pack(spec, device, std::move(vectors), matrix, matrix);
    if (!layer) return layer.status();
    result.layers.push_back(std::move(*layer));
  } while (result.layers.front().packed_bytes() * result.layers.size() < bytes);
  return result;
}

SyntheticCalls::SyntheticCalls(const SyntheticLayers& layers, int tokens, BenchFrom from,
                               BenchRouting routing)
    : layers_(layers),
      tokens_(tokens),
      from_(from),
      routing_(routing),
      hidden_(static_cast<std::size_t>(tokens) * layers.spec.hidden),
      out_(hidden_.size()),
      weights_(static_cast<std::size_t>(tokens) * layers.spec.top_k,
               1.0f / static_cast<float>(layers.spec.top_k)),
      ids_(weights_.size()) {
  std::normal_distribution<float> normal;
  for (float& x : hidden_) x = normal(random_);
  draw();
}

void SyntheticCalls::draw() {
  random_routing(layers_.spec, routing_, random_, ids_);
  if (from_ == BenchFrom::logits) logits_ = random_logits(layers_.spec, random_, ids_);
}

void SyntheticCalls::next() {
  ++call_;
  draw();
}

Result<double> SyntheticCalls::run(const MoePlan& plan) {
  workspace_.resize(std::max(workspace_.size(), plan.workspace_bytes()));
  const auto start = std::chrono::steady_clock::now();
  const bool alone = from_ == BenchFrom::hidden, ids = from_ == BenchFrom::ids;
  const Status status = plan.run(layer(),
                                 {.hidden = {hidden_.data(), DType::f32, tokens_, layers_.spec.hidden},
                                  .router_logits = alone || ids ? nullptr : logits_.data(),
                                  .topk_ids = ids ? ids_.data() : nullptr,
                                  .topk_weights = ids ? weights_.data() : nullptr},
                                 {.hidden = {out_.data(), DType::f32, tokens_, layers_.spec.hidden},
                                  .topk_ids = alone ? ids_.data() : nullptr},
                                 workspace_);
  if (!status.ok()) return status;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::uint64_t SyntheticCalls::weight_bytes() const {
  return bytes_of(layer(), distinct(ids_));
}

}  // namespace gatefold
