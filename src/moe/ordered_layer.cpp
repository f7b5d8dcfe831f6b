#include "moe/ordered_layer.h"

#include <algorithm>
#include <cstring>

#include "format/row_kernels.h"

namespace gatefold {
namespace {

std::size_t workspace_bytes(const KernelInfo& kernel, const MoeSpec& spec, const PlanOptions& options) {
  WorkspaceLayout layout;
  kernel.workspace(spec, options, layout);
  return layout.bytes();
}

/// Row `t` of the output.
void store(const MutableMatrixView& out, std::int64_t t, const float* row) {
  auto* bytes = static_cast<std::byte*>(out.data) + t * out.cols * bits(out.dtype) / 8;
  if (out.dtype == DType::f32) {
    std::memcpy(bytes, row, static_cast<std::size_t>(out.cols) * sizeof(float));
    return;
  }
  const float one = 1.0f, zero = 0.0f;
  row_kernels()[out.dtype == DType::f16 ? formats::f16 : formats::bf16].encode(row, out.cols, out.cols, &one,
                                                                               &zero, bytes);
}

}  // namespace

OrderedLayer::OrderedLayer(const KernelInfo& kernel, const MoeSpec& spec, const PlanOptions& options,
                           WorkspaceLayout& layout)
    : kernel_(&kernel), routed_(spec), shared_(spec), routed_options_(options), shared_options_(options) {
  const auto tokens = static_cast<std::size_t>(options.max_tokens),
             slots = tokens * static_cast<std::size_t>(spec.top_k),
             hidden = static_cast<std::size_t>(spec.hidden), experts = static_cast<std::size_t>(spec.experts);
  const std::size_t shared_tokens = spec.shared.intermediate == 0 ? 0 : tokens;
  routed_.top_k = shared_.top_k = 1;
  routed_.routing.groups = shared_.routing.groups = 1;
  routed_.routing.top_groups = shared_.routing.top_groups = 1;
  routed_.shared = {};
  routed_options_.max_tokens = static_cast<int>(slots);
  routed_options_.debug_workspace = shared_options_.debug_workspace = false;

  ids_ = layout.add<std::int32_t>("topk_ids", slots);
  weights_ = layout.add<float>("topk_weights", slots);
  logits_ = layout.add<float>("router_logits", tokens * experts);
  scratch_ = layout.add<float>("routing", 2 * experts);
  hidden_ = layout.add<float>("ordered_hidden", std::max(slots, tokens) * hidden);
  out_ = layout.add<float>("slot_outputs", slots * hidden);
  shared_ids_ = layout.add<std::int32_t>("shared_ids", shared_tokens);
  shared_weights_ = layout.add<float>("shared_weights", shared_tokens);
  shared_out_ = layout.add<float>("shared_outputs", shared_tokens * hidden);
  std::size_t inner = workspace_bytes(kernel, routed_, routed_options_);
  if (shared_tokens != 0) inner = std::max(inner, workspace_bytes(kernel, shared_, shared_options_));
  inner_ = layout.add<std::byte>("kernel", inner);
}

/// Ids and weights of all slots, from whatever the call gives.
void OrderedLayer::route(const MoeCall& call, std::int32_t* ids, float* weights) const {
  const MoeSpec& spec = call.spec;
  const std::int64_t tokens = call.inputs.hidden.rows, slots = tokens * spec.top_k;
  const LayerVectors& v = call.weights.vectors;
  if (call.inputs.topk_ids != nullptr) {
    std::copy_n(call.inputs.topk_ids, slots, ids);
    std::copy_n(call.inputs.topk_weights, slots, weights);
  } else {
    const auto at = [&](std::size_t offset) { return reinterpret_cast<float*>(call.workspace + offset); };
    float *logits = at(logits_), *rows = at(hidden_);  // the latter is not yet in use
    const float* given = call.inputs.router_logits;
    if (given == nullptr)
      row_kernels().widen(call.inputs.hidden.dtype, call.inputs.hidden.data, 0, tokens * spec.hidden, rows);
#pragma omp parallel for schedule(static) num_threads(call.options.threads)
    for (std::int64_t i = 0; i < (given == nullptr ? tokens * spec.experts : 0); ++i) {
      const std::int64_t e = i % spec.experts;
      const float *x = rows + i / spec.experts * spec.hidden, *w = v.router.data() + e * spec.hidden;
      double sum =
          v.router_bias.empty() ? 0.0 : static_cast<double>(v.router_bias[static_cast<std::size_t>(e)]);
      for (int h = 0; h < spec.hidden; ++h) sum += static_cast<double>(x[h]) * static_cast<double>(w[h]);
      logits[i] = static_cast<float>(sum);
    }
    if (given == nullptr) given = logits;
    for (std::int64_t t = 0; t < tokens; ++t)
      route_token(spec.routing, spec.experts, spec.top_k, given + t * spec.experts,
                  v.correction_bias.empty() ? nullptr : v.correction_bias.data(), at(scratch_),
                  ids + t * spec.top_k, weights + t * spec.top_k);
  }
  if (call.outputs.topk_ids != nullptr) std::copy_n(ids, slots, call.outputs.topk_ids);
  if (call.outputs.topk_weights != nullptr) std::copy_n(weights, slots, call.outputs.topk_weights);
}

/// The shared expert takes its inputs as they are: a call of its own, in which the one routed expert that a
/// call must have counts nothing.
Status OrderedLayer::run_shared(const MoeCall& call, float* out) const {
  const std::int64_t tokens = call.inputs.hidden.rows;
  auto* ids = reinterpret_cast<std::int32_t*>(call.workspace + shared_ids_);
  auto* weights = reinterpret_cast<float*>(call.workspace + shared_weights_);
  std::fill_n(ids, tokens, 0);
  std::fill_n(weights, tokens, 0.0f);
  const MoeInputs inputs{.hidden = call.inputs.hidden, .topk_ids = ids, .topk_weights = weights};
  const MoeOutputs outputs{.hidden = {out, DType::f32, tokens, call.spec.hidden}};
  return kernel_->launch({shared_, shared_options_, call.tuning, call.weights, inputs, outputs,
                          WorkspaceLayout::align(call.workspace + inner_), call.stream});
}

Status OrderedLayer::run(const MoeCall& call) const {
  const std::int64_t tokens = call.inputs.hidden.rows, h = call.spec.hidden, top_k = call.spec.top_k;
  const std::int64_t slots = tokens * top_k;
  const auto floats = [&](std::size_t offset) { return reinterpret_cast<float*>(call.workspace + offset); };
  auto* ids = reinterpret_cast<std::int32_t*>(call.workspace + ids_);
  float *weights = floats(weights_), *hidden = floats(hidden_), *out = floats(out_);
  route(call, ids, weights);

  const std::int32_t* orders = call.weights.vectors.input_order.data();
#pragma omp parallel for schedule(static) if (tokens > 16) num_threads(call.options.threads)
  for (std::int64_t t = 0; t < tokens; ++t) {
    float* row = out + t * top_k * h;  // not yet in use
    row_kernels().widen(call.inputs.hidden.dtype, call.inputs.hidden.data, t * h, h, row);
    for (std::int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
      const bool is_here = ids[slot] >= 0 && ids[slot] < call.spec.experts;  // in this part
      for (std::int64_t j = 0; j < h; ++j)
        hidden[slot * h + j] = is_here ? row[orders[ids[slot] * h + j]] : 0.0f;
    }
  }
  const MoeInputs inputs{.hidden = {hidden, DType::f32, slots, h}, .topk_ids = ids, .topk_weights = weights};
  const MoeOutputs outputs{.hidden = {out, DType::f32, slots, h}};
  Status status = kernel_->launch({routed_, routed_options_, call.tuning, call.weights, inputs, outputs,
                                   WorkspaceLayout::align(call.workspace + inner_), call.stream});
  if (!status.ok()) return status;
  const bool has_shared = call.spec.shared.intermediate != 0;
  if (has_shared)
    if (Status shared = run_shared(call, floats(shared_out_)); !shared.ok()) return shared;

#pragma omp parallel for schedule(static) if (tokens > 16) num_threads(call.options.threads)
  for (std::int64_t t = 0; t < tokens; ++t) {
    float* sum = out + t * top_k * h;  // the token's first slot
    for (std::int64_t slot = t * top_k + 1; slot < (t + 1) * top_k; ++slot)
      for (std::int64_t j = 0; j < h; ++j) sum[j] += out[slot * h + j];
    for (std::int64_t j = 0; has_shared && j < h; ++j) sum[j] += floats(shared_out_)[t * h + j];
    store(call.outputs.hidden, t, sum);
  }
  return {};
}

}  // namespace gatefold
