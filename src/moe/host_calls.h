#pragma once
/// \file
/// Runs a plan with arrays in host memory, whatever device the plan is for.

#include "gatefold/moe.h"

namespace gatefold {

/// Holds the plan's workspace, and copies of inputs and outputs on a device with memory of its own. One call
/// at a time; a call returns when its results are there.
class HostCalls {
 public:
  /// Errors: too little memory.
  static Result<HostCalls> create(const MoePlan& plan);

  /// Pointers of inputs and outputs are to host memory. Errors: those of MoePlan::run.
  Status run(const MoePlan& plan, const ExpertWeights& weights, const MoeInputs& inputs,
             const MoeOutputs& outputs);

 private:
  HostCalls() = default;
  Status run_on_device(const MoePlan& plan, const ExpertWeights& weights, const MoeInputs& inputs,
                       const MoeOutputs& outputs);

  std::vector<std::byte> workspace_;
  cuda::Memory device_;  // workspace, then inputs and outputs
};

}  // namespace gatefold
