#pragma once
/// \file
/// The oracle: every stage of an MoE layer in scalar double precision, straight from the descriptors of the
/// table. Slow, but a layer's slots are shared out over OpenMP's threads; tests compare every kernel with it.

#include <vector>

#include "moe/kernel.h"

namespace gatefold {

/// W [n, k]: (code - zero_point) * scale * tensor_scale without rounding.
std::vector<double> reference_dequantize(const QuantizedMatrix& matrix);

/// x [rows, k] rounded in place to an activation operand, row by row; one scale for all rows where the
/// operand has one per tensor. `static_scale` is the checkpoint's, or nullptr.
void reference_round(const Operand& operand, const TensorScale* static_scale, std::int64_t k,
                     std::vector<double>& x);

/// One layer in the canonical layout.
struct ReferenceFfn {
  QuantizedMatrix gate, up, down;
};
struct ReferenceWeights {
  LayerVectors vectors;
  std::vector<ReferenceFfn> routed;
  ReferenceFfn shared;
};

struct ReferenceResult {
  std::vector<double> hidden;  ///< [T, H]
  std::vector<std::int32_t> topk_ids;
  std::vector<double> topk_weights;
};

/// hidden [T, H]. Uses `logits` [T, E] if given, else `ids` and `weights` [T, k] if given, else the router.
struct ReferenceInputs {
  std::vector<double> hidden;
  std::vector<double> logits = {};
  std::vector<std::int32_t> topk_ids = {};
  std::vector<double> topk_weights = {};
  /// bf16 before it is rounded to the activation format; the shared expert's
  bool narrow_intermediate = false, narrow_shared = false;
};
ReferenceResult reference_moe(const MoeSpec& spec, const PlanOptions& options,
                              const ReferenceWeights& weights, const ReferenceInputs& inputs);

}  // namespace gatefold
