#include "moe/gpu_calls.h"

#include <algorithm>

#include "cuda/measure.h"
#include "format/code_rows.h"
#include "gatefold/codec.h"
#include "gatefold/cuda_quantize.h"
#include "moe/weights.h"

namespace gatefold {
namespace {

Status allocate(std::span<const std::pair<cuda::Memory*, std::size_t>> all, int device) {
  for (const auto& [memory, bytes] : all) {
    auto allocated = cuda::Memory::allocate(bytes, "a bench", device);
    if (!allocated) return allocated.status();
    *memory = std::move(*allocated);
  }
  return {};
}

}  // namespace

Result<GpuCalls> GpuCalls::create(const SyntheticLayers& layers, int tokens, BenchFrom from,
                                  BenchRouting routing, const MoePlan& plan) {
  const auto device = cuda::device_info(plan.device().index);
  if (!device) return device.status();
  GpuCalls calls(layers, tokens, from);
  // Few of many tokens: what is timed should be short (Timer::rested).
  const std::size_t least = std::clamp<std::size_t>(8192 / static_cast<std::size_t>(tokens), 1, 4);
  for (std::uint64_t bytes = 0; bytes < 5 * device->l2_bytes || calls.routings_.size() < least;) {
    calls.add(routing);
    bytes += calls.weight_bytes(calls.routings_.size() - 1);
  }
  if (Status status = calls.copy(plan); !status.ok()) return status;
  if (from == BenchFrom::codes)
    if (Status status = calls.quantize_hidden(); !status.ok()) return status;
  if (from == BenchFrom::hidden)
    if (Status status = calls.find_routings(plan); !status.ok()) return status;
  return calls;
}

double GpuCalls::mean_weight_bytes() const {
  double bytes = 0;
  for (std::size_t i = 0; i < count(); ++i) bytes += static_cast<double>(weight_bytes(i));
  return bytes / static_cast<double>(count());
}

Status GpuCalls::run(const MoePlan& plan, cuda::Stream stream) const {
  for (std::size_t i = 0; i < count(); ++i)
    if (Status status = run(plan, i, nullptr, stream); !status.ok()) return status;
  return {};
}

Status GpuCalls::run(const MoePlan& plan, std::size_t call, std::int32_t* topk_ids,
                     cuda::Stream stream) const {
  const MoeSpec& spec = layers_->spec;
  MoeInputs inputs{.hidden = hidden(call)};
  if (from_ == BenchFrom::codes) {
    inputs.hidden.data = codes_.data();
    inputs.hidden.dtype = dtype_of_codes(scheme(spec.scheme).activation.value);
    inputs.hidden_scales = scales_.data();
    inputs.hidden_token_scales = token_scales_.as<float>();
  }
  if (from_ == BenchFrom::logits) {
    inputs.router_logits = logits_.as<float>() + call * logits_of_call();
  } else if (from_ != BenchFrom::hidden) {
    inputs.topk_ids = ids_.as<std::int32_t>() + call * slots();
    inputs.topk_weights = weights_.as<float>();
  }
  return plan.run(layer(call), inputs,
                  {.hidden = {out_.data(), spec.act_dtype, tokens_, spec.hidden}, .topk_ids = topk_ids},
                  {workspace_.data(), workspace_.bytes()}, stream);
}

Status GpuCalls::read(cuda::Stream stream) const {
  for (std::size_t i = 0; i < count(); ++i) {
    if (routings_[i].distinct.empty()) continue;
    const auto& routed = layer(i).state().routed;
    const auto bytes = static_cast<std::int64_t>(layer(i).packed_expert_bytes());
    cuda::ReadArgs args{.base = routed[0].gate.data,
                        .stride = routed.size() > 1 ? routed[1].gate.data - routed[0].gate.data : 0,
                        .bytes = bytes / 16 * 16,
                        .count = static_cast<int>(routings_[i].distinct.size())};
    std::copy(routings_[i].distinct.begin(), routings_[i].distinct.end(), args.indices);
    if (Status status = cuda::launch_read(args, layer(i).device().index, stream); !status.ok()) return status;
  }
  return {};
}

GpuCalls::Routed::Routed(std::vector<std::int32_t> of_slots) : ids(std::move(of_slots)), distinct(ids) {
  std::erase(distinct, -1);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
}

void GpuCalls::add(BenchRouting routing) {
  std::vector<std::int32_t> ids(slots());
  random_routing(layers_->spec, routing, random_, ids);
  routings_.emplace_back(std::move(ids));
}

Status GpuCalls::find_routings(const MoePlan& plan) {
  const cuda::DeviceGuard guard(plan.device().index);
  for (std::size_t i = 0; i < count(); ++i) {
    if (Status status = run(plan, i, ids_.as<std::int32_t>(), nullptr); !status.ok()) return status;
    std::vector<std::int32_t> ids(slots());
    if (Status status = cuda::copy(ids.data(), ids_.data(), slots() * 4); !status.ok()) return status;
    routings_[i] = Routed(std::move(ids));
  }
  return cuda::synchronize();
}

Status GpuCalls::copy(const MoePlan& plan) {
  const auto device = plan.device().index;
  const std::size_t elements =
      (static_cast<std::size_t>(tokens_) + count()) * static_cast<std::size_t>(layers_->spec.hidden);
  const std::pair<cuda::Memory*, std::size_t> all[] = {
      {&hidden_, elements * 2},       {&out_, elements * 2},
      {&ids_, count() * slots() * 4}, {&logits_, count() * logits_of_call() * 4},
      {&weights_, slots() * 4},       {&workspace_, plan.workspace_bytes()}};
  if (Status status = allocate(all, device); !status.ok()) return status;
  const cuda::DeviceGuard guard(device);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> x(elements);
  const bool f16 = layers_->spec.act_dtype == DType::f16;
  for (std::uint16_t& code : x) {
    const float number = normal(random_);
    code = static_cast<std::uint16_t>(f16 ? encode<formats::f16>(number) : encode<formats::bf16>(number));
  }
  const std::vector<float> weights(slots(), 1.0f / static_cast<float>(layers_->spec.top_k));
  if (Status status = cuda::copy(hidden_.data(), x.data(), elements * 2); !status.ok()) return status;
  if (Status status = cuda::copy(weights_.data(), weights.data(), slots() * 4); !status.ok()) return status;
  for (std::size_t i = 0; i < count(); ++i) {
    const Routed& routed = routings_[i];
    if (Status status = cuda::copy(ids_.as<std::int32_t>() + i * slots(), routed.ids.data(), slots() * 4);
        !status.ok())
      return status;
    if (from_ != BenchFrom::logits) continue;
    const std::vector<float> logits = random_logits(layers_->spec, random_, routed.ids);
    if (Status status = cuda::copy(logits_.as<float>() + i * logits.size(), logits.data(), logits.size() * 4);
        !status.ok())
      return status;
  }
  return cuda::synchronize();
}

Status GpuCalls::quantize_hidden() {
  const MatrixView x = hidden(0);
  const SchemeId id = layers_->spec.scheme;
  const auto layout = cuda::activation_layout(id, x.rows, x.cols);
  if (!layout) return layout.status();
  const int device = layer(0).device().index;
  cuda::Memory workspace;
  const std::pair<cuda::Memory*, std::size_t> all[] = {{&codes_, layout->value_bytes},
                                                       {&scales_, layout->scale_bytes},
                                                       {&token_scales_, layout->token_scale_bytes},
                                                       {&workspace, layout->workspace_bytes}};
  if (Status status = allocate(all, device); !status.ok()) return status;
  const cuda::DeviceGuard guard(device);
  const Status status = cuda::quantize_activations(
      id, {.x = x, .rows = x.rows},
      {.values = codes_.data(), .scales = scales_.data(), .token_scales = token_scales_.as<float>()},
      {workspace.data(), workspace.bytes()});
  return status.ok() ? cuda::synchronize() : status;
}

}  // namespace gatefold
