#include "model/text_stream.h"

#include <algorithm>

namespace gatefold {

TextStream::TextStream(const Decoder::State& model, std::span<const std::int32_t> tokens, int window)
    : model_(&model), hidden_(model.checkpoint.config().hidden), window_(window) {
  sequence_.layers.resize(model_->layers.size());
  const auto size =
      tokens.size() / static_cast<std::size_t>(window) * static_cast<std::size_t>(window * hidden_);
  stream_.residual.resize(size);
  stream_.normed.resize(size);
  for_each_window([&](Step& step, std::size_t at) {
    step.embed(tokens.data() + static_cast<std::int64_t>(at) / hidden_);
    std::copy_n(sequence_.residual.data(), window_ * hidden_, stream_.residual.data() + at);
  });
}

template <class Function>
void TextStream::for_each_window(const Function& f) {
  for (std::size_t at = 0; at < stream_.residual.size(); at += static_cast<std::size_t>(window_ * hidden_)) {
    sequence_.length = 0;
    Step step(*model_, sequence_, window_, window_);
    std::copy_n(stream_.residual.data() + at, window_ * hidden_, sequence_.residual.data());
    f(step, at);
  }
}

Status TextStream::advance(int layer) {
  const bool dense = !model_->checkpoint.config().is_moe[static_cast<std::size_t>(layer)];
  Status status;
  for_each_window([&](Step& step, std::size_t at) {
    step.attend(model_->layers[layer], layer, {});
    step.normalize(model_->layers[layer].mlp_norm);
    std::copy_n(sequence_.normed.data(), window_ * hidden_, stream_.normed.data() + at);
    if (dense && status.ok()) status = step.mlp(model_->layers[layer], layer, 0, {});
    std::copy_n(sequence_.residual.data(), window_ * hidden_, stream_.residual.data() + at);
  });
  sequence_.layers[layer] = {};
  return status;
}

Status TextStream::pass_experts(int layer) {
  Status status;
  for_each_window([&](Step& step, std::size_t at) {
    if (status.ok()) status = step.mlp(model_->layers[layer], layer, 0, {});
    std::copy_n(sequence_.residual.data(), window_ * hidden_, stream_.residual.data() + at);
  });
  return status;
}

void TextStream::logits(
    const std::function<void(std::int64_t first, std::int64_t rows, const float* logits)>& visit) {
  for_each_window([&](Step& step, std::size_t at) {
    ForwardHooks hooks;
    hooks.logits = visit;
    step.logits(0, static_cast<std::int64_t>(at) / hidden_, hooks);
  });
}

}  // namespace gatefold
