#pragma once
/// \file
/// A text on its way through a model, layer by layer: all tokens through one before the next.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/calibrate_layer.h"
#include "model/decoder_state.h"
#include "model/step.h"

namespace gatefold {

/// Cut into windows, whose tokens attend to each other; a remainder is dropped.
class TextStream {
 public:
  TextStream(const Decoder::State& model, std::span<const std::int32_t> tokens, int window);

  /// Where the text is: at first the embeddings.
  Stream& stream() { return stream_; }

  /// Through the attention of a layer and, where there are no experts, its MLP.
  Status advance(int layer);
  /// Through the experts of a layer, as the model has them.
  Status pass_experts(int layer);
  /// Behind the last layer: logits of tokens first, first + 1, ... of the text.
  void logits(const std::function<void(std::int64_t first, std::int64_t rows, const float* logits)>& visit);

 private:
  template <class Function>
  void for_each_window(const Function& f);

  const Decoder::State* model_;
  std::int64_t hidden_, window_;
  Sequence::State sequence_;
  Stream stream_;
};

}  // namespace gatefold
