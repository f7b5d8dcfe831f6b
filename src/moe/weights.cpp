#include "moe/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "format/matrix.h"
#include "format/numa.h"
#include "moe/kernel.h"

namespace gatefold {

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
  if (!matrix.input_order.empty())
    return {Code::invalid_argument, "its columns have an order: that is said by LayerVectors::input_order"};
  return {};
}

namespace {

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
  if (v.input_order.size() != (spec.ordered_inputs ? e * h : 0))
    return {Code::invalid_argument, fmt::format("input order has {} values, expected {}",
                                                v.input_order.size(), spec.ordered_inputs ? e * h : 0)};
  std::vector<bool> seen;
  for (std::size_t i = 0; i < v.input_order.size(); ++i) {
    if (i % h == 0) seen.assign(h, false);
    const std::int32_t input = v.input_order[i];
    if (input < 0 || input >= spec.hidden || seen[static_cast<std::size_t>(input)])
      return {Code::invalid_argument,
              fmt::format("the input order of expert {} is no permutation: {} at {}", i / h, input, i % h)};
    seen[static_cast<std::size_t>(input)] = true;
  }
  return {};
}

/// A source whose first matrix is taken at once: what its scales are stored in decides how much memory all of
/// them need. Scales are as the layout has them beside such activations.
class PeekedSource {
 public:
  PeekedSource(const ExpertSource& source, bool used, const WeightLayout& layout, const Operand& activation)
      : source_(source), layout_(layout), activation_(activation) {
    if (used) first_.emplace(take(0, Projection::gate));
  }
  Format scale_format() const { return first_ && *first_ ? (*first_)->scale_format : Format{}; }

  /// Must be called for expert 0's gate first.
  Result<QuantizedMatrix> operator()(int expert, Projection projection) {
    if (!first_) return take(expert, projection);
    Result<QuantizedMatrix> matrix = std::move(*first_);
    first_.reset();
    return matrix;
  }

 private:
  Result<QuantizedMatrix> take(int expert, Projection projection) const {
    Result<QuantizedMatrix> matrix = source_(expert, projection);
    if (!matrix || layout_.scale_format == nullptr) return matrix;
    const Format format = layout_.scale_format(matrix->scheme, matrix->scale_format, activation_);
    if (format != matrix->scale_format) convert_scales(*matrix, format);
    return matrix;
  }

  const ExpertSource& source_;
  const WeightLayout& layout_;
  const Operand activation_;
  std::optional<Result<QuantizedMatrix>> first_;
};

/// Takes the matrices of one expert from a source, packs them, and forgets them.
class Packer {
 public:
  Packer(const WeightLayout& layout, WeightMemory& memory) : layout_(layout), memory_(memory) {}

  /// Where the next expert goes.
  std::size_t next() const { return next_; }

  Status pack(PeekedSource& source, const char* which, int expert, SchemeId scheme, std::int64_t hidden,
              std::int64_t intermediate, Ffn& ffn) {
    const auto take = [&](Projection projection) -> Result<QuantizedMatrix> {
      Result<QuantizedMatrix> matrix = source(expert, projection);
      if (!matrix) return matrix;
      const bool down = projection == Projection::down;
      const Status status =
          check_matrix(*matrix, scheme, down ? hidden : intermediate, down ? intermediate : hidden);
      if (status.ok()) return matrix;
      return Status(status.code(),
                    fmt::format("{} expert {}, {}: {}", which, expert, name(projection), status.message()));
    };
    std::vector<QuantizedMatrix> gate_up;
    for (const Projection projection : {Projection::gate, Projection::up}) {
      Result<QuantizedMatrix> matrix = take(projection);
      if (!matrix) return matrix.status();
      gate_up.push_back(std::move(*matrix));
    }
    PackedMatrix packed[2];
    if (Status status = pack(gate_up.data(), 2, packed); !status.ok()) return status;
    ffn.gate = packed[0];
    ffn.up = packed[1];
    gate_up.clear();
    const Result<QuantizedMatrix> down = take(Projection::down);
    if (!down) return down.status();
    if (Status status = pack(&*down, 1, &ffn.down); !status.ok()) return status;
    const auto& gate = ffn.gate.input_scale;
    const auto& up = ffn.up.input_scale;
    if (gate.has_value() != up.has_value() ||
        (gate && (gate->value != up->value || gate->divides != up->divides)))
      return {Code::unsupported,
              fmt::format("{} expert {}: gate and up have different input scales", which, expert)};
    return {};
  }

