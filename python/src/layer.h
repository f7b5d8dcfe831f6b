#pragma once
/// \file
/// What the Python classes and the torch operators share of layers: packed experts, and plans with
/// workspaces.

#include "gatefold/moe.h"
#include "handles.h"
#include "plans.h"

namespace gatefold::python {

/// A plan, and workspaces for as many calls as run at once. Thread-safe.
class PlannedLayer {
 public:
  PlannedLayer(const MoeSpec& spec, const PlanOptions& options, const Device& device);

  const MoePlan& plan() const { return plan_; }
  /// MoePlan::run with a workspace of its own (Workspaces::lend).
  void run(const ExpertWeights& weights, const MoeInputs& inputs, const MoeOutputs& outputs,
           cuda::Stream stream, bool in_torch);

 private:
  MoePlan plan_;
  Workspaces workspaces_;
};

/// Packed experts, and the plans that torch operators use for them, by number of tokens.
class Layer : public Handled {
 public:
  static constexpr const char* kWhat = "experts";
  Layer(ExpertWeights weights, const PlanOptions& options)
      : weights_(std::move(weights)), options_(options) {}

  const ExpertWeights& weights() const { return weights_; }
  /// A plan for at least this many tokens.
  std::shared_ptr<PlannedLayer> planned(std::int64_t tokens);

 private:
  ExpertWeights weights_;
  PlanOptions options_;
  PlansBySize<PlannedLayer> plans_;
};

}  // namespace gatefold::python
