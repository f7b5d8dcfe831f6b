#pragma once
/// \file
/// What an MoE layer computes, apart from its weights. Formulas: docs/design.md.

#include <cstdint>
#include <limits>
#include <string>

#include "gatefold/scheme.h"
#include "gatefold/status.h"
#include "gatefold/tensor.h"

namespace gatefold {

/// sqrt_softplus: the square root of log(1 + e^x) (DeepSeek-V4).
enum class Score : std::uint8_t { softmax, sigmoid, sqrt_softplus };
/// Score of a group of experts: its best expert (DeepSeek-V2), or the sum of its two best (DeepSeek-V3).
enum class GroupScore : std::uint8_t { max, top2_sum };

/// scores = score(logits); selection = scores + correction bias; keep `top_groups` of `groups` (if groups >
/// 1); ids = top_k of selection, ties to the lowest id, in descending order; weights = scores[ids], divided
/// by (their sum + epsilon) if renormalize, times scaling_factor.
struct Routing {
  Score score = Score::softmax;
  bool renormalize = true;
  int groups = 1;
  int top_groups = 1;
  GroupScore group_score = GroupScore::top2_sum;
  bool correction_bias = false;  ///< the weights hold a bias [E] that is used for the selection only
  float scaling_factor = 1.0f;
  float epsilon = 0.0f;
};

/// y = g * sigmoid(alpha * g) * (u + beta) for swiglu, gelu(g) * u for geglu (erf) and geglu_tanh; before
/// that g = min(g, limit) and u = clamp(u, -limit, limit). SiLU * up: the defaults. gpt-oss: alpha 1.702,
/// beta 1, limit 7.
struct Activation {
  enum class Kind : std::uint8_t { swiglu, geglu, geglu_tanh };
  Kind kind = Kind::swiglu;
  float alpha = 1.0f;
  float beta = 0.0f;
  float limit = std::numeric_limits<float>::infinity();
};

/// An expert that every token visits: out += [sigmoid(hidden . gate)] * shared(hidden). The routed sum's
/// scaling factor does not apply to it.
struct SharedExpert {
  int intermediate = 0;  ///< 0: there is none
  bool gated = false;    ///< scaled by sigmoid(hidden . gate), one scalar per token (Qwen2-MoE)
  SchemeId scheme = SchemeId::bf16;
};

struct MoeSpec {
  SchemeId scheme = SchemeId::bf16;  ///< of the routed experts
  int experts = 0;
  int top_k = 0;
  /// Of how many equal parts of an expert-parallel layer these are the experts. Above 1, calls give ids, of
  /// which those of this part are 0..experts-1 and those of others anything outside, such as -1: their slots
  /// add nothing.
  int ep_size = 1;
  int hidden = 0;        ///< H
  int intermediate = 0;  ///< I, of one routed expert
  Activation activation;
  Routing routing;
  SharedExpert shared;
  bool bias = false;            ///< gate, up and down have biases (gpt-oss)
  bool ordered_inputs = false;  ///< each expert takes its inputs in an order of its own (GPTQ's act-order)
  ScaleRule activation_rule = ScaleRule::standard;  ///< of quantized activations; other ones on CPUs only
  DType act_dtype = DType::bf16;                    ///< the model's 16-bit type: bf16 or f16

  /// Errors: a size <= 0, top_k > experts * ep_size, groups that do not divide, K that the scheme cannot
  /// store, ...
  Status validate() const;
};

}  // namespace gatefold
