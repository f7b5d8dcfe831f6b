#include "cpu/layer.h"

#include <cmath>

namespace gatefold {

LayerBuffers::LayerBuffers(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout)
    : tokens(static_cast<std::size_t>(options.max_tokens)),
      slots(tokens * static_cast<std::size_t>(spec.top_k)),
      threads(static_cast<std::size_t>(options.threads)) {
  const auto experts = static_cast<std::size_t>(spec.experts);
  const auto hidden_k = static_cast<std::size_t>(padded(spec.hidden));
  const auto mid_k = static_cast<std::size_t>(padded(spec.intermediate));
  const auto shared_k = static_cast<std::size_t>(padded(spec.shared.intermediate));
  const std::size_t shared_tokens = shared_k != 0 ? tokens : 0;
  const Operand activation = effective_activation(spec.scheme, spec, options);
  may_be_static = activation.may_be_static();
  k = std::max({hidden_k, mid_k, shared_k});

  ids = {layout.add<std::int32_t>("topk_ids", slots)};
  weights = {layout.add<float>("topk_weights", slots)};
  offsets = {layout.add<std::int32_t>("expert_offsets", experts + 1)};
  active = {layout.add<std::int32_t>("active_experts", experts)};
  position = {layout.add<std::int32_t>("slot_positions", slots)};
  slot = {layout.add<std::int32_t>("sorted_slots", slots)};
  queues = {layout.add<std::int32_t>("expert_queues", kMostNodes + 1)};
  taken = {layout.add<std::int64_t>("taken_panels", std::size_t{2} * kMostNodes)};
  done = {layout.add<std::int64_t>("done_panels", experts + 1)};
  hidden = {layout.add<float>("hidden", tokens * hidden_k)};
  routed_mid = {layout.add<float>("routed_mid", slots * mid_k)};
  routed_out = {layout.add<float>("routed_out", slots * hidden_k)};
  shared_mid = {layout.add<float>("shared_mid", shared_tokens * shared_k)};
  shared_out = {layout.add<float>("shared_out", shared_tokens * hidden_k)};
  amax = {layout.add<float>("row_amax", slots)};
  routing = {layout.add<float>("routing", threads * 3 * experts)};
  router_rows = {layout.add<float>("router_rows", threads * 8 * hidden_k)};
  combined = static_cast<std::size_t>(spec.top_k) + 1;
  combined_rows = {layout.add<const float*>("combined_rows", threads * combined)};
  combined_weights = {layout.add<float>("combined_weights", threads * combined)};
  scales = {layout.add<float>("scales", threads * k)};
  zeros = {layout.add<float>("zero_points", threads * k)};
  codes = {layout.add<std::byte>("codes", threads * 2 * k)};
  ranges = {layout.add<GroupRange>("ranges", threads * k)};
}

namespace {
float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}
}  // namespace

float activate(const Activation& a, float gate, float up) {
  const float g = std::min(gate, a.limit);
  const float u = std::clamp(up, -a.limit, a.limit);
  switch (a.kind) {
    case Activation::Kind::geglu:
      return 0.5f * g * (1.0f + std::erf(g * 0.70710678f)) * u;
    case Activation::Kind::geglu_tanh:
      return 0.5f * g * (1.0f + std::tanh(0.79788456f * (g + 0.044715f * g * g * g))) * u;
    default:
      return g * sigmoid(a.alpha * g) * (u + a.beta);
  }
}

LayerThread::LayerThread(Isa isa, const MoeCall& call, const LayerBuffers& b)
    : call_(call),
      spec_(call.spec),
      state_(call.weights),
      b_(b),
      base_(call.workspace),
      thread_(static_cast<std::size_t>(omp_get_thread_num())),
      kernels_(row_kernels(isa)),
      inputs_(input_kernels(isa)),
      multiply_(multiply(isa)),
      tokens_(call.inputs.hidden.rows),
      slots_(tokens_ * spec_.top_k),
      hidden_k_(padded(spec_.hidden)),
      mid_k_(padded(spec_.intermediate)),
      shared_k_(padded(spec_.shared.intermediate)),
      routed_act_(effective_activation(spec_.scheme, spec_, call.options)),
      shared_act_(effective_activation(spec_.shared.scheme, spec_, call.options)),
      static_in_(state_.static_input_scales && b.may_be_static),
      queues_(call.tuning.queues == 0 ? numa_nodes() : std::clamp(call.tuning.queues, 1, kMostNodes)),
      home_(queues_ == numa_nodes() ? current_node() : static_cast<int>(thread_) % queues_),
      scratch_{b.codes.at(base_) + thread_ * 2 * b.k, b.ranges.at(base_) + thread_ * b.k,
               b.scales.at(base_) + thread_ * b.k, b.zeros.at(base_) + thread_ * b.k} {}

