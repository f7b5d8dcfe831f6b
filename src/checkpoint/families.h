#pragma once
/// \file
/// A model family: what its config says in its own way, and what its layers are called. How the weights are
/// stored under these names is a convention's business (convention.h).

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/convention.h"
#include "checkpoint/fields.h"
#include "gatefold/checkpoint.h"

namespace gatefold {

/// To add a family: a row in families.cpp.
struct Family {
  std::string_view model_type;
  std::string_view block;            ///< the MoE block in a layer: "mlp"
  std::string_view projections[3];   ///< in an expert, by Projection
  std::string_view shared;           ///< the shared expert in the block; empty if the family has none
  std::string_view router;           ///< in the block: "gate"
  std::string_view correction_bias;  ///< in the block: what the selection of experts adds
  /// Fused gate_up_proj: rows of gate and up take turns, and unquantized matrices are transposed (gpt-oss).
  bool interleaved = false;
  bool has_dense = true;  ///< the config has an intermediate_size, that of dense layers
  /// Reads what differs between families: experts, routing, shared expert, which layers are MoE, attention.
  /// Called with the common fields read.
  void (*read)(Fields& fields, ModelConfig& config) = nullptr;
};

std::span<const Family> families();
/// nullptr if unknown.
const Family* find_family(std::string_view model_type);

/// A tensor of a routed expert, by its name.
struct ExpertTensor {
  int layer = 0;
  std::optional<int> expert;  ///< none: fused, of all experts
  Projection projection = Projection::gate;
  bool gate_up = false;     ///< fused: holds gate and up; projection is gate
  std::string_view suffix;  ///< what follows the module's name
};

/// The names of one model's layers.
class ModuleNames {
 public:
  /// `prefix`: "model."; models nested in others have longer ones.
  ModuleNames(const Family& family, std::string prefix) : family_(&family), prefix_(std::move(prefix)) {}

  /// "model.layers.3.mlp"
  std::string block(int layer) const;
  /// "model.layers.3.mlp.gate"
  std::string router(int layer) const;
  std::string correction_bias(int layer) const;
  std::string shared_expert_gate(int layer) const;
  /// Whether a module is a router or the gate of a shared expert, of any block: layers that predict several
  /// tokens have numbers beyond the model's, or names of their own ("mtp.0.ffn.gate").
  bool is_router_or_gate(std::string_view module) const;
  Linear expert(const MoeSpec& spec, int layer, int expert, Projection projection) const;
  Linear fused_expert(const MoeSpec& spec, int layer, int expert, Projection projection) const;
  Linear shared_expert(const MoeSpec& spec, int layer, Projection projection) const;
  /// The regular expression of the routed experts of layers ("0|1|5"):
  /// "model\.layers\.(0|1|5)\.mlp\.experts\..*".
  std::string experts_pattern(const std::string& layers) const;
  /// The tensor of a fused projection's biases.
  std::string fused_bias(int layer, Projection projection) const;

  /// Nothing if `name` is no tensor of a routed expert.
  std::optional<ExpertTensor> parse(std::string_view name) const;

 private:
  const Family* family_;
  std::string prefix_;
};

}  // namespace gatefold
