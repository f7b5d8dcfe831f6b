#pragma once
/// \file
/// The seam between plans and backends: a backend is a list of KernelInfo, best first.

#include <string>

#include "gatefold/moe.h"
#include "moe/routing.h"
#include "moe/weights.h"
#include "moe/workspace.h"

namespace gatefold {

/// One call of a layer, checked: shapes agree with the spec, ids are in range, tokens <= max_tokens.
struct MoeCall {
  const MoeSpec& spec;
  const PlanOptions& options;
  const CpuTuning& tuning;
  const ExpertWeights::State& weights;
  const MoeInputs& inputs;
  const MoeOutputs& outputs;
  std::byte* workspace;  ///< aligned; of the layout that KernelInfo::workspace declares
  cuda::Stream stream;
};

struct KernelInfo {
  std::string name;  ///< "cpu.avx512.int4_g128"
  SchemeId scheme;
  Device::Kind device;
  const WeightLayout* layout;  ///< what it reads
  /// Empty if the kernel can run this, else why not, in words.
  std::string (*refuses)(const MoeSpec& spec, const PlanOptions& options, const Device& device);
  /// Declares its buffers for options.max_tokens tokens.
  void (*workspace)(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout);
  /// Allocates nothing, throws nothing. On a GPU it returns before the work is done.
  Status (*launch)(const MoeCall& call);
};

/// Best first.
std::span<const KernelInfo> cpu_kernels();
std::span<const KernelInfo> cuda_kernels();  ///< without CUDA in the build, all of them refuse

/// The first kernel that takes the spec and options; nullptr if none does. `refused` gets the others, each
/// with its reason.
const KernelInfo* choose_kernel(const MoeSpec& spec, const PlanOptions& options, const Device& device,
                                std::vector<std::string>* refused);

/// What activations are rounded to in a plan: the scheme's operand, the model's 16-bit type, or (value not
/// stored) nothing.
Operand effective_activation(SchemeId scheme, const MoeSpec& spec, const PlanOptions& options);

}  // namespace gatefold
