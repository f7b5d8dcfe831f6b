#include "model/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "format/row_kernels.h"
#include "model/softmax.h"

namespace gatefold {
namespace {

constexpr std::int64_t logits_at_once = std::int64_t{1} << 22;

// y = x / sqrt(mean(x^2) + eps) * weight. May be in place.
void rms_norm(const float* x, const std::vector<float>& weight, double eps, float* y) {
  constexpr std::size_t lanes = 16;
  const std::size_t size = weight.size();
  float sums[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= size; i += lanes)
    for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
  float sum = 0;
  for (; i < size; ++i) sum += x[i] * x[i];
  for (const float value : sums) sum += value;
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + static_cast<float>(eps));
  for (i = 0; i < size; ++i) y[i] = x[i] * factor * weight[i];
}

float silu(float x) {
  return x / (1.0f + std::exp(-x));
}

}  // namespace

Step::Step(const Decoder::State& model, Sequence::State& sequence, std::int64_t tokens,
           std::int64_t final_length)
    : model_(model),
      config_(model.checkpoint.config()),
      sequence_(sequence),
      tokens_(tokens),
      kv_width_(static_cast<std::int64_t>(config_.kv_heads) * config_.head_dim),
      threads_(model.options.threads) {
  const std::int64_t d = config_.head_dim;
  for (auto* buffer : {&sequence.residual, &sequence.normed, &sequence.output})
    buffer->resize(tokens * config_.hidden);
  for (auto* buffer : {&sequence.queries, &sequence.attended}) buffer->resize(tokens * config_.heads * d);
  for (auto* buffer : {&sequence.cos, &sequence.sin}) buffer->resize(tokens * d / 2);
  model.rope.angles(sequence.length, tokens, final_length, sequence.cos.data(), sequence.sin.data());
}

void Step::embed(const std::int32_t* ids) {
  for (std::int64_t t = 0; t < tokens_; ++t)
    row_kernels().widen(model_.embedding.dtype, model_.embedding.data,
                        static_cast<std::int64_t>(ids[t]) * config_.hidden, config_.hidden,
                        sequence_.residual.data() + t * config_.hidden);
}

/// Room for the step's tokens at the end of the cache; where they go, as f32, is returned.
float* Step::make_room(Sequence::State::Rows& rows, std::vector<float>& scratch, bool fp8) {
  const auto before = static_cast<std::size_t>(sequence_.length * kv_width_);
  const std::int64_t length = sequence_.length + tokens_;
  const auto padded = static_cast<std::size_t>((length + key_block - 1) / key_block * key_block * kv_width_);
  // First back to what is valid, so that all behind it is zero.
  if (fp8) {
    rows.codes.resize(before);
    rows.codes.resize(padded);
    scratch.resize(static_cast<std::size_t>(tokens_ * kv_width_));
    return scratch.data();
  }
  rows.values.resize(before);
  rows.values.resize(padded);
  return rows.values.data() + before;
}

void Step::store_codes(const float* x, float scale, Sequence::State::Rows& rows) const {
  const float zero = 0;
  row_kernels()[formats::e4m3].encode(x, tokens_ * kv_width_, tokens_ * kv_width_, &scale, &zero,
                                      rows.codes.data() + sequence_.length * kv_width_);
}

void Step::attend(const DecoderLayer& layer, int index, const ForwardHooks& hooks) {
  Sequence::State::Cache& cache = sequence_.layers[index];
  const bool fp8 = layer.kv_scales.has_value();
  float* const keys = make_room(cache.keys, sequence_.keys, fp8);
  float* const values = make_room(cache.values, sequence_.values, fp8);
  normalize(layer.attention_norm);
  multiply(layer.q, sequence_.normed, sequence_.queries.data());
  multiply(layer.k, sequence_.normed, keys);
  multiply(layer.v, sequence_.normed, values);
  rotate_heads(sequence_.queries.data(), config_.heads, layer.q_norm);
  rotate_heads(keys, config_.kv_heads, layer.k_norm);
  if (hooks.kv)
    hooks.kv(index, {keys, DType::f32, tokens_, kv_width_}, {values, DType::f32, tokens_, kv_width_});
  const KvScales scales = layer.kv_scales.value_or(KvScales{});
  if (fp8) {
    store_codes(keys, scales.key, cache.keys);
    store_codes(values, scales.value, cache.values);
  }
  const auto cached = [&](const Sequence::State::Rows& rows, float scale) {
    return CachedRows{fp8 ? nullptr : rows.values.data(), rows.codes.data(), scale};
  };
  const int window = config_.slides[index] ? config_.sliding_window : 0;
  attention({config_.heads, config_.kv_heads, config_.head_dim, window},
            {sequence_.queries.data(), cached(cache.keys, scales.key), cached(cache.values, scales.value),
             sequence_.length, tokens_},
            sequence_.attended.data(), threads_);
  multiply(layer.o, sequence_.attended, sequence_.output.data());
  add_output();
}

