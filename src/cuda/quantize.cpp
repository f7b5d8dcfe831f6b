#include "cuda/quantize.h"

#include <fmt/format.h>

#include "cuda/device.h"

namespace gatefold::cuda {
namespace {

bool aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

Status check_pointers(const Operand& operand, const QuantizeInputs& inputs, const QuantizeOutputs& outputs) {
  const char* missing = inputs.x.data == nullptr                                           ? "x"
                        : outputs.values == nullptr                                        ? "values"
                        : outputs.scales == nullptr                                        ? "scales"
                        : operand.tensor_scale.stored() && outputs.token_scales == nullptr ? "token_scales"
                                                                                           : nullptr;
  if (missing == nullptr) return {};
  return {Code::invalid_argument, fmt::format("cannot quantize activations: {} is a null pointer", missing)};
}

}  // namespace

Result<ActivationLayout> activation_layout(SchemeId id, std::int64_t rows, std::int64_t k) {
  const Scheme& row = scheme(id);
  constexpr std::int64_t limit = std::int64_t{1} << 30;
  if (!row.quantizes_activations())
    return Status(Code::invalid_argument, fmt::format("scheme {} leaves activations in 16 bit", row.name));
  if (rows < 0 || k <= 0 || rows >= limit || k >= limit)
    return Status(Code::invalid_argument, fmt::format("{} x {} activations cannot be quantized", rows, k));
  if (row.activation.value.bits == 4 && k % 2 != 0)
    return Status(Code::invalid_argument,
                  fmt::format("k = {} is odd: the activations of {} are pairs of 4-bit codes", k, row.name));
  const QuantizedLayout layout = quantized_layout(row.activation, row.activation.scale, 1, k);
  const auto count = static_cast<std::size_t>(rows);
  return ActivationLayout{
      .row_bytes = layout.row_bytes,
      .scale_cols = layout.scale_cols,
      .value_bytes = count * layout.value_bytes,
      .scale_bytes = count * layout.scale_bytes,
      .token_scale_bytes = row.activation.tensor_scale.stored() ? count * sizeof(float) : 0,
      .workspace_bytes = row.batch_dependent() ? kPartials * sizeof(float) : 0};
}

Status quantize_activations(SchemeId id, const QuantizeInputs& inputs, const QuantizeOutputs& outputs,
                            std::span<std::byte> workspace, Stream stream) {
  const Operand& operand = scheme(id).activation;
  const MatrixView& x = inputs.x;
  const auto layout = activation_layout(id, inputs.rows, x.cols);
  if (!layout) return layout.status();
  if (x.dtype != DType::f32 && x.dtype != DType::f16 && x.dtype != DType::bf16)
    return {Code::invalid_argument, fmt::format("cannot quantize {} activations", name(x.dtype))};
  if (inputs.gather == nullptr && inputs.rows > x.rows)
    return {Code::invalid_argument, fmt::format("{} rows are wanted of {}", inputs.rows, x.rows)};
  if (inputs.gather_divisor <= 0)
    return {Code::invalid_argument, fmt::format("gather_divisor = {}", inputs.gather_divisor)};
  if (inputs.rows == 0) return {};
  if (Status status = check_pointers(operand, inputs, outputs); !status.ok()) return status;
  const bool dynamic = inputs.static_scales == nullptr;
  if (dynamic && workspace.size() < layout->workspace_bytes)
    return {Code::invalid_argument,
            fmt::format("the workspace has {} bytes; quantizing with scheme {} needs {}", workspace.size(),
                        scheme(id).name, layout->workspace_bytes)};

  const std::int64_t share = operand.value.bits == 4 ? 16 : 8;
  const QuantizeArgs args{.x = static_cast<const std::byte*>(x.data),
                          .rows = inputs.rows,
                          .row_bytes = layout->row_bytes,
                          .scale_cols = layout->scale_cols,
                          .k = static_cast<int>(x.cols),
                          .chunks = 0,
                          .gather = inputs.gather,
                          .gather_divisor = inputs.gather_divisor,
                          .row_count = inputs.row_count,
                          .wide = aligned(x.data) && aligned(outputs.values) && x.cols % share == 0,
                          .static_scales = inputs.static_scales,
                          .static_index = inputs.static_index,
                          .values = static_cast<std::byte*>(outputs.values),
                          .scales = static_cast<std::byte*>(outputs.scales),
                          .token_scales = outputs.token_scales,
                          .partials = reinterpret_cast<float*>(workspace.data())};
  const Format input = x.dtype == DType::f32   ? formats::f32
                       : x.dtype == DType::f16 ? formats::f16
                                               : formats::bf16;
  return check(launch_quantize(operand, input, args, native(stream)), "quantize activations");
}

}  // namespace gatefold::cuda
