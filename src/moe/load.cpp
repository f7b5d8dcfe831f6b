#include <fmt/format.h>

#include "format/row_kernels.h"
#include "gatefold/checkpoint.h"
#include "gatefold/moe.h"

namespace gatefold {
namespace {

/// A small unquantized tensor as f32.
Result<std::vector<float>> read_vector(const Checkpoint& checkpoint, const TensorEntry& entry,
                                       std::size_t wanted) {
  const TensorView view = checkpoint.view(entry);
  if (view.dtype != DType::f32 && view.dtype != DType::f16 && view.dtype != DType::bf16)
    return Status(Code::bad_file,
                  fmt::format("{}: is {}, expected F32, F16 or BF16", entry.name, name(view.dtype)));
  const std::size_t count = view.bytes * 8 / static_cast<std::size_t>(bits(view.dtype));
  if (count != wanted)
    return Status(Code::bad_file, fmt::format("{}: has {} values, expected {}", entry.name, count, wanted));
  std::vector<float> values(count);
  row_kernels().widen(view.dtype, view.data, 0, static_cast<std::int64_t>(count), values.data());
  return values;
}

Status read_optional(const Checkpoint& checkpoint, const TensorEntry* entry, std::size_t wanted,
                     std::vector<float>& out) {
  if (entry == nullptr) return {};
  Result<std::vector<float>> values = read_vector(checkpoint, *entry, wanted);
  if (!values) return values.status();
  out = std::move(*values);
  return {};
}

Result<LayerVectors> read_vectors(const Checkpoint& checkpoint, const MoeSpec& spec, int layer) {
  LayerVectors vectors;
  const auto experts = static_cast<std::size_t>(spec.experts), hidden = static_cast<std::size_t>(spec.hidden);
  Result<TensorView> router = checkpoint.router(layer);
  if (!router) return router.status();
  vectors.router.resize(experts * hidden);
  row_kernels().widen(router->dtype, router->data, 0, static_cast<std::int64_t>(vectors.router.size()),
                      vectors.router.data());
  if (Status status = read_optional(checkpoint, checkpoint.router_bias(layer), experts, vectors.router_bias);
      !status.ok())
    return status;
  if (spec.routing.correction_bias) {
    const TensorEntry* bias = checkpoint.router_correction_bias(layer);
    if (bias == nullptr)
      return Status(Code::bad_file, fmt::format("layer {}: the router's correction bias is missing", layer));
    if (Status status = read_optional(checkpoint, bias, experts, vectors.correction_bias); !status.ok())
      return status;
  }
  if (spec.shared.gated) {
    Result<TensorView> gate = checkpoint.shared_expert_gate(layer);
    if (!gate) return gate.status();
    vectors.shared_gate.resize(hidden);
    row_kernels().widen(gate->dtype, gate->data, 0, spec.hidden, vectors.shared_gate.data());
  }
  return vectors;
}

Status with_place(const Status& status, int layer, int expert, Projection projection) {
  return {status.code(),
          fmt::format("layer {}, expert {}, {}_proj: {}", layer, expert, name(projection), status.message())};
}

}  // namespace

Result<ExpertWeights> load_experts(const Checkpoint& checkpoint, const LoadOptions& options) {
  const ModelConfig& config = checkpoint.config();
  if (options.layer < 0 || options.layer >= config.layers)
    return Status(Code::invalid_argument,
                  fmt::format("layer {} is not within 0..{}", options.layer, config.layers - 1));
  if (!config.is_moe[options.layer])
    return Status(Code::invalid_argument, fmt::format("layer {} is dense: it has no experts", options.layer));
  Result<SchemeId> stored = checkpoint.stored_scheme();
  if (!stored) return stored.status();

  MoeSpec spec = config.moe;
  spec.scheme = options.scheme.value_or(*stored);
  Result<LayerVectors> vectors = read_vectors(checkpoint, spec, options.layer);
  if (!vectors) return vectors.status();

  const ExpertSource routed = [&](int expert, Projection projection) -> Result<QuantizedMatrix> {
    Result<ExpertMatrix> matrix = checkpoint.expert(options.layer, expert, projection);
    if (!matrix) return matrix.status();
    if (auto* quantized = std::get_if<QuantizedMatrix>(&*matrix)) {
      // The same weights under other activations are another scheme of the same matrix.
      if (scheme(quantized->scheme).weight == scheme(spec.scheme).weight) {
        quantized->scheme = spec.scheme;
        return std::move(*quantized);
      }
      return with_place(
          {Code::unsupported, fmt::format("is stored as {}, which cannot be turned into {}",
                                          scheme(quantized->scheme).name, scheme(spec.scheme).name)},
          options.layer, expert, projection);
    }
    Result<QuantizedMatrix> result = quantize(spec.scheme, std::get<MatrixView>(*matrix), options.quantize);
    if (!result) return with_place(result.status(), options.layer, expert, projection);
    return result;
  };
  const ExpertSource shared = [&](int, Projection projection) -> Result<QuantizedMatrix> {
    Result<MatrixView> matrix = checkpoint.shared_expert(options.layer, projection);
    if (!matrix) return matrix.status();
    return quantize(spec.shared.scheme, *matrix, options.quantize);
  };
  return ExpertWeights::pack(spec, options.device, std::move(*vectors), routed, shared, options.plan);
}

}  // namespace gatefold
