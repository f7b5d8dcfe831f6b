#pragma once
/// \file
/// The seam between plans and backends: a backend is a list of KernelInfo, best first.

#include <array>
#include <bit>
#include <string>

#include "gatefold/moe.h"
#include "moe/debug_workspace.h"
#include "moe/routing.h"
#include "moe/weights.h"

namespace gatefold {

/// Classes of token counts that CUDA plans are tuned by: 1, 2, 3-4, 5-8, 9-16, ..
inline constexpr int kCudaTokenClasses = 25;
constexpr int cuda_token_class(std::int64_t tokens) {
  return std::bit_width(static_cast<std::uint64_t>(tokens) - 1);
}
using CudaTunings = std::array<std::optional<CudaTuning>, kCudaTokenClasses>;

/// What a kernel makes once for all calls of a plan.
class KernelPlan {
 public:
  virtual ~KernelPlan() = default;
  virtual std::vector<CudaCandidate> candidates(int tokens) const = 0;
};

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
  const KernelPlan* plan;  ///< what KernelInfo::prepare made
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
  /// nullptr: a plan keeps nothing. `tuned`: what tune() found.
  Result<std::shared_ptr<const KernelPlan>> (*prepare)(const MoeSpec& spec, const PlanOptions& options,
                                                       const Device& device,
                                                       const CudaTunings& tuned) = nullptr;
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
