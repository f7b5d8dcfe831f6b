#pragma once
/// \file
/// An MoE layer as a chain of kernels in one stream.

#include "moe/kernel.h"

namespace gatefold::cuda {

/// Why the kernels cannot run a layer, in words; empty if they can.
std::string refuses(const MoeSpec& spec, const PlanOptions& options, const Device& device);
void layer_workspace(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout);
Result<std::shared_ptr<const KernelPlan>> prepare_layer(const MoeSpec& spec, const PlanOptions& options,
                                                        const Device& device, const CudaTunings& tuned);
Status layer(const MoeCall& call);

}  // namespace gatefold::cuda
