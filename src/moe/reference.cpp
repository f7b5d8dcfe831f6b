#include "moe/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "format/scale_rule.h"

namespace gatefold {
namespace {

using Doubles = std::vector<double>;

double code_value(Format format, std::uint32_t code) {
  return with_format(format, [&]<Format F>() { return static_cast<double>(decode<F>(code)); });
}

/// Code `index` of a packed row.
std::uint32_t code_at(Format format, const std::byte* row, std::int64_t index) {
  if (format.bits == 4) return static_cast<std::uint32_t>(row[index / 2]) >> (index % 2 * 4) & 15;
  std::uint32_t code = 0;
  std::memcpy(&code, row + index * (format.bits / 8), format.bits / 8);
  return code;
}

double apply(const Activation& a, double gate, double up) {
  const double g = std::min<double>(gate, a.limit), u = std::clamp<double>(up, -a.limit, a.limit);
  const double pi = 3.14159265358979323846;
  switch (a.kind) {
    case Activation::Kind::geglu:
      return 0.5 * g * (1 + std::erf(g / std::sqrt(2.0))) * u;
    case Activation::Kind::geglu_tanh:
      return 0.5 * g * (1 + std::tanh(std::sqrt(2 / pi) * (g + 0.044715 * g * g * g))) * u;
    default:
      return g / (1 + std::exp(-a.alpha * g)) * (u + a.beta);
  }
}

/// y[n] = W[n, :] . x
Doubles multiply(const Doubles& w, const double* x, std::int64_t n, std::int64_t k) {
  Doubles y(static_cast<std::size_t>(n));
  for (std::int64_t row = 0; row < n; ++row)
    for (std::int64_t i = 0; i < k; ++i) y[row] += w[row * k + i] * x[i];
  return y;
}

/// Scores, group limit, top-k, weights of one token (moe_spec.h).
void route_reference(const MoeSpec& spec, const double* logits, const std::vector<float>& bias,
                     std::int32_t* ids, double* weights) {
  const Routing& routing = spec.routing;
  const int experts = spec.experts, size = experts / routing.groups;
  Doubles scores(experts), selection(experts);
  const double largest = *std::max_element(logits, logits + experts);
  double sum = 0;
  for (int e = 0; e < experts; ++e) sum += std::exp(logits[e] - largest);
  for (int e = 0; e < experts; ++e) {
    scores[e] = routing.score == Score::softmax   ? std::exp(logits[e] - largest) / sum
                : routing.score == Score::sigmoid ? 1 / (1 + std::exp(-logits[e]))
                                                  : std::sqrt(std::log1p(std::exp(logits[e])));
    selection[e] = scores[e] + (bias.empty() ? 0.0 : bias[e]);
  }
  std::vector<std::pair<double, int>> groups;  // best first, ties to the lower index
  for (int g = 0; g < routing.groups; ++g) {
    Doubles members(selection.begin() + g * size, selection.begin() + (g + 1) * size);
    std::sort(members.rbegin(), members.rend());
    groups.push_back(
        {-(routing.group_score == GroupScore::max || size == 1 ? members[0] : members[0] + members[1]), g});
  }
  std::sort(groups.begin(), groups.end());
  std::vector<std::pair<double, int>> order;
  for (int g = 0; g < routing.top_groups; ++g)
    for (int e = groups[g].second * size; e < (groups[g].second + 1) * size; ++e)
      order.push_back({-selection[e], e});
  std::sort(order.begin(), order.end());
  double total = 0;
  for (int k = 0; k < spec.top_k; ++k) {
    ids[k] = order[k].second;
    total += weights[k] = scores[ids[k]];
  }
  for (int k = 0; k < spec.top_k; ++k) {
    if (routing.renormalize) weights[k] /= total + routing.epsilon;
    weights[k] *= routing.scaling_factor;
  }
}

struct Dense {
  Doubles gate, up, down;
  explicit Dense(const ReferenceFfn& ffn)
      : gate(reference_dequantize(ffn.gate)),
        up(reference_dequantize(ffn.up)),
        down(reference_dequantize(ffn.down)) {}
};

/// What down's inputs are rounded from.
void narrow(bool is_narrow, Doubles& y) {
  if (!is_narrow) return;
  for (double& number : y) number = round_to<formats::bf16>(static_cast<float>(number));
}

}  // namespace

Doubles reference_dequantize(const QuantizedMatrix& matrix) {
  const Operand& operand = scheme(matrix.scheme).weight;
  const QuantizedLayout layout = matrix.layout();
  Doubles out(static_cast<std::size_t>(matrix.n * matrix.k));
  for (std::int64_t n = 0; n < matrix.n; ++n)
    for (std::int64_t k = 0; k < matrix.k; ++k) {
      double value =
          code_value(operand.value, code_at(operand.value, matrix.values.data() + n * layout.row_bytes, k));
      if (operand.quantized()) {
        const std::int64_t row = operand.group.n == 0 ? 0 : n / operand.group.n;
        const std::int64_t col = operand.group.k == 0 ? 0 : k / operand.group.k;
        if (operand.zero_point.stored())
          value -= code_at(operand.zero_point, matrix.zero_points.data() + row * layout.zero_row_bytes, col);
        const std::byte* scales =
            matrix.scales.data() + row * layout.scale_cols * (matrix.scale_format.bits / 8);
        value *= code_value(matrix.scale_format, code_at(matrix.scale_format, scales, col));
        if (operand.tensor_scale.stored())
          value = matrix.tensor_scale.divides ? value / matrix.tensor_scale.value
                                              : value * matrix.tensor_scale.value;
      }
      out[n * matrix.k + (matrix.input_order.empty() ? k : matrix.input_order[k])] = value;
    }
  return out;
}

void reference_round(const Operand& operand, const TensorScale* static_scale, std::int64_t k, Doubles& x) {
  if (!operand.value.stored()) return;
  const auto amax_of = [&](std::int64_t begin, std::int64_t end) {
    double amax = 0;
    for (std::int64_t i = begin; i < end; ++i) amax = std::max(amax, std::abs(x[i]));
    return static_cast<float>(amax);
  };
  const auto rows = static_cast<std::int64_t>(x.size()) / k;
  const std::int64_t group = operand.group.k == 0 ? k : operand.group.k;
  const float batch_amax = amax_of(0, rows * k);
  for (std::int64_t row = 0; row < rows; ++row) {
    TensorScale two_level;
    if (operand.tensor_scale.stored())
      two_level = static_scale != nullptr
                      ? *static_scale
                      : TensorScale{tensor_scale(operand, amax_of(row * k, (row + 1) * k)), false};
    for (std::int64_t begin = row * k; begin < (row + 1) * k; begin += group) {
      const std::int64_t end = std::min(begin + group, (row + 1) * k);
      double scale = 1;
      if (operand.quantized()) {
        const float amax = operand.group.n == 0 ? batch_amax : amax_of(begin, end);
        if (operand.group.n == 0 && static_scale != nullptr) {
          scale = static_scale->apply(1.0f);
        } else {
          scale = two_level.apply(group_scale(operand, {0, amax}, two_level).scale);
          if (operand.group.k == 0 && operand.value == formats::e4m3 && operand.scale == formats::f32 &&
              amax > 0)
            scale = std::max<double>(scale, 1.0f / (448.0f * 512.0f));
        }
      }
      for (std::int64_t i = begin; i < end; ++i) {
        const auto scaled = scale == 0 ? 0.0f : static_cast<float>(x[i] / scale);
        x[i] = scale * with_format(operand.value,
                                   [&]<Format F>() { return static_cast<double>(round_to<F>(scaled)); });
      }
    }
  }
}

ReferenceResult reference_moe(const MoeSpec& spec, const PlanOptions& options,
                              const ReferenceWeights& weights, const ReferenceInputs& inputs) {
  const std::int64_t hidden = spec.hidden, mid = spec.intermediate, top_k = spec.top_k;
  const auto tokens = static_cast<std::int64_t>(inputs.hidden.size()) / hidden;
  const LayerVectors& v = weights.vectors;
  ReferenceResult result{Doubles(inputs.hidden.size()), inputs.topk_ids, inputs.topk_weights};

  if (result.topk_ids.empty()) {
    result.topk_ids.resize(tokens * top_k);
    result.topk_weights.resize(tokens * top_k);
    const Doubles router(v.router.begin(), v.router.end());
    for (std::int64_t t = 0; t < tokens; ++t) {
      Doubles logits(spec.experts);
      if (inputs.logits.empty()) {
        logits = multiply(router, &inputs.hidden[t * hidden], spec.experts, hidden);
        for (int e = 0; e < spec.experts && !v.router_bias.empty(); ++e) logits[e] += v.router_bias[e];
      } else {
        std::copy_n(&inputs.logits[t * spec.experts], spec.experts, logits.begin());
      }
      route_reference(spec, logits.data(), v.correction_bias, &result.topk_ids[t * top_k],
                      &result.topk_weights[t * top_k]);
    }
  }

  // All slots of the layer, so that a scale per tensor sees them all.
  std::vector<Dense> experts(weights.routed.begin(), weights.routed.end());
  const Operand activation = effective_activation(spec.scheme, spec, options);
  const bool use_static = weights.routed[0].gate.input_scale.has_value() && activation.quantized();
  Doubles rounded = inputs.hidden;
  if (!use_static) reference_round(activation, nullptr, hidden, rounded);
  Doubles mids(static_cast<std::size_t>(tokens * top_k * mid));
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t s = 0; s < tokens * top_k; ++s) {
    const int e = result.topk_ids[s];
    Doubles x(&rounded[s / top_k * hidden], &rounded[s / top_k * hidden] + hidden);
    if (use_static) reference_round(activation, &*weights.routed[e].gate.input_scale, hidden, x);
    const Doubles gate = multiply(experts[e].gate, x.data(), mid, hidden);
    const Doubles up = multiply(experts[e].up, x.data(), mid, hidden);
    Doubles y(mid);
    for (std::int64_t i = 0; i < mid; ++i)
      y[i] = apply(spec.activation, gate[i] + (spec.bias ? v.gate_bias[e * mid + i] : 0),
                   up[i] + (spec.bias ? v.up_bias[e * mid + i] : 0));
    narrow(inputs.narrow_intermediate, y);
    if (use_static) reference_round(activation, &*weights.routed[e].down.input_scale, mid, y);
    std::copy(y.begin(), y.end(), &mids[s * mid]);
  }
  if (!use_static && !mids.empty()) reference_round(activation, nullptr, mid, mids);
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
      const int e = result.topk_ids[s];
      const Doubles y = multiply(experts[e].down, &mids[s * mid], hidden, mid);
      for (std::int64_t h = 0; h < hidden; ++h)
        result.hidden[t * hidden + h] +=
            result.topk_weights[s] * (y[h] + (spec.bias ? v.down_bias[e * hidden + h] : 0));
    }

  if (spec.shared.intermediate != 0) {
    const Dense shared(weights.shared);
    const std::int64_t width = spec.shared.intermediate;
    const Operand operand = effective_activation(spec.shared.scheme, spec, options);
    // All tokens, for the same reason.
    const auto round = [&](const QuantizedMatrix& by, std::int64_t k, Doubles& rows) {
      reference_round(operand, by.input_scale ? &*by.input_scale : nullptr, k, rows);
    };
    Doubles x = inputs.hidden, y(static_cast<std::size_t>(tokens * width));
    round(weights.shared.gate, hidden, x);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const Doubles gate = multiply(shared.gate, &x[t * hidden], width, hidden);
      const Doubles up = multiply(shared.up, &x[t * hidden], width, hidden);
      for (std::int64_t i = 0; i < width; ++i) y[t * width + i] = apply(spec.activation, gate[i], up[i]);
    }
    narrow(inputs.narrow_shared, y);
    round(weights.shared.down, width, y);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const double* raw = &inputs.hidden[t * hidden];
      const Doubles out = multiply(shared.down, &y[t * width], hidden, width);
      double share = 1;
      if (spec.shared.gated) {
        double dot = 0;
        for (std::int64_t h = 0; h < hidden; ++h) dot += raw[h] * v.shared_gate[h];
        share = 1 / (1 + std::exp(-dot));
      }
      for (std::int64_t h = 0; h < hidden; ++h) result.hidden[t * hidden + h] += share * out[h];
    }
  }
  return result;
}

}  // namespace gatefold
