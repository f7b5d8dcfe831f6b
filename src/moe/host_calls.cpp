#include "moe/host_calls.h"

#include <algorithm>

#include "gatefold/linear.h"

namespace gatefold {
namespace {

/// Bytes of a token's scales where hidden states are codes (MoeInputs::hidden_scales).
std::size_t scale_bytes(const MoeSpec& spec) {
  const auto row = activation_row(spec.scheme, spec.hidden);
  return row ? static_cast<std::size_t>(row->scale_bytes) : 0;
}

/// Pieces of device memory, one after the other; without memory it counts their bytes.
class Pieces {
 public:
  explicit Pieces(std::byte* memory) : memory_(memory) {}
  std::byte* take(std::size_t bytes) {
    std::byte* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

struct DeviceArrays {
  std::byte *workspace, *hidden, *scales, *token_scales, *logits, *ids, *weights, *out;

  DeviceArrays(const MoePlan& plan, Pieces& pieces) {
    const MoeSpec& spec = plan.spec();
    const auto tokens = static_cast<std::size_t>(plan.max_tokens()), wide = sizeof(float);
    workspace = pieces.take(plan.workspace_bytes());
    hidden = pieces.take(tokens * static_cast<std::size_t>(spec.hidden) * wide);
    scales = pieces.take(tokens * scale_bytes(spec));
    token_scales = pieces.take(tokens * sizeof(float));
    logits = pieces.take(tokens * static_cast<std::size_t>(spec.experts) * wide);
    ids = pieces.take(tokens * static_cast<std::size_t>(spec.top_k) * wide);
    weights = pieces.take(tokens * static_cast<std::size_t>(spec.top_k) * wide);
    out = pieces.take(tokens * static_cast<std::size_t>(spec.hidden) * wide);
  }
};

std::size_t bytes_of(DType dtype, std::int64_t count) {
  return static_cast<std::size_t>(count) * static_cast<std::size_t>(bits(dtype)) / 8;
}

}  // namespace

Result<HostCalls> HostCalls::create(const MoePlan& plan) {
  HostCalls calls;
  if (plan.device().kind == Device::Kind::cpu) {
    calls.workspace_.resize(plan.workspace_bytes());
    return calls;
  }
  Pieces count(nullptr);
  const DeviceArrays arrays(plan, count);
  auto memory = cuda::Memory::allocate(count.used(), "workspace, inputs and outputs", plan.device().index);
  if (!memory) return memory.status();
  calls.device_ = std::move(*memory);
  return calls;
}

Status HostCalls::run(const MoePlan& plan, const ExpertWeights& weights, const MoeInputs& inputs,
                      const MoeOutputs& outputs) {
  if (plan.device().kind == Device::Kind::cpu) return plan.run(weights, inputs, outputs, workspace_);
  return run_on_device(plan, weights, inputs, outputs);
}

Status HostCalls::run_on_device(const MoePlan& plan, const ExpertWeights& weights, const MoeInputs& inputs,
                                const MoeOutputs& outputs) {
  const MoeSpec& spec = plan.spec();
  const cuda::DeviceGuard guard(plan.device().index);
  // The plan refuses these with a message; here they must not be copied.
  const std::int64_t tokens = inputs.hidden.rows;
  const bool fits = tokens >= 0 && tokens <= plan.max_tokens() && inputs.hidden.cols == spec.hidden &&
                    outputs.hidden.cols == spec.hidden && outputs.hidden.rows == tokens &&
                    bits(inputs.hidden.dtype) <= 32;
  Pieces pieces(device_.data());
  const DeviceArrays device(plan, pieces);
  Status status;
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    if (fits && status.ok() && from != nullptr && to != nullptr) status = cuda::copy(to, from, bytes);
  };
  const std::int64_t slots = tokens * spec.top_k;
  const std::size_t slot_bytes = fits ? static_cast<std::size_t>(slots) * 4 : 0;
  copy(device.hidden, inputs.hidden.data, fits ? bytes_of(inputs.hidden.dtype, tokens * spec.hidden) : 0);
  copy(device.scales, inputs.hidden_scales, fits ? static_cast<std::size_t>(tokens) * scale_bytes(spec) : 0);
  copy(device.token_scales, inputs.hidden_token_scales, fits ? bytes_of(DType::f32, tokens) : 0);
  copy(device.logits, inputs.router_logits, fits ? bytes_of(DType::f32, tokens * spec.experts) : 0);
  copy(device.ids, inputs.topk_ids, slot_bytes);
  copy(device.weights, inputs.topk_weights, slot_bytes);
  if (!status.ok()) return status;

  const auto if_given = [](const auto* given, std::byte* there) {
    return given == nullptr
               ? nullptr
               : reinterpret_cast<std::remove_const_t<std::remove_pointer_t<decltype(given)>>*>(there);
  };
  MoeInputs in = inputs;
  in.hidden.data = inputs.hidden.data == nullptr ? nullptr : device.hidden;
  in.hidden_scales = if_given(static_cast<const std::byte*>(inputs.hidden_scales), device.scales);
  in.hidden_token_scales = if_given(inputs.hidden_token_scales, device.token_scales);
  in.router_logits = if_given(inputs.router_logits, device.logits);
  in.topk_ids = if_given(inputs.topk_ids, device.ids);
  in.topk_weights = if_given(inputs.topk_weights, device.weights);
  MoeOutputs out = outputs;
  out.hidden.data = outputs.hidden.data == nullptr ? nullptr : device.out;
  out.topk_ids = if_given(outputs.topk_ids, device.ids);
  out.topk_weights = if_given(outputs.topk_weights, device.weights);
  status = plan.run(weights, in, out, {device.workspace, plan.workspace_bytes()});
  if (!status.ok()) return status;

  copy(outputs.hidden.data, device.out, bytes_of(outputs.hidden.dtype, tokens * spec.hidden));
  copy(outputs.topk_ids, device.ids, slot_bytes);
  copy(outputs.topk_weights, device.weights, slot_bytes);
  if (!status.ok()) return status;
  return cuda::synchronize();
}

}  // namespace gatefold
