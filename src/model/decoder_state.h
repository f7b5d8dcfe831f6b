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
  std::optional<KvScales> kv_scales;     // of a KV cache of e4m3; none: f32
  std::optional<ExpertWeights> experts;  // of an MoE layer
  std::size_t plan = 0;                  // that runs them
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
  ModelSchemes schemes;        // that an unquantized checkpoint is brought to on load
  std::vector<MoePlan> plans;  // one for all layers that differ in nothing but weights
};

/// Of the routed experts of one layer, as a checkpoint stores the scheme; and how many weights that is.
std::uint64_t expert_bytes(const MoeSpec& spec, SchemeId id);
std::uint64_t expert_weights(const MoeSpec& spec);

/// Tokens are bytes.
bool is_byte_level(const Checkpoint& checkpoint);

/// All but the routed experts and the plan that runs them.
Result<std::shared_ptr<Decoder::State>> load_dense(const Checkpoint& checkpoint,
                                                   const DecoderOptions& options);

/// A whole model.
Result<std::shared_ptr<Decoder::State>> load_state(const Checkpoint& checkpoint,
                                                   const DecoderOptions& options);

struct Sequence::State {
  // [length, rounded up to key_block][kv_heads * head_dim]
  struct Rows {
    std::vector<float> values;     // or
    std::vector<std::byte> codes;  // e4m3, times the layer's scale
  };
  struct Cache {
    Rows keys, values;
  };

  const Decoder::State* owner = nullptr;
  std::int64_t length = 0;
  std::vector<Cache> layers;

  // Scratch of one step; all [tokens of the step, ...].
  std::vector<float> residual, normed, output;  // hidden
  std::vector<float> queries, attended;         // heads * head_dim
  std::vector<float> keys, values;              // kv_heads * head_dim; where the cache has codes
  std::vector<float> gate, up;                  // dense_intermediate
  std::vector<float> cos, sin;                  // head_dim / 2
  std::vector<float> logits;
  std::vector<std::optional<HostCalls>> moe;  // by plan, with its workspace
};

}  // namespace gatefold
