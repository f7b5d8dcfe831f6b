#include "gatefold/decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "format/row_kernels.h"
#include "model/decoder_state.h"
#include "model/softmax.h"

namespace gatefold {
namespace {

constexpr std::int64_t max_length = std::int64_t{1} << 24;  // positions are f32 in RoPE
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

// Some tokens of one `forward`, through all layers.
class Step {
 public:
  Step(const Decoder::State& model, Sequence::State& sequence, std::int64_t tokens, std::int64_t final_length)
      : model_(model),
        config_(model.checkpoint.config()),
        sequence_(sequence),
        tokens_(tokens),
        threads_(model.options.threads) {
    const std::int64_t d = config_.head_dim;
    for (auto* buffer : {&sequence.residual, &sequence.normed, &sequence.output})
      buffer->resize(tokens * config_.hidden);
    for (auto* buffer : {&sequence.queries, &sequence.attended}) buffer->resize(tokens * config_.heads * d);
    for (auto* buffer : {&sequence.cos, &sequence.sin}) buffer->resize(tokens * d / 2);
    model.rope.angles(sequence.length, tokens, final_length, sequence.cos.data(), sequence.sin.data());
  }

  void embed(const std::int32_t* ids) {
    for (std::int64_t t = 0; t < tokens_; ++t)
      row_kernels().widen(model_.embedding.dtype, model_.embedding.data,
                          static_cast<std::int64_t>(ids[t]) * config_.hidden, config_.hidden,
                          sequence_.residual.data() + t * config_.hidden);
  }

  void attend(const DecoderLayer& layer, Sequence::State::Cache& cache) {
    const std::int64_t width = static_cast<std::int64_t>(config_.kv_heads) * config_.head_dim;
    const std::int64_t length = sequence_.length + tokens_;
    // First back to what is valid, so that all behind it is zero.
    for (auto* buffer : {&cache.keys, &cache.values}) {
      buffer->resize(sequence_.length * width);
      buffer->resize((length + key_block - 1) / key_block * key_block * width);
    }
    float* keys = cache.keys.data() + sequence_.length * width;
    normalize(layer.attention_norm);
    multiply(layer.q, sequence_.normed, sequence_.queries.data());
    multiply(layer.k, sequence_.normed, keys);
    multiply(layer.v, sequence_.normed, cache.values.data() + sequence_.length * width);
    rotate_heads(sequence_.queries.data(), config_.heads, layer.q_norm);
    rotate_heads(keys, config_.kv_heads, layer.k_norm);
    attention({config_.heads, config_.kv_heads, config_.head_dim, config_.sliding_window},
              {sequence_.queries.data(), cache.keys.data(), cache.values.data(), sequence_.length, tokens_},
              sequence_.attended.data(), threads_);
    multiply(layer.o, sequence_.attended, sequence_.output.data());
    add_output();
  }

  Status run_moe(const ExpertWeights& experts, const MoeInputs& inputs, const MoeOutputs& outputs) {
    if (!sequence_.moe) {
      Result<HostCalls> calls = HostCalls::create(*model_.plan);
      if (!calls) return calls.status();
      sequence_.moe = std::move(*calls);
    }
    return sequence_.moe->run(*model_.plan, experts, inputs, outputs);
  }

