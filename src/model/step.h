#pragma once
/// \file
/// Some consecutive tokens of a sequence on their way through the layers.

#include <cstdint>
#include <vector>

#include "gatefold/decoder.h"
#include "model/decoder_state.h"

namespace gatefold {

/// Works on the sequence's scratch: `residual` is what one layer hands to the next.
class Step {
 public:
  /// `tokens` more tokens of the sequence, which will have `final_length` of them after the whole call.
  Step(const Decoder::State& model, Sequence::State& sequence, std::int64_t tokens,
       std::int64_t final_length);

  void embed(const std::int32_t* ids);
  /// Attention, added to the residual. `index` is for the hook and the cache.
  void attend(const DecoderLayer& layer, int index, const ForwardHooks& hooks);
  /// Sets `normed`, what the MLP or the MoE layer reads.
  void normalize(const std::vector<float>& weight);
  /// The MLP or MoE layer, added to the residual. `index` and `first` (of the step within the call) are for
  /// the hook.
  Status mlp(const DecoderLayer& layer, int index, std::int64_t first, const ForwardHooks& hooks);
  /// Of the step's tokens from `from` on; `first` is the step's first token within the call.
  void logits(std::int64_t from, std::int64_t first, const ForwardHooks& hooks);

 private:
  Status run_moe(const DecoderLayer& layer, const MoeInputs& inputs, const MoeOutputs& outputs);
  float* make_room(Sequence::State::Rows& rows, std::vector<float>& scratch, bool fp8);
  void store_codes(const float* x, float scale, Sequence::State::Rows& rows) const;
  void rotate_heads(float* x, int heads, const std::vector<float>& norm);
  void multiply(const DenseLayer& layer, const std::vector<float>& x, float* y);
  void add_output();

  const Decoder::State& model_;
  const ModelConfig& config_;
  Sequence::State& sequence_;
  const std::int64_t tokens_;
  const std::int64_t kv_width_;
  const int threads_;
};

}  // namespace gatefold
