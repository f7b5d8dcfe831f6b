#pragma once
/// \file
/// One MoE layer on the CPU, for every scheme: rows of weights are decoded to f32 and multiplied.

#include "format/isa.h"
#include "moe/kernel.h"

namespace gatefold {

void cpu_moe_workspace(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout);
void cpu_moe_layer(Isa isa, const MoeCall& call);

}  // namespace gatefold