  /// Bytes of one expert, each matrix on a 64-byte boundary.
  static std::size_t bytes(const WeightLayout& layout, SchemeId scheme, Format scale_format,
                           std::int64_t hidden, std::int64_t intermediate) {
    return 2 * padded(layout.bytes(scheme, scale_format, intermediate, hidden)) +
           padded(layout.bytes(scheme, scale_format, hidden, intermediate));
  }

 private:
  static std::size_t padded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

  Status pack(const QuantizedMatrix* matrices, int count, PackedMatrix* packed) {
    for (int i = 0; i < count; ++i) {
      const QuantizedMatrix& m = matrices[i];
      packed[i] = {m.scheme, m.n, m.k, m.scale_format, m.tensor_scale, m.input_scale, nullptr};
    }
    const std::size_t at = next_;
    std::size_t each = 0;  // matrices that are packed together may all become as wide as one of them
    for (int i = 0; i < count; ++i) {
      const QuantizedMatrix& m = matrices[i];
      each = std::max(each, padded(layout_.bytes(m.scheme, m.scale_format, m.n, m.k)));
    }
    next_ += each * static_cast<std::size_t>(count);
    if (next_ > memory_.bytes())
      return {
          Code::unsupported,
          fmt::format("scales stored as {}: those of the first matrix were narrower, so that {} of {} bytes "
                      "are missing",
                      name(matrices[0].scale_format), next_ - memory_.bytes(), next_)};
    return memory_.pack(matrices, count, at, packed);
  }

  const WeightLayout& layout_;
  WeightMemory& memory_;
  std::size_t next_ = 0;
};

}  // namespace