  // `index` and `first` (of the step within the call) are for the hook.
  Status mlp(const DecoderLayer& layer, int index, std::int64_t first, const ForwardHooks& hooks) {
    normalize(layer.mlp_norm);
    if (layer.experts) {
      const MatrixView input{sequence_.normed.data(), DType::f32, tokens_, config_.hidden};
      const MutableMatrixView output{sequence_.output.data(), DType::f32, tokens_, config_.hidden};
      MoeInputs inputs;
      inputs.hidden = input;
      MoeOutputs outputs;
      outputs.hidden = output;
      if (Status status = run_moe(*layer.experts, inputs, outputs); !status.ok())
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

  // Of the step's tokens from `from` on; `first` is the step's first token within the call.
  void logits(std::int64_t from, std::int64_t first, const ForwardHooks& hooks) {
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

 private:
  void normalize(const std::vector<float>& weight) {
#pragma omp parallel for num_threads(threads_) if (tokens_ > 16)
    for (std::int64_t t = 0; t < tokens_; ++t)
      rms_norm(sequence_.residual.data() + t * config_.hidden, weight, config_.rms_eps,
               sequence_.normed.data() + t * config_.hidden);
  }

  void rotate_heads(float* x, int heads, const std::vector<float>& norm) {
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

  void multiply(const DenseLayer& layer, const std::vector<float>& x, float* y) {
    apply(layer, x.data(), sequence_.length, tokens_, y, threads_);
  }

  void add_output() {
    for (std::size_t i = 0; i < sequence_.residual.size(); ++i) sequence_.residual[i] += sequence_.output[i];
  }

  const Decoder::State& model_;
  const ModelConfig& config_;
  Sequence::State& sequence_;
  const std::int64_t tokens_;
  const int threads_;
};

}  // namespace

void Sequence::Delete::operator()(State* state) const {
  delete state;
}
std::int64_t Sequence::length() const {
  return state_->length;
}
void Sequence::clear() {
  state_->length = 0;
}

const ModelConfig& Decoder::config() const {
  return state_->checkpoint.config();
}
SchemeId Decoder::scheme() const {
  for (const DecoderLayer& layer : state_->layers)
    if (layer.experts) return layer.experts->spec().scheme;
  return config().moe.scheme;
}
int Decoder::threads() const {
  return state_->options.threads;
}
bool Decoder::byte_level() const {
  return state_->byte_level;
}
std::uint64_t Decoder::expert_bytes() const {
  const MoeSpec& spec = config().moe;
  const Operand& weight = gatefold::scheme(scheme()).weight;
  const std::size_t expert =
      2 * quantized_layout(weight, weight.scale, spec.intermediate, spec.hidden).total() +
      quantized_layout(weight, weight.scale, spec.hidden, spec.intermediate).total();
  std::uint64_t bytes = 0;
  for (const DecoderLayer& layer : state_->layers)
    if (layer.experts) bytes += static_cast<std::uint64_t>(spec.experts) * expert;
  return bytes;
}
std::uint64_t Decoder::expert_weights() const {
  const MoeSpec& spec = config().moe;
  std::uint64_t weights = 0;
  for (const DecoderLayer& layer : state_->layers)
    if (layer.experts) weights += std::uint64_t{3} * spec.experts * spec.intermediate * spec.hidden;
  return weights;
}
std::string_view Decoder::kernel_name() const {
  return state_->plan ? state_->plan->kernel_name() : "";
}

Sequence Decoder::new_sequence() const {
  auto* sequence = new Sequence::State;
  sequence->owner = state_.get();
  sequence->layers.resize(state_->layers.size());
  return Sequence(std::unique_ptr<Sequence::State, Sequence::Delete>(sequence));
}

Status Decoder::forward(std::span<const std::int32_t> tokens, Sequence& sequence,
                        std::span<float> logits) const {
  const auto vocab = static_cast<std::size_t>(config().vocab);
  const std::size_t rows = logits.size() / vocab;
  if (logits.size() % vocab != 0 || rows > tokens.size())
    return {Code::invalid_argument, fmt::format("logits has room for {} numbers: not a multiple of vocab {} "
                                                "up to {} tokens",
                                                logits.size(), vocab, tokens.size())};
  const auto first = static_cast<std::int64_t>(tokens.size() - rows);
  ForwardHooks hooks;
  hooks.logits = [&](std::int64_t token, std::int64_t count, const float* values) {
    std::copy_n(values, count * vocab, logits.data() + (token - first) * vocab);
  };
  return run(tokens, sequence, first, hooks);
}

Status Decoder::forward(std::span<const std::int32_t> tokens, Sequence& sequence,
                        const ForwardHooks& hooks) const {
  return run(tokens, sequence, hooks.logits ? 0 : static_cast<std::int64_t>(tokens.size()), hooks);
}

Status Decoder::run(std::span<const std::int32_t> tokens, Sequence& sequence, std::int64_t first_logits,
                    const ForwardHooks& hooks) const {
  Sequence::State& state = *sequence.state_;
  if (state.owner != state_.get())
    return {Code::invalid_argument, "the sequence was made by another decoder"};
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= config().vocab)
      return {Code::invalid_argument,
              fmt::format("token {} is {}: not in [0, {})", i, tokens[i], config().vocab)};
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::int64_t before = state.length;
  if (count > max_length - before)
    return {Code::invalid_argument,
            fmt::format("{} tokens after {}: a sequence has at most {}", count, before, max_length)};

  for (std::int64_t first = 0; first < count; first += state_->options.max_tokens) {
    const std::int64_t size = std::min<std::int64_t>(count - first, state_->options.max_tokens);
    Step step(*state_, state, size, before + count);
    step.embed(tokens.data() + first);
    for (int i = 0; i < config().layers; ++i) {
      step.attend(state_->layers[i], state.layers[i]);
      if (Status status = step.mlp(state_->layers[i], i, first, hooks); !status.ok()) {
        state.length = before;
        return status;
      }
    }
    if (first_logits < first + size)
      step.logits(std::max<std::int64_t>(first_logits - first, 0), first, hooks);
    state.length += size;
  }
  return {};
}

}  // namespace gatefold