void LayerThread::load_and_route() {
  const MatrixView& in = call_.inputs.hidden;
  float* hidden = b_.hidden.at(base_);
#pragma omp for schedule(static) nowait
  for (std::int64_t t = 0; t < tokens_; ++t) {
    float* row = hidden + t * hidden_k_;
    kernels_.widen(in.dtype, in.data, t * spec_.hidden, spec_.hidden, row);
    std::fill(row + spec_.hidden, row + hidden_k_, 0.0f);
    route(t, row);
  }
}

void LayerThread::route(std::int64_t t, const float* row) {
  const std::int64_t top_k = spec_.top_k;
  std::int32_t* ids = b_.ids.at(base_) + t * top_k;
  float* weights = b_.weights.at(base_) + t * top_k;
  if (call_.inputs.topk_ids != nullptr) {
    std::copy_n(call_.inputs.topk_ids + t * top_k, top_k, ids);
    std::copy_n(call_.inputs.topk_weights + t * top_k, top_k, weights);
  } else {
    const LayerVectors& v = state_.vectors;
    float* scratch = b_.routing.at(base_) + thread_ * 3 * static_cast<std::size_t>(spec_.experts);
    const float* logits = call_.inputs.router_logits + t * spec_.experts;
    if (call_.inputs.router_logits == nullptr) {
      router_logits(row, scratch);
      logits = scratch;
    }
    route_token(spec_.routing, spec_.experts, spec_.top_k, logits,
                v.correction_bias.empty() ? nullptr : v.correction_bias.data(), scratch + spec_.experts, ids,
                weights);
  }
  if (call_.outputs.topk_ids != nullptr) std::copy_n(ids, top_k, call_.outputs.topk_ids + t * top_k);
  if (call_.outputs.topk_weights != nullptr)
    std::copy_n(weights, top_k, call_.outputs.topk_weights + t * top_k);
}

/// Router rows are not padded, so each is copied beside the zeros that the multiply wants.
void LayerThread::router_logits(const float* row, float* logits) {
  const LayerVectors& v = state_.vectors;
  constexpr std::int64_t step = 8;
  float* rows = b_.router_rows.at(base_) + thread_ * static_cast<std::size_t>(step * hidden_k_);
  for (std::int64_t e = 0; e < spec_.experts; e += step) {
    const std::int64_t count = std::min<std::int64_t>(step, spec_.experts - e);
    for (std::int64_t i = 0; i < count; ++i) {
      float* end = std::copy_n(v.router.data() + (e + i) * spec_.hidden, spec_.hidden, rows + i * hidden_k_);
      std::fill(end, rows + (i + 1) * hidden_k_, 0.0f);
    }
    multiply_(&row, 1, rows, count, hidden_k_, logits + e, spec_.experts);
  }
  for (std::int64_t e = 0; !v.router_bias.empty() && e < spec_.experts; ++e) logits[e] += v.router_bias[e];
}

void LayerThread::sort_slots() {
  const std::int32_t* ids = b_.ids.at(base_);
  std::int32_t* offsets = b_.offsets.at(base_);
  std::int32_t* active = b_.active.at(base_);
  std::fill_n(offsets, spec_.experts + 1, 0);
  const auto is_here = [&](std::int32_t id) { return id >= 0 && id < spec_.experts; };
  for (std::int64_t s = 0; s < slots_; ++s)
    if (is_here(ids[s])) ++offsets[ids[s] + 1];
  for (int e = 0; e < spec_.experts; ++e) {
    active[e] = offsets[e];  // next free position, until the slots are placed
    offsets[e + 1] += offsets[e];
    active[e] = offsets[e];
  }
  for (std::int64_t s = 0; s < slots_; ++s) {
    const std::int32_t position = is_here(ids[s]) ? active[ids[s]]++ : -1;
    b_.position.at(base_)[s] = position;
    if (position >= 0) b_.slot.at(base_)[position] = static_cast<std::int32_t>(s);
  }
  int used = 0;
  for (int queue = 0; queue < queues_; ++queue) {
    b_.queues.at(base_)[queue] = used;
    for (int e = queue; e < spec_.experts; e += queues_)
      if (offsets[e] < offsets[e + 1]) active[used++] = e;
  }
  b_.queues.at(base_)[queues_] = used;
  std::fill_n(b_.taken.at(base_), 2 * kMostNodes, 0);
  std::fill_n(b_.done.at(base_), spec_.experts + 1, 0);
}

