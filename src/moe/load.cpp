#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/fused_amax.h"
#include "checkpoint/plain_view.h"
#include "format/matrix.h"
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

Status read_router(const Checkpoint& checkpoint, const MoeSpec& spec, int layer, LayerVectors& vectors) {
  const auto experts = static_cast<std::size_t>(spec.experts), hidden = static_cast<std::size_t>(spec.hidden);
  Result<TensorView> router = checkpoint.router(layer);
  if (!router) return router.status();
  vectors.router.resize(experts * hidden);
  row_kernels().widen(router->dtype, router->data, 0, static_cast<std::int64_t>(vectors.router.size()),
                      vectors.router.data());
  if (Status status = read_optional(checkpoint, checkpoint.router_bias(layer), experts, vectors.router_bias);
      !status.ok())
    return status;
  if (!spec.routing.correction_bias) return {};
  const TensorEntry* bias = checkpoint.router_correction_bias(layer);
  if (bias == nullptr)
    return {Code::bad_file, fmt::format("layer {}: the router's correction bias is missing", layer)};
  return read_optional(checkpoint, bias, experts, vectors.correction_bias);
}

Result<LayerVectors> read_vectors(const Checkpoint& checkpoint, const MoeSpec& spec, int layer,
                                  bool with_router) {
  LayerVectors vectors;
  if (with_router)
    if (Status status = read_router(checkpoint, spec, layer, vectors); !status.ok()) return status;
  if (spec.shared.gated) {
    Result<TensorView> gate = checkpoint.shared_expert_gate(layer);
    if (!gate) return gate.status();
    vectors.shared_gate.resize(static_cast<std::size_t>(spec.hidden));
    row_kernels().widen(gate->dtype, gate->data, 0, spec.hidden, vectors.shared_gate.data());
  }
  return vectors;
}

Status with_place(const Status& status, int layer, int expert, Projection projection) {
  return {status.code(),
          fmt::format("layer {}, expert {}, {}_proj: {}", layer, expert, name(projection), status.message())};
}

/// A matrix of the checkpoint in the scheme: as it is stored, or quantized now.
Result<QuantizedMatrix> to_scheme(Result<ExpertMatrix> matrix, SchemeId id, const QuantizeOptions& options) {
  if (!matrix) return matrix.status();
  if (const auto view = plain_view(*matrix)) return quantize(id, *view, options);
  auto& stored = std::get<QuantizedMatrix>(*matrix);
  // The same weights under other activations are another scheme of the same matrix.
  if (scheme(stored.scheme).weight == scheme(id).weight) {
    stored.scheme = id;
    return std::move(stored);
  }
  return Status(Code::unsupported, fmt::format("is stored as {}, which cannot be turned into {}",
                                               scheme(stored.scheme).name, scheme(id).name));
}

/// Why a matrix looks as if one of its scales had been meant the other way round; empty if it does not.
/// Trained weights lie between 1e-5 and 50.
std::string oddity(const QuantizedMatrix& matrix) {
  const Operand& weight = scheme(matrix.scheme).weight;
  if (!weight.quantized()) return {};
  const auto count = static_cast<std::int64_t>(matrix.scales.size()) / (matrix.scale_format.bits / 8);
  std::vector<float> scales(static_cast<std::size_t>(count));
  load_scales(matrix.scale_format, matrix.scales.data(), 0, count, scales.data());
  const float largest = *std::max_element(scales.begin(), scales.end());
  const double most = static_cast<double>(matrix.tensor_scale.apply(largest)) * weight.value.max();
  if (most <= 256 && most >= 1e-6) return {};
  return fmt::format("weights of up to {:.2g}: is a scale meant the other way round?", most);
}

/// Experts [first, first + count) of a layer.
struct Part {
  int first, count;
};

/// The orders in which the matrices of a part's experts take their inputs (act-order).
class InputOrders {
 public:
  InputOrders(const Checkpoint& checkpoint, int layer, Part part)
      : checkpoint_(checkpoint), layer_(layer), part_(part) {}

  /// Those of all its experts' gate and up, [E, H]; empty if none has one. Error: gate and up of an expert
  /// differ.
  Result<std::vector<std::int32_t>> of_part() const {
    const MoeSpec& moe = checkpoint_.config().moe;
    std::vector<std::int32_t> all;
    for (int expert = 0; expert < part_.count; ++expert) {
      const auto gate = of(expert, Projection::gate), up = of(expert, Projection::up);
      if (!gate) return gate.status();
      if (!up) return up.status();
      if (*gate != *up)
        return with_place({Code::unsupported, "gate_proj and up_proj take their inputs in different orders"},
                          layer_, part_.first + expert, Projection::gate);
      if (gate->empty() && all.empty()) continue;
      for (std::size_t i = all.size();
           i < static_cast<std::size_t>(expert) * static_cast<std::size_t>(moe.hidden); ++i)
        all.push_back(static_cast<std::int32_t>(i % static_cast<std::size_t>(moe.hidden)));
      for (std::int32_t i = 0; i < moe.hidden; ++i)
        all.push_back(gate->empty() ? i : (*gate)[static_cast<std::size_t>(i)]);
    }
    return all;
  }
  Result<std::vector<std::int32_t>> of(int expert, Projection projection) const {
    return checkpoint_.input_order(layer_, part_.first + expert, projection);
  }

 private:
  const Checkpoint& checkpoint_;
  int layer_;
  Part part_;
};

