#include "cuda/activation_rounder.h"

#include "cuda/expert_kernels.h"

namespace gatefold::cuda {

Status ActivationRounder::round(const std::optional<TensorScale>& static_scale, std::int64_t rows,
                                std::int64_t k, float* x) {
  if (!scheme(scheme_).quantizes_activations()) return {};
  const auto layout = activation_layout(scheme_, rows, k);
  if (!layout) return layout.status();
  for (const auto& [buffer, bytes] : {std::pair{&codes_, layout->value_bytes},
                                      {&scales_, layout->scale_bytes},
                                      {&token_scales_, layout->token_scale_bytes},
                                      {&static_scale_, sizeof(TensorScale)},
                                      {&workspace_, layout->workspace_bytes}})
    if (Status status = buffer->reserve(bytes, device_); !status.ok()) return status;
  if (static_scale)
    if (Status status = copy(static_scale_.as<void>(), &*static_scale, sizeof(TensorScale), stream_);
        !status.ok())
      return status;
  const QuantizeInputs inputs{.x = {x, DType::f32, rows, k},
                              .rows = rows,
                              .static_scales = static_scale ? static_scale_.as<TensorScale>() : nullptr};
  const QuantizeOutputs outputs{
      .values = codes_.as<void>(), .scales = scales_.as<void>(), .token_scales = token_scales_.as<float>()};
  if (Status status = quantize_activations(scheme_, inputs, outputs,
                                           {workspace_.as<std::byte>(), layout->workspace_bytes}, stream_);
      !status.ok())
    return status;
  decode_activations(scheme_, outputs, *layout, rows, k, x, native(stream_));
  return check_launch("round activations");
}

}  // namespace gatefold::cuda
