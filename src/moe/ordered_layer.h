#pragma once
/// \file
/// A layer whose experts take their inputs in orders of their own (MoeSpec::ordered_inputs), run by a kernel
/// that knows nothing of it: every slot becomes a token of its own, with its hidden state in the order of the
/// slot's expert.

#include <cstddef>

#include "moe/kernel.h"

namespace gatefold {

class OrderedLayer {
 public:
  /// Declares its buffers. All that is given outlives this.
  OrderedLayer(const KernelInfo& kernel, const MoeSpec& spec, const PlanOptions& options,
               WorkspaceLayout& layout);

  Status run(const MoeCall& call) const;

 private:
  void route(const MoeCall& call, std::int32_t* ids, float* weights) const;
  Status run_shared(const MoeCall& call, float* out) const;

  const KernelInfo* kernel_;
  MoeSpec routed_, shared_;  ///< one expert per token; one without, one with the shared expert
  PlanOptions routed_options_, shared_options_;
  std::size_t ids_, weights_, logits_, scratch_, hidden_, out_, shared_ids_, shared_weights_, shared_out_,
      inner_;
};

}  // namespace gatefold
