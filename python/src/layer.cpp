#include "layer.h"

#include <omp.h>

namespace gatefold::python {

PlannedLayer::PlannedLayer(const MoeSpec& spec, const PlanOptions& options, const Device& device)
    : plan_(value(MoePlan::create(spec, options, device))), workspaces_(plan_.workspace_bytes(), device) {}

void PlannedLayer::run(const ExpertWeights& weights, const MoeInputs& inputs, const MoeOutputs& outputs,
                       cuda::Stream stream, bool in_torch) {
  use_threads();
  workspaces_.lend(stream, in_torch, [&](std::span<std::byte> workspace) {
    return plan_.run(weights, inputs, outputs, workspace, stream);
  });
}

std::shared_ptr<PlannedLayer> Layer::planned(std::int64_t tokens) {
  PlanOptions options = options_;
  options.debug_workspace = debugging_operators();
  const int threads = options.threads == 0 ? omp_get_max_threads() : options.threads;
  return plans_.find(tokens, {threads, options.debug_workspace}, [&](int most) {
    options.max_tokens = most;
    return std::make_shared<PlannedLayer>(weights_.spec(), options, weights_.device());
  });
}

}  // namespace gatefold::python