Status Step::run_moe(const DecoderLayer& layer, const MoeInputs& inputs, const MoeOutputs& outputs) {
  sequence_.moe.resize(model_.plans.size());
  const MoePlan& plan = model_.plans[layer.plan];
  std::optional<HostCalls>& calls = sequence_.moe[layer.plan];
  if (!calls) {
    Result<HostCalls> created = HostCalls::create(plan);
    if (!created) return created.status();
    calls = std::move(*created);
  }
  return calls->run(plan, *layer.experts, inputs, outputs);
}

Status Step::mlp(const DecoderLayer& layer, int index, std::int64_t first, const ForwardHooks& hooks) {
  normalize(layer.mlp_norm);
  if (layer.experts) {
    const MatrixView input{sequence_.normed.data(), DType::f32, tokens_, config_.hidden};
    const MutableMatrixView output{sequence_.output.data(), DType::f32, tokens_, config_.hidden};
    MoeInputs inputs;
    inputs.hidden = input;
    MoeOutputs outputs;
    outputs.hidden = output;
    if (Status status = run_moe(layer, inputs, outputs); !status.ok())
      return {status.code(), fmt::format("layer {}: {}", index, status.message())};
    if (hooks.moe) hooks.moe(index, first, input, {output.data, DType::f32, tokens_, config_.hidden});
  } else {
    for (auto* buffer : {&sequence_.gate, &sequence_.up})
      buffer->resize(tokens_ * config_.dense_intermediate);
    multiply(layer.gate, sequence_.normed, sequence_.gate.data());
    multiply(layer.up, sequence_.normed, sequence_.up.data());
    for (std::size_t i = 0; i < sequence_.gate.size(); ++i)
      sequence_.gate[i] = silu(sequence_.gate[i]) * sequence_.up[i];
    multiply(layer.down, sequence_.gate, sequence_.output.data());
  }
  add_output();
  return {};
}

void Step::logits(std::int64_t from, std::int64_t first, const ForwardHooks& hooks) {
  normalize(model_.final_norm);
  const std::int64_t at_once = std::clamp<std::int64_t>(logits_at_once / config_.vocab, 16, tokens_ + 16);
  sequence_.logits.resize(std::min(at_once, tokens_) * config_.vocab);
  for (std::int64_t t = from; t < tokens_; t += at_once) {
    const std::int64_t rows = std::min(at_once, tokens_ - t);
    apply(model_.head, sequence_.normed.data() + t * config_.hidden, sequence_.length + t, rows,
          sequence_.logits.data(), threads_);
    hooks.logits(first + t, rows, sequence_.logits.data());
  }
}

void Step::normalize(const std::vector<float>& weight) {
#pragma omp parallel for num_threads(threads_) if (tokens_ > 16)
  for (std::int64_t t = 0; t < tokens_; ++t)
    rms_norm(sequence_.residual.data() + t * config_.hidden, weight, config_.rms_eps,
             sequence_.normed.data() + t * config_.hidden);
}

void Step::rotate_heads(float* x, int heads, const std::vector<float>& norm) {
  const int d = config_.head_dim;
#pragma omp parallel for num_threads(threads_) if (tokens_ > 16)
  for (std::int64_t t = 0; t < tokens_; ++t) {
    for (int head = 0; head < heads; ++head) {
      float* at = x + (t * heads + head) * d;
      if (!norm.empty()) rms_norm(at, norm, config_.rms_eps, at);
      rotate(at, d, sequence_.cos.data() + t * d / 2, sequence_.sin.data() + t * d / 2);
    }
  }
}

void Step::multiply(const DenseLayer& layer, const std::vector<float>& x, float* y) {
  apply(layer, x.data(), sequence_.length, tokens_, y, threads_);
}

void Step::add_output() {
  for (std::size_t i = 0; i < sequence_.residual.size(); ++i) sequence_.residual[i] += sequence_.output[i];
}

}  // namespace gatefold
