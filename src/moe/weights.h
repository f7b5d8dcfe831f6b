#pragma once
/// \file
/// What an ExpertWeights handle holds.

#include <vector>

#include "gatefold/moe.h"

namespace gatefold {

/// One feed-forward network: gate and up [I, H], down [H, I].
struct Ffn {
  QuantizedMatrix gate, up, down;
};

struct ExpertWeights::State {
  MoeSpec spec;
  Device device;
  LayerVectors vectors;
  std::string_view layout;  ///< how the matrices are packed; kernels name the one they read
  std::vector<Ffn> routed;
  Ffn shared;
  bool static_input_scales = false;  ///< the checkpoint gives the activation scales
};

}  // namespace gatefold
