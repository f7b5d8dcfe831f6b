#pragma once
/// \file
/// What an ExpertWeights handle holds.

#include <vector>

#include "gatefold/moe.h"
#include "moe/arena.h"

namespace gatefold {

struct PackedMatrix {
  SchemeId scheme = SchemeId::bf16;
  std::int64_t n = 0, k = 0;
  Format scale_format;
  TensorScale tensor_scale;
  std::optional<TensorScale> input_scale;
  const std::byte* data = nullptr;
};

/// How matrices lie in memory. Kernels name the layout that they read.
struct WeightLayout {
  std::string_view name;
  /// Bytes of an [n, k] matrix whose scales are stored in `scale_format`.
  std::size_t (*bytes)(SchemeId scheme, Format scale_format, std::int64_t n, std::int64_t k);
  /// Packs `count` matrices of one shape, which are multiplied by the same inputs, into the sum of their
  /// bytes, and sets where each begins. `out` is zeroed and 64-byte aligned.
  void (*pack)(const QuantizedMatrix* matrices, int count, std::byte* out, PackedMatrix* packed);
};

/// One feed-forward network: gate and up [I, H], down [H, I].
struct Ffn {
  PackedMatrix gate, up, down;
};

struct ExpertWeights::State {
  MoeSpec spec;
  Device device;
  LayerVectors vectors;
  const WeightLayout* layout = nullptr;
  Arena arena;
  std::size_t expert_bytes = 0;  ///< of one routed expert
  std::vector<Ffn> routed;
  Ffn shared;
  bool static_input_scales = false;  ///< the checkpoint gives the activation scales
};

}  // namespace gatefold
