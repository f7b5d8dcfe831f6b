#include "gatefold/decoder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "model/step.h"

namespace gatefold {
namespace {

constexpr std::int64_t max_length = std::int64_t{1} << 24;  // positions are f32 in RoPE

}  // namespace

std::uint64_t expert_bytes(const MoeSpec& spec, SchemeId id) {
  const Operand& weight = scheme(id).weight;
  const std::size_t expert =
      2 * quantized_layout(weight, weight.scale, spec.intermediate, spec.hidden).total() +
      quantized_layout(weight, weight.scale, spec.hidden, spec.intermediate).total();
  return static_cast<std::uint64_t>(spec.experts) * expert;
}
std::uint64_t expert_weights(const MoeSpec& spec) {
  return std::uint64_t{3} * spec.experts * spec.intermediate * spec.hidden;
}

void Sequence::Delete::operator()(State* state) const {
  delete state;
}
std::int64_t Sequence::length() const {
  return state_->length;
}
void Sequence::clear() {
  state_->length = 0;
}

const Checkpoint& Decoder::checkpoint() const {
  return state_->checkpoint;
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
std::string Decoder::schemes() const {
  std::vector<std::string_view> names;
  for (const DecoderLayer& layer : state_->layers) {
    if (!layer.experts) continue;
    const std::string_view name = gatefold::scheme(layer.experts->spec().scheme).name;
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return fmt::format("{}", fmt::join(names, " and "));
}
std::uint64_t Decoder::expert_bytes() const {
  std::uint64_t bytes = 0;
  for (const DecoderLayer& layer : state_->layers)
    if (layer.experts) bytes += gatefold::expert_bytes(config().moe, layer.experts->spec().scheme);
  return bytes;
}
std::uint64_t Decoder::expert_weights() const {
  const MoeSpec& spec = config().moe;
  std::uint64_t weights = 0;
  for (const DecoderLayer& layer : state_->layers)
    if (layer.experts) weights += gatefold::expert_weights(spec);
  return weights;
}
std::string_view Decoder::kernel_name() const {
  return state_->plans.empty() ? "" : state_->plans.front().kernel_name();
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
      step.attend(state_->layers[i], i, hooks);
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