Result<ExpertWeights> ExpertWeights::pack(const MoeSpec& spec, const Device& device, LayerVectors vectors,
                                          const ExpertSource& routed, const ExpertSource& shared,
                                          const PlanOptions& plan) {
  if (Status status = spec.validate(); !status.ok()) return status;
  if (Status status = check_vectors(spec, vectors); !status.ok()) return status;

  auto state = std::make_shared<State>();
  state->spec = spec;
  state->device = device;
  state->vectors = std::move(vectors);
  std::vector<std::string> refused;
  const KernelInfo* kernel = choose_kernel(spec, plan, device, &refused);
  if (kernel == nullptr)
    return Status(Code::unsupported,
                  fmt::format("no kernel for {}: {}", scheme(spec.scheme).name, fmt::join(refused, "; ")));
  state->layout = kernel->layout;
  PeekedSource routed_source(routed, true, *state->layout, effective_activation(spec.scheme, spec, plan)),
      shared_source(shared, spec.shared.intermediate != 0, *state->layout,
                    effective_activation(spec.shared.scheme, spec, plan));
  const std::size_t each = Packer::bytes(*state->layout, spec.scheme, routed_source.scale_format(),
                                         spec.hidden, spec.intermediate);
  const std::size_t shared_bytes =
      spec.shared.intermediate == 0
          ? 0
          : Packer::bytes(*state->layout, spec.shared.scheme, shared_source.scale_format(), spec.hidden,
                          spec.shared.intermediate);
  auto memory = state->layout->allocate(each * static_cast<std::size_t>(spec.experts) + shared_bytes, device);
  if (!memory)
    return Status(memory.status().code(),
                  fmt::format("{} experts of {} bytes: {}", spec.experts, each, memory.status().message()));
  state->memory = std::move(*memory);
  Packer packer(*state->layout, *state->memory);
  state->routed.resize(static_cast<std::size_t>(spec.experts));
  int with_static = 0;
  for (int e = 0; e < spec.experts; ++e) {
    Ffn& ffn = state->routed[e];
    state->memory->expect(packer.next(), each, e);
    if (Status status =
            packer.pack(routed_source, "routed", e, spec.scheme, spec.hidden, spec.intermediate, ffn);
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
  const PackedMatrix& first = state->routed.front().gate;
  state->expert_bytes =
      2 * state->layout->bytes(spec.scheme, first.scale_format, spec.intermediate, spec.hidden) +
      state->layout->bytes(spec.scheme, first.scale_format, spec.hidden, spec.intermediate);
  state->static_input_scales = with_static != 0;
  if (spec.shared.intermediate != 0) {
    if (Status status = packer.pack(shared_source, "shared", 0, spec.shared.scheme, spec.hidden,
                                    spec.shared.intermediate, state->shared);
        !status.ok())
      return status;
    if (state->shared.gate.input_scale.has_value() != state->shared.down.input_scale.has_value())
      return Status(Code::invalid_argument,
                    "shared expert: some of its matrices have an input scale, some have none");
  }
  if (Status status = state->memory->finish(*state); !status.ok()) return status;
  return ExpertWeights(std::move(state));
}

Result<std::unique_ptr<WeightMemory>> HostWeights::allocate(std::size_t bytes, Pack pack, Unpack unpack) {
  Arena arena(bytes);
  if (arena.data() == nullptr) return Status(Code::io_error, fmt::format("no memory for {} bytes", bytes));
  return std::unique_ptr<WeightMemory>(new HostWeights(std::move(arena), pack, unpack));
}
void HostWeights::expect(std::size_t at, std::size_t bytes, int expert) {
  prefer_node(arena_.data() + at, bytes, expert % numa_nodes());  // whose threads take it first
}
Status HostWeights::pack(const QuantizedMatrix* matrices, int count, std::size_t at, PackedMatrix* packed) {
  pack_(matrices, count, arena_.data() + at, packed);
  return {};
}
std::string HostWeights::describe() const {
  return fmt::format("{:.0f} % in 2 MiB pages", 100 * arena_.large_pages());
}

Result<QuantizedMatrix> ExpertWeights::matrix(int expert, Projection projection) const {
  if (expert < 0 || expert >= state_->spec.experts)
    return Status(Code::invalid_argument,
                  fmt::format("expert {} is not within 0..{}", expert, state_->spec.experts - 1));
  auto matrix = state_->memory->unpack(state_->routed[static_cast<std::size_t>(expert)], projection);
  if (!matrix)
    return Status(matrix.status().code(),
                  fmt::format("expert {}, {}: {}", expert, name(projection), matrix.status().message()));
  if (state_->spec.ordered_inputs && projection != Projection::down) {
    const auto order = state_->vectors.input_order.begin() + std::ptrdiff_t{expert} * state_->spec.hidden;
    matrix->input_order.assign(order, order + state_->spec.hidden);
  }
  return matrix;
}

const MoeSpec& ExpertWeights::spec() const {
  return state_->spec;
}
std::span<const std::string> ExpertWeights::warnings() const {
  return warnings_;
}
const Device& ExpertWeights::device() const {
  return state_->device;
}

std::string ExpertWeights::describe() const {
  return fmt::format("weights: {} bytes as {}, {}\n", state_->memory->bytes(), state_->layout->name,
                     state_->memory->describe());
}
std::size_t ExpertWeights::packed_expert_bytes() const {
  return state_->expert_bytes;
}
std::size_t ExpertWeights::packed_bytes() const {
  return state_->expert_bytes * state_->routed.size();
}

}  // namespace gatefold