float LayerThread::batch_amax(const float* x, std::int64_t rows, std::int64_t k, std::int64_t stride) {
  float* amax = b_.amax.at(base_);
#pragma omp for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row) amax[row] = row_amax(kernels_, x + row * stride, k);
  return rows == 0 ? 0.0f : *std::max_element(amax, amax + rows);
}

Job LayerThread::routed_job(int expert) const {
  const LayerVectors& v = state_.vectors;
  const std::int64_t first = b_.offsets.at(base_)[expert];
  const std::int64_t h = spec_.hidden, i = spec_.intermediate, e = expert;
  return {.ffn = &state_.routed[static_cast<std::size_t>(expert)],
          .routed = true,
          .first = first,
          .rows = b_.offsets.at(base_)[expert + 1] - first,
          .slot = static_in_ ? nullptr : b_.slot.at(base_) + first,
          .mid = b_.routed_mid.at(base_) + first * mid_k_,
          .out = b_.routed_out.at(base_) + first * hidden_k_,
          .done = b_.done.at(base_) + e,
          .gate_bias = spec_.bias ? v.gate_bias.data() + e * i : nullptr,
          .up_bias = spec_.bias ? v.up_bias.data() + e * i : nullptr,
          .down_bias = spec_.bias ? v.down_bias.data() + e * h : nullptr};
}

Job LayerThread::shared_job() const {
  return {.ffn = &state_.shared,
          .routed = false,
          .first = 0,
          .rows = tokens_,
          .slot = nullptr,
          .mid = b_.shared_mid.at(base_),
          .out = b_.shared_out.at(base_),
          .done = b_.done.at(base_) + spec_.experts,
          .gate_bias = nullptr,
          .up_bias = nullptr,
          .down_bias = nullptr};
}

void LayerThread::combine() {
  const MutableMatrixView& out = call_.outputs.hidden;
  const Format format = out.dtype == DType::f32   ? formats::f32
                        : out.dtype == DType::f16 ? formats::f16
                                                  : formats::bf16;
  const float** rows = b_.combined_rows.at(base_) + thread_ * b_.combined;
  float* weights = b_.combined_weights.at(base_) + thread_ * b_.combined;
#pragma omp for schedule(static) nowait
  for (std::int64_t t = 0; t < tokens_; ++t) {
    float* sum = b_.hidden.at(base_) + t * hidden_k_;
    std::int64_t count = 0;
    for (std::int64_t s = t * spec_.top_k; s < (t + 1) * spec_.top_k; ++s) {
      const std::int64_t position = b_.position.at(base_)[s];
      if (position < 0) continue;
      rows[count] = b_.routed_out.at(base_) + position * hidden_k_;
      weights[count++] = b_.weights.at(base_)[s];
    }
    if (shared_k_ != 0) {
      rows[count] = b_.shared_out.at(base_) + t * hidden_k_;
      weights[count++] = shared_weight(sum);
    }
    inputs_.combine(rows, weights, count, spec_.hidden, sum);
    const std::int64_t at = t * spec_.hidden;
    if (format == formats::f32) {
      std::copy_n(sum, spec_.hidden, static_cast<float*>(out.data) + at);
    } else {
      const float one = 1, none = 0;
      kernels_[format].encode(sum, spec_.hidden, spec_.hidden, &one, &none,
                              static_cast<std::byte*>(out.data) + at * 2);
    }
  }
}

float LayerThread::shared_weight(const float* hidden) const {
  if (!spec_.shared.gated) return 1.0f;
  float dot = 0;
  for (std::int64_t h = 0; h < spec_.hidden; ++h) dot += hidden[h] * state_.vectors.shared_gate[h];
  return sigmoid(dot);
}

}  // namespace gatefold
