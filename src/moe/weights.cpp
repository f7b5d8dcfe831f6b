#include "moe/weights.h"

#include <fmt/format.h>

#include "format/matrix.h"
#include "moe/kernel.h"

namespace gatefold {
namespace {

Status check_matrix(const QuantizedMatrix& matrix, SchemeId wanted, std::int64_t n, std::int64_t k) {
  if (matrix.scheme != wanted)
    return {Code::invalid_argument, fmt::format("is {}, but the layer's scheme is {}",
                                                scheme(matrix.scheme).name, scheme(wanted).name)};
  if (matrix.n != n || matrix.k != k)
    return {Code::invalid_argument, fmt::format("is [{}, {}], expected [{}, {}]", matrix.n, matrix.k, n, k)};
  const QuantizedLayout layout = matrix.layout();
  if (matrix.values.size() != layout.value_bytes || matrix.scales.size() != layout.scale_bytes ||
      matrix.zero_points.size() != layout.zero_bytes)
    return {Code::invalid_argument,
            fmt::format("has {} + {} + {} bytes of values, scales and zero points, expected {} + {} + {}",
                        matrix.values.size(), matrix.scales.size(), matrix.zero_points.size(),
                        layout.value_bytes, layout.scale_bytes, layout.zero_bytes)};
  return {};
}

Status check_vector(const std::vector<float>& vector, std::size_t wanted, const char* what) {
  if (vector.size() == wanted) return {};
  return {Code::invalid_argument, fmt::format("{} has {} values, expected {}", what, vector.size(), wanted)};
}

Status check_vectors(const MoeSpec& spec, const LayerVectors& v) {
  const auto e = static_cast<std::size_t>(spec.experts), h = static_cast<std::size_t>(spec.hidden),
             i = static_cast<std::size_t>(spec.intermediate);
  const auto optional = [](const std::vector<float>& vector, std::size_t size) {
    return vector.empty() ? 0 : size;
  };
  const std::pair<const std::vector<float>*, std::pair<std::size_t, const char*>> all[] = {
      {&v.router, {optional(v.router, e * h), "router"}},
      {&v.router_bias, {optional(v.router_bias, e), "router bias"}},
      {&v.correction_bias, {spec.routing.correction_bias ? e : 0, "correction bias"}},
      {&v.shared_gate, {spec.shared.gated ? h : 0, "shared expert gate"}},
      {&v.gate_bias, {spec.bias ? e * i : 0, "gate bias"}},
      {&v.up_bias, {spec.bias ? e * i : 0, "up bias"}},
      {&v.down_bias, {spec.bias ? e * h : 0, "down bias"}},
  };
  for (const auto& [vector, wanted] : all)
    if (Status status = check_vector(*vector, wanted.first, wanted.second); !status.ok()) return status;
  return {};
}

struct Shape {
  SchemeId scheme;
  std::int64_t hidden, intermediate;
};

Status take(const ExpertSource& source, const char* which, int expert, const Shape& shape, Ffn& ffn) {
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    const bool down = projection == Projection::down;
    Result<QuantizedMatrix> matrix = source(expert, projection);
    if (!matrix) return matrix.status();
    const Status status = check_matrix(*matrix, shape.scheme, down ? shape.hidden : shape.intermediate,
                                       down ? shape.intermediate : shape.hidden);
    if (!status.ok())
      return {status.code(),
              fmt::format("{} expert {}, {}: {}", which, expert, name(projection), status.message())};
    (projection == Projection::gate ? ffn.gate : down ? ffn.down : ffn.up) = std::move(*matrix);
  }
  const auto& gate = ffn.gate.input_scale;
  const auto& up = ffn.up.input_scale;
  if (gate.has_value() != up.has_value() ||
      (gate && (gate->value != up->value || gate->divides != up->divides)))
    return {Code::unsupported,
            fmt::format("{} expert {}: gate and up have different input scales", which, expert)};
  return {};
}

}  // namespace

Result<ExpertWeights> ExpertWeights::pack(const MoeSpec& spec, const Device& device, LayerVectors vectors,
                                          const ExpertSource& routed, const ExpertSource& shared) {
  if (Status status = spec.validate(); !status.ok()) return status;
  if (device.kind != Device::Kind::cpu) return Status(Code::unsupported, "this build runs on CPUs only");
  if (Status status = check_vectors(spec, vectors); !status.ok()) return status;

  auto state = std::make_shared<State>();
  state->spec = spec;
  state->device = device;
  state->vectors = std::move(vectors);
  state->layout = cpu_kernels().front().layout;
  state->routed.resize(static_cast<std::size_t>(spec.experts));
  int with_static = 0;
  for (int e = 0; e < spec.experts; ++e) {
    Ffn& ffn = state->routed[e];
    if (Status status = take(routed, "routed", e, {spec.scheme, spec.hidden, spec.intermediate}, ffn);
        !status.ok())
      return status;
    with_static += ffn.gate.input_scale.has_value() && ffn.down.input_scale.has_value();
    const bool any = ffn.gate.input_scale.has_value() || ffn.down.input_scale.has_value();
    if (with_static != (any ? e + 1 : 0))
      return Status(
          Code::invalid_argument,
          fmt::format("routed expert {}: some of the layer's matrices have an input scale, some have none",
                      e));
  }
  state->static_input_scales = with_static != 0;
  if (spec.shared.intermediate != 0)
    if (Status status = take(shared, "shared", 0, {spec.shared.scheme, spec.hidden, spec.shared.intermediate},
                             state->shared);
        !status.ok())
      return status;
  return ExpertWeights(std::move(state));
}

const MoeSpec& ExpertWeights::spec() const {
  return state_->spec;
}
const Device& ExpertWeights::device() const {
  return state_->device;
}

std::size_t ExpertWeights::packed_expert_bytes() const {
  const Ffn& ffn = state_->routed.front();
  return ffn.gate.layout().total() + ffn.up.layout().total() + ffn.down.layout().total();
}
std::size_t ExpertWeights::packed_bytes() const {
  return packed_expert_bytes() * state_->routed.size();
}

}  // namespace gatefold
