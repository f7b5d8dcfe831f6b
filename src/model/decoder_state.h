#pragma once
/// \file
/// What a decoder and a sequence hold.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gatefold/decoder.h"
#include "model/attention.h"
#include "model/linear.h"
#include "model/rope.h"
#include "moe/host_calls.h"

namespace gatefold {

struct DecoderLayer {
  std::vector<float> attention_norm, mlp_norm;  // [hidden]
  std::vector<float> q_norm, k_norm;            // [head_dim]; empty: the family has none
  DenseLayer q, k, v, o;
  std::optional<ExpertWeights> experts;  // of an MoE layer
  DenseLayer gate, up, down;             // of a dense one
};

struct Decoder::State {
  Checkpoint checkpoint;  // keeps the mapping that the layers view
  DecoderOptions options;
  bool byte_level = false;
  MatrixView embedding;  // [vocab, hidden]
  std::vector<DecoderLayer> layers;
  std::vector<float> final_norm;
  DenseLayer head;  // [vocab, hidden]
  Rope rope;
  std::optional<MoePlan> plan;  // none: a model without MoE layers
};

/// Tokens are bytes.
bool is_byte_level(const Checkpoint& checkpoint);

/// All but the routed experts and the plan that runs them.
Result<std::shared_ptr<Decoder::State>> load_dense(const Checkpoint& checkpoint,
                                                   const DecoderOptions& options);

struct Sequence::State {
  struct Cache {
    std::vector<float> keys, values;  // [length, rounded up to key_block][kv_heads * head_dim]
  };

  const Decoder::State* owner = nullptr;
  std::int64_t length = 0;
  std::vector<Cache> layers;

  // Scratch of one step; all [tokens of the step, ...].
  std::vector<float> residual, normed, output;  // hidden
  std::vector<float> queries, attended;         // heads * head_dim
  std::vector<float> gate, up;                  // dense_intermediate
  std::vector<float> cos, sin;                  // head_dim / 2
  std::vector<float> logits;
  std::optional<HostCalls> moe;  // with the plan's workspace
};

}  // namespace gatefold