/// What `down` wants its inputs ordered like, gate and up deliver.
Status follow_down(const InputOrders& orders, int expert, Projection projection, QuantizedMatrix& matrix) {
  matrix.input_order.clear();  // of gate and up: LayerVectors has it
  if (projection == Projection::down) return {};
  const auto order = orders.of(expert, Projection::down);
  if (!order) return order.status();
  if (!order->empty()) permute_rows(matrix, *order);
  return {};
}

Status read_biases(const Checkpoint& checkpoint, const InputOrders& orders, int layer, Part part,
                   LayerVectors& vectors) {
  const MoeSpec& moe = checkpoint.config().moe;
  std::vector<float>* all[] = {&vectors.gate_bias, &vectors.up_bias, &vectors.down_bias};
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    auto biases = checkpoint.expert_biases(layer, projection);
    if (!biases) return biases.status();
    std::vector<float>& mine = *all[static_cast<std::size_t>(projection)];
    const std::int64_t width = projection == Projection::down ? moe.hidden : moe.intermediate;
    const auto begin = biases->begin() + part.first * width;
    mine.assign(begin, begin + part.count * width);
    for (int expert = 0; projection != Projection::down && expert < part.count; ++expert) {
      const auto order = orders.of(expert, Projection::down);
      if (!order) return order.status();
      const auto first = static_cast<std::ptrdiff_t>(expert * width);
      for (std::size_t j = 0; j < order->size(); ++j)
        mine[static_cast<std::size_t>(first) + j] = begin[first + (*order)[j]];
    }
  }
  return {};
}

}  // namespace

Result<ExpertWeights> load_experts(const Checkpoint& checkpoint, const LoadOptions& options) {
  const ModelConfig& config = checkpoint.config();
  const int layer = options.layer;
  if (layer < 0 || layer >= config.layers)
    return Status(Code::invalid_argument,
                  fmt::format("layer {} is not within 0..{}", layer, config.layers - 1));
  if (!config.is_moe[layer])
    return Status(Code::invalid_argument, fmt::format("layer {} is dense: it has no experts", layer));
  Result<SchemeId> stored = checkpoint.stored_scheme(layer);
  if (!stored) return stored.status();

  if (options.ep_size < 1 || config.moe.experts % options.ep_size != 0 || options.ep_rank < 0 ||
      options.ep_rank >= options.ep_size)
    return Status(Code::invalid_argument, fmt::format("ep_rank {}, ep_size {}: {} experts have no such part",
                                                      options.ep_rank, options.ep_size, config.moe.experts));

  MoeSpec spec = config.moe;
  spec.ep_size = options.ep_size;
  spec.experts /= spec.ep_size;
  const Part part{options.ep_rank * spec.experts, spec.experts};
  spec.scheme = options.scheme.value_or(*stored);
  if (!options.shared_expert) spec.shared = {};
  // Where the caller gives the experts, no scores choose them.
  const bool routes = !checkpoint.chooses_by_token(layer) && spec.ep_size == 1;
  if (!routes) spec.routing.correction_bias = false;
  if (options.device.kind == Device::Kind::cuda) spec.activation_rule = ScaleRule::standard;
  if (spec.shared.intermediate != 0) {
    const auto shared = checkpoint.shared_scheme(layer);
    if (!shared) return shared.status();
    if (scheme(*shared).weight.quantized()) spec.shared.scheme = *shared;
    if (options.shared_scheme) spec.shared.scheme = *options.shared_scheme;
  }
  Result<LayerVectors> vectors = read_vectors(checkpoint, spec, layer, routes);
  if (!vectors) return vectors.status();
  const InputOrders orders(checkpoint, layer, part);
  auto order = orders.of_part();
  if (!order) return order.status();
  vectors->input_order = std::move(*order);
  spec.ordered_inputs = !vectors->input_order.empty();
  if (spec.bias)
    if (Status status = read_biases(checkpoint, orders, layer, part, *vectors); !status.ok()) return status;

  std::vector<std::string> warnings;
  const ExpertSource routed = [&](int expert, Projection projection) -> Result<QuantizedMatrix> {
    const int of_all = part.first + expert;
    const auto amax = fused_amax(checkpoint, spec.scheme, layer, of_all, projection);
    if (!amax) return with_place(amax.status(), layer, of_all, projection);
    QuantizeOptions quantize_options = options.quantize;
    quantize_options.tensor_amax = *amax;
    auto matrix = to_scheme(checkpoint.expert(layer, of_all, projection), spec.scheme, quantize_options);
    if (!matrix) return with_place(matrix.status(), layer, of_all, projection);
    if (std::string why = oddity(*matrix); !why.empty() && warnings.empty())
      warnings.push_back(with_place({Code::bad_file, std::move(why)}, layer, of_all, projection).message());
    if (Status status = follow_down(orders, expert, projection, *matrix); !status.ok()) return status;
    return matrix;
  };
  const ExpertSource shared = [&](int, Projection projection) -> Result<QuantizedMatrix> {
    auto matrix =
        to_scheme(checkpoint.shared_expert(layer, projection), spec.shared.scheme, options.quantize);
    if (matrix && !matrix->input_order.empty())
      return Status(Code::unsupported,
                    fmt::format("layer {}, shared expert: {}_proj takes its inputs in an order of its own",
                                layer, name(projection)));
    return matrix;
  };
  auto weights = ExpertWeights::pack(spec, options.device, std::move(*vectors), routed, shared, options.plan);
  if (weights) weights->warnings_ = std::move(warnings);
  return weights;
}

}  // namespace gatefold
