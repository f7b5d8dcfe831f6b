#include "cpu/moe_layer.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "cpu/activation.h"
#include "cpu/gemm.h"
#include "format/matrix.h"

namespace gatefold {
namespace {

/// Rows of gate and of up (or of down) that one step decodes: they stay in L2 while tokens pass by.
constexpr std::int64_t kBlock = 8;
/// Tokens of one step: their outputs stay in L1.
constexpr std::int64_t kTokenBlock = 32;

/// A buffer of the workspace.
template <class T>
struct Buffer {
  std::size_t offset = 0;
  T* at(std::byte* base) const { return reinterpret_cast<T*>(base + offset); }
};

/// T tokens, S = T * top_k slots; hidden H, intermediate I, shared intermediate Is, each padded.
/// A slot's position is its place when slots are sorted by expert, tokens in order within an expert.
struct Buffers {
  Buffer<std::int32_t> ids;       // [S] expert of a slot
  Buffer<float> weights;          // [S] routing weight of a slot
  Buffer<std::int32_t> offsets;   // [E + 1] first position of an expert
  Buffer<std::int32_t> active;    // [E] experts with slots
  Buffer<std::int32_t> position;  // [S] slot -> position
  Buffer<std::int32_t> slot;      // [S] position -> slot
  Buffer<float> hidden;           // [T, H]
  Buffer<float> routed_in;        // [T, H] or, with static scales, [S, H] by position
  Buffer<float> routed_mid;       // [S, I] by position
  Buffer<float> routed_out;       // [S, H] by position
  Buffer<float> amax;             // [S]
  Buffer<float> shared_in;        // [T, H]
  Buffer<float> shared_mid;       // [T, Is]
  Buffer<float> shared_out;       // [T, H]
  Buffer<float> decoded;          // per thread [2 * kBlock, K]
  Buffer<float> scales;           // per thread [K]; zeros likewise
  Buffer<float> zeros;
  Buffer<std::byte> codes;    // per thread [2 * K]
  Buffer<GroupRange> ranges;  // per thread [K]
  Buffer<float> routing;      // per thread [3 * E]
  std::size_t k = 0;          // K: the largest padded row

  Buffers(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout) {
    const auto tokens = static_cast<std::size_t>(options.max_tokens);
    const auto threads = static_cast<std::size_t>(options.threads),
               experts = static_cast<std::size_t>(spec.experts);
    const std::size_t slots = tokens * static_cast<std::size_t>(spec.top_k);
    const auto hidden_k = static_cast<std::size_t>(padded(spec.hidden));
    const auto mid_k = static_cast<std::size_t>(padded(spec.intermediate));
    const auto shared_k = static_cast<std::size_t>(padded(spec.shared.intermediate));
    const Operand activation = effective_activation(spec.scheme, spec, options);
    const bool may_be_static =
        activation.quantized() && (activation.group.n == 0 || activation.tensor_scale.stored());
    k = std::max({hidden_k, mid_k, shared_k});

    ids = {layout.add<std::int32_t>("topk_ids", slots)};
    weights = {layout.add<float>("topk_weights", slots)};
    offsets = {layout.add<std::int32_t>("expert_offsets", experts + 1)};
    active = {layout.add<std::int32_t>("active_experts", experts)};
    position = {layout.add<std::int32_t>("slot_positions", slots)};
    slot = {layout.add<std::int32_t>("sorted_slots", slots)};
    hidden = {layout.add<float>("hidden", tokens * hidden_k)};
    routed_in = {layout.add<float>("routed_in", (may_be_static ? slots : tokens) * hidden_k)};
    routed_mid = {layout.add<float>("routed_mid", slots * mid_k)};
    routed_out = {layout.add<float>("routed_out", slots * hidden_k)};
    amax = {layout.add<float>("row_amax", slots)};
    const std::size_t shared_tokens = shared_k != 0 ? tokens : 0;
    shared_in = {layout.add<float>("shared_in", shared_tokens * hidden_k)};
    shared_mid = {layout.add<float>("shared_mid", shared_tokens * shared_k)};
    shared_out = {layout.add<float>("shared_out", shared_tokens * hidden_k)};
    decoded = {layout.add<float>("decoded_rows", threads * 2 * kBlock * k)};
    scales = {layout.add<float>("scales", threads * k)};
    zeros = {layout.add<float>("zero_points", threads * k)};
    codes = {layout.add<std::byte>("codes", threads * 2 * k)};
    ranges = {layout.add<GroupRange>("ranges", threads * k)};
    routing = {layout.add<float>("routing", threads * 3 * experts)};
  }
};

float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

float apply(const Activation& a, float gate, float up) {
  const float g = std::min(gate, a.limit);
  const float u = std::clamp(up, -a.limit, a.limit);
  switch (a.kind) {
    case Activation::Kind::geglu:
      return 0.5f * g * (1.0f + std::erf(g * 0.70710678f)) * u;
    case Activation::Kind::geglu_tanh:
      return 0.5f * g * (1.0f + std::tanh(0.79788456f * (g + 0.044715f * g * g * g))) * u;
    default:
      return g * sigmoid(a.alpha * g) * (u + a.beta);
  }
}

/// The feed-forward of one expert over a list of rows.
struct Job {
  const Ffn* ffn;
  std::int64_t rows;         // slots or tokens
  const float* in;           // [*, H padded]
  const std::int32_t* slot;  // row i reads in[slot[i] / divide]; nullptr: in[i]
  int divide;
  float* mid;              // [rows, I padded]
  float* out;              // [rows, H padded]
  const float* gate_bias;  // [I], or nullptr; likewise
  const float* up_bias;
  const float* down_bias;  // [H]

  const float* input(std::int64_t row, std::int64_t stride) const {
    return in + (slot != nullptr ? slot[row] / divide : row) * stride;
  }
};

/// One thread's view of a call. Every thread of the team runs `run`; the phases are separated by barriers
/// (`single`, and the loops of gate_up and down, end with one).
class Layer {
 public:
  Layer(Isa isa, const MoeCall& call, const Buffers& b)
      : call_(call),
        spec_(call.spec),
        state_(call.weights),
        b_(b),
        base_(call.workspace),
        kernels_(row_kernels(isa)),
        multiply_(multiply(isa)),
        tokens_(call.inputs.hidden.rows),
        slots_(tokens_ * spec_.top_k),
        hidden_k_(padded(spec_.hidden)),
        mid_k_(padded(spec_.intermediate)),
        shared_k_(padded(spec_.shared.intermediate)),
        routed_act_(effective_activation(spec_.scheme, spec_, call.options)),
        shared_act_(effective_activation(spec_.shared.scheme, spec_, call.options)),
        static_in_(state_.static_input_scales && routed_act_.quantized() &&
                   (routed_act_.group.n == 0 || routed_act_.tensor_scale.stored())) {
    const auto thread = static_cast<std::size_t>(omp_get_thread_num());
    decoded_ = b.decoded.at(base_) + thread * 2 * kBlock * b.k;
    scratch_ = {b.codes.at(base_) + thread * 2 * b.k, b.ranges.at(base_) + thread * b.k,
                b.scales.at(base_) + thread * b.k, b.zeros.at(base_) + thread * b.k};
    routing_ = b.routing.at(base_) + thread * 3 * static_cast<std::size_t>(spec_.experts);
  }

  void run() {
    load_and_route();
#pragma omp barrier
#pragma omp single
    sort_slots();
    round_inputs();
#pragma omp barrier
    gate_up();
    round_mid();
#pragma omp barrier
    down();
    combine();
  }

 private:
  /// hidden -> f32 rows; expert ids and weights of every token.
  void load_and_route() {
    const MatrixView& in = call_.inputs.hidden;
    float* hidden = b_.hidden.at(base_);
#pragma omp for schedule(static) nowait
    for (std::int64_t t = 0; t < tokens_; ++t) {
      float* row = hidden + t * hidden_k_;
      kernels_.widen(in.dtype, in.data, t * spec_.hidden, spec_.hidden, row);
      std::fill(row + spec_.hidden, row + hidden_k_, 0.0f);
      route(t, row);
    }
  }

  void route(std::int64_t t, const float* row) {
    std::int32_t* ids = b_.ids.at(base_) + t * spec_.top_k;
    float* weights = b_.weights.at(base_) + t * spec_.top_k;
    if (call_.inputs.topk_ids != nullptr) {
      std::copy_n(call_.inputs.topk_ids + t * spec_.top_k, spec_.top_k, ids);
      std::copy_n(call_.inputs.topk_weights + t * spec_.top_k, spec_.top_k, weights);
    } else {
      const LayerVectors& v = state_.vectors;
      const float* logits = call_.inputs.router_logits + t * spec_.experts;
      if (call_.inputs.router_logits == nullptr) {
        logits = routing_;
        router_logits(row);
      }
      route_token(spec_.routing, spec_.experts, spec_.top_k, logits,
                  v.correction_bias.empty() ? nullptr : v.correction_bias.data(), routing_ + spec_.experts,
                  ids, weights);
    }
    if (call_.outputs.topk_ids != nullptr)
      std::copy_n(ids, spec_.top_k, call_.outputs.topk_ids + t * spec_.top_k);
    if (call_.outputs.topk_weights != nullptr)
      std::copy_n(weights, spec_.top_k, call_.outputs.topk_weights + t * spec_.top_k);
  }

  /// Router rows are not padded, so each is copied beside the zeros that the multiply wants.
  void router_logits(const float* row) {
    const LayerVectors& v = state_.vectors;
    for (int e = 0; e < spec_.experts; e += static_cast<int>(kBlock)) {
      const std::int64_t count = std::min<std::int64_t>(kBlock, spec_.experts - e);
      for (std::int64_t i = 0; i < count; ++i) {
        float* padded_row = decoded_ + i * hidden_k_;
        std::copy_n(v.router.data() + (e + i) * spec_.hidden, spec_.hidden, padded_row);
        std::fill(padded_row + spec_.hidden, padded_row + hidden_k_, 0.0f);
      }
      multiply_(&row, 1, decoded_, count, hidden_k_, routing_ + e, spec_.experts);
    }
    for (int e = 0; !v.router_bias.empty() && e < spec_.experts; ++e) routing_[e] += v.router_bias[e];
  }

  /// Counting sort of the slots by expert; stable, so the order is a function of the ids alone.
  void sort_slots() {
    const std::int32_t* ids = b_.ids.at(base_);
    std::int32_t* offsets = b_.offsets.at(base_);
    std::int32_t* active = b_.active.at(base_);
    std::fill_n(offsets, spec_.experts + 1, 0);
    for (std::int64_t s = 0; s < slots_; ++s) ++offsets[ids[s] + 1];
    for (int e = 0; e < spec_.experts; ++e) {
      active[e] = offsets[e];  // next free position, until the slots are placed
      offsets[e + 1] += offsets[e];
      active[e] = offsets[e];
    }
    for (std::int64_t s = 0; s < slots_; ++s) {
      const std::int32_t position = active[ids[s]]++;
      b_.position.at(base_)[s] = position;
      b_.slot.at(base_)[position] = static_cast<std::int32_t>(s);
    }
    int used = 0;
    for (int e = 0; e < spec_.experts; ++e)
      if (offsets[e] < offsets[e + 1]) active[used++] = e;
    if (used < spec_.experts) active[used] = -1;
  }

  int active_experts() const {
    const std::int32_t* active = b_.active.at(base_);
    return static_cast<int>(std::find(active, active + spec_.experts, -1) - active);
  }

  const Ffn& ffn_of(std::int64_t position) const {
    return state_.routed[b_.ids.at(base_)[b_.slot.at(base_)[position]]];
  }

  void round_inputs() {
    const float* hidden = b_.hidden.at(base_);
    const bool per_batch = routed_act_.quantized() && routed_act_.group.n == 0 && !static_in_;
    if (per_batch) measure(hidden, tokens_, spec_.hidden, hidden_k_);
    const TensorRange range{{}, per_batch ? batch_amax(tokens_) : 0};
    float* routed = b_.routed_in.at(base_);
#pragma omp for schedule(static) nowait
    for (std::int64_t row = 0; row < (static_in_ ? slots_ : tokens_); ++row) {
      const std::int64_t token = static_in_ ? b_.slot.at(base_)[row] / spec_.top_k : row;
      const TensorRange own = static_in_ ? TensorRange{ffn_of(row).gate.input_scale, 0} : range;
      float* out = std::copy_n(hidden + token * hidden_k_, hidden_k_, routed + row * hidden_k_) - hidden_k_;
      round_activations(kernels_, routed_act_, own, scratch_, out, spec_.hidden);
    }
    if (shared_k_ == 0) return;
    float* shared = b_.shared_in.at(base_);
#pragma omp for schedule(static) nowait
    for (std::int64_t t = 0; t < tokens_; ++t) {
      std::copy_n(hidden + t * hidden_k_, hidden_k_, shared + t * hidden_k_);
      round_activations(kernels_, shared_act_, {}, scratch_, shared + t * hidden_k_, spec_.hidden);
    }
  }

  void round_mid() {
    const bool per_batch = routed_act_.quantized() && routed_act_.group.n == 0 && !static_in_;
    float* mid = b_.routed_mid.at(base_);
    if (per_batch) measure(mid, slots_, spec_.intermediate, mid_k_);
    const TensorRange range{{}, per_batch ? batch_amax(slots_) : 0};
#pragma omp for schedule(static) nowait
    for (std::int64_t row = 0; row < slots_; ++row)
      round_activations(kernels_, routed_act_,
                        static_in_ ? TensorRange{ffn_of(row).down.input_scale, 0} : range, scratch_,
                        mid + row * mid_k_, spec_.intermediate);
    if (shared_k_ == 0) return;
#pragma omp for schedule(static) nowait
    for (std::int64_t t = 0; t < tokens_; ++t)
      round_activations(kernels_, shared_act_, {}, scratch_, b_.shared_mid.at(base_) + t * shared_k_,
                        spec_.shared.intermediate);
  }

  /// amax of every row; then (after the loop's barrier) every thread finds the same maximum.
  void measure(const float* x, std::int64_t rows, std::int64_t k, std::int64_t stride) {
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < rows; ++row)
      b_.amax.at(base_)[row] = row_amax(kernels_, x + row * stride, k);
  }
  float batch_amax(std::int64_t rows) const {
    const float* amax = b_.amax.at(base_);
    return *std::max_element(amax, amax + rows);
  }

  Job routed_job(int expert) const {
    const LayerVectors& v = state_.vectors;
    const std::int64_t first = b_.offsets.at(base_)[expert];
    const std::int64_t h = spec_.hidden, i = spec_.intermediate, e = expert;
    return {.ffn = &state_.routed[expert],
            .rows = b_.offsets.at(base_)[expert + 1] - first,
            .in = b_.routed_in.at(base_) + (static_in_ ? first * hidden_k_ : 0),
            .slot = static_in_ ? nullptr : b_.slot.at(base_) + first,
            .divide = spec_.top_k,
            .mid = b_.routed_mid.at(base_) + first * mid_k_,
            .out = b_.routed_out.at(base_) + first * hidden_k_,
            .gate_bias = spec_.bias ? v.gate_bias.data() + e * i : nullptr,
            .up_bias = spec_.bias ? v.up_bias.data() + e * i : nullptr,
            .down_bias = spec_.bias ? v.down_bias.data() + e * h : nullptr};
  }
  Job shared_job() const {
    return {.ffn = &state_.shared,
            .rows = tokens_,
            .in = b_.shared_in.at(base_),
            .slot = nullptr,
            .divide = 1,
            .mid = b_.shared_mid.at(base_),
            .out = b_.shared_out.at(base_),
            .gate_bias = nullptr,
            .up_bias = nullptr,
            .down_bias = nullptr};
  }

  /// Calls f(job, first output row) for every block of kBlock rows of every expert in use, on some thread.
  /// Each output is computed by one call, so the schedule does not show in the result.
  template <class Function>
  void for_each_block(std::int64_t routed_rows, std::int64_t shared_rows, Function&& f) {
    const auto blocks = [](std::int64_t n) { return (n + kBlock - 1) / kBlock; };
    const std::int64_t shared = shared_k_ == 0 ? 0 : blocks(shared_rows), each = blocks(routed_rows);
    const std::int64_t tasks = shared + active_experts() * each;
#pragma omp for schedule(dynamic)
    for (std::int64_t task = 0; task < tasks; ++task) {
      if (task < shared)
        f(shared_job(), task * kBlock);
      else
        f(routed_job(b_.active.at(base_)[(task - shared) / each]), (task - shared) % each * kBlock);
    }
  }

  /// Rows [first, first + count) of a matrix as f32, padded with zeros.
  void decode(const QuantizedMatrix& matrix, std::int64_t first, std::int64_t count, float* out) {
    const Operand& operand = scheme(matrix.scheme).weight;
    const QuantizedLayout layout = matrix.layout();
    const std::int64_t group = operand.group.k == 0 ? matrix.k : operand.group.k, stride = padded(matrix.k);
    for (std::int64_t row = first; row < first + count; ++row, out += stride) {
      row_scales(matrix, layout, row, scratch_.scales, scratch_.zeros);
      kernels_[operand.value].decode(matrix.values.data() + row * layout.row_bytes, matrix.k, group,
                                     scratch_.scales, scratch_.zeros, out);
      std::fill(out + matrix.k, out + stride, 0.0f);
    }
  }

  void gate_up() {
    for_each_block(spec_.intermediate, spec_.shared.intermediate, [&](const Job& job, std::int64_t first) {
      const std::int64_t width = job.ffn->gate.n, count = std::min(kBlock, width - first),
                         stride = padded(width);
      float* up_rows = decoded_ + kBlock * hidden_k_;
      decode(job.ffn->gate, first, count, decoded_);
      decode(job.ffn->up, first, count, up_rows);
      for (std::int64_t at = 0; at < job.rows; at += kTokenBlock) {
        const std::int64_t rows = std::min(kTokenBlock, job.rows - at);
        const float* in[kTokenBlock];
        float gate[kTokenBlock * kBlock], up[kTokenBlock * kBlock];
        for (std::int64_t i = 0; i < rows; ++i) in[i] = job.input(at + i, hidden_k_);
        multiply_(in, rows, decoded_, count, hidden_k_, gate, kBlock);
        multiply_(in, rows, up_rows, count, hidden_k_, up, kBlock);
        for (std::int64_t i = 0; i < rows; ++i)
          for (std::int64_t n = 0; n < count; ++n) {
            const float g = gate[i * kBlock + n] + (job.gate_bias != nullptr ? job.gate_bias[first + n] : 0);
            const float u = up[i * kBlock + n] + (job.up_bias != nullptr ? job.up_bias[first + n] : 0);
            job.mid[(at + i) * stride + first + n] = apply(spec_.activation, g, u);
          }
      }
      if (first + count == width)
        for (std::int64_t i = 0; i < job.rows; ++i)
          std::fill(job.mid + i * stride + width, job.mid + (i + 1) * stride, 0.0f);
    });
  }

  void down() {
    for_each_block(spec_.hidden, spec_.hidden, [&](const Job& job, std::int64_t first) {
      const std::int64_t count = std::min(kBlock, spec_.hidden - first), k = padded(job.ffn->down.k);
      decode(job.ffn->down, first, count, decoded_);
      for (std::int64_t at = 0; at < job.rows; at += kTokenBlock) {
        const std::int64_t rows = std::min(kTokenBlock, job.rows - at);
        const float* in[kTokenBlock];
        for (std::int64_t i = 0; i < rows; ++i) in[i] = job.mid + (at + i) * k;
        float* out = job.out + at * hidden_k_ + first;
        multiply_(in, rows, decoded_, count, k, out, hidden_k_);
        for (std::int64_t i = 0; job.down_bias != nullptr && i < rows; ++i)
          for (std::int64_t n = 0; n < count; ++n) out[i * hidden_k_ + n] += job.down_bias[first + n];
      }
    });
  }

  /// The routing weights are applied here, once; slots are summed in the order of the ids.
  void combine() {
    const MutableMatrixView& out = call_.outputs.hidden;
    const Format format = out.dtype == DType::f32   ? formats::f32
                          : out.dtype == DType::f16 ? formats::f16
                                                    : formats::bf16;
#pragma omp for schedule(static) nowait
    for (std::int64_t t = 0; t < tokens_; ++t) {
      float* sum = b_.hidden.at(base_) + t * hidden_k_;
      const float share = shared_weight(sum);
      std::fill_n(sum, spec_.hidden, 0.0f);
      for (std::int64_t s = t * spec_.top_k; s < (t + 1) * spec_.top_k; ++s) {
        const float weight = b_.weights.at(base_)[s];
        const float* slot = b_.routed_out.at(base_) + b_.position.at(base_)[s] * hidden_k_;
        for (std::int64_t h = 0; h < spec_.hidden; ++h) sum[h] += weight * slot[h];
      }
      if (shared_k_ != 0) {
        const float* shared = b_.shared_out.at(base_) + t * hidden_k_;
        for (std::int64_t h = 0; h < spec_.hidden; ++h) sum[h] += share * shared[h];
      }
      const std::int64_t at = t * spec_.hidden;
      if (format == formats::f32) {
        std::copy_n(sum, spec_.hidden, static_cast<float*>(out.data) + at);
      } else {
        const float one = 1, none = 0;
        kernels_[format].encode(sum, spec_.hidden, spec_.hidden, &one, &none,
                                static_cast<std::byte*>(out.data) + at * 2);
      }
    }
  }

  float shared_weight(const float* hidden) const {
    if (!spec_.shared.gated) return 1.0f;
    float dot = 0;
    for (std::int64_t h = 0; h < spec_.hidden; ++h) dot += hidden[h] * state_.vectors.shared_gate[h];
    return sigmoid(dot);
  }

  const MoeCall& call_;
  const MoeSpec& spec_;
  const ExpertWeights::State& state_;
  const Buffers& b_;
  std::byte* base_;
  const RowKernels& kernels_;
  const Multiply multiply_;
  const std::int64_t tokens_, slots_, hidden_k_, mid_k_, shared_k_;
  const Operand routed_act_, shared_act_;
  const bool static_in_;
  float* decoded_;
  RowScratch scratch_;
  float* routing_;
};

}  // namespace

void cpu_moe_workspace(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout) {
  Buffers(spec, options, layout);
}

void cpu_moe_layer(Isa isa, const MoeCall& call) {
  WorkspaceLayout layout(call.options.debug_workspace);
  const Buffers buffers(call.spec, call.options, layout);
#pragma omp parallel num_threads(call.options.threads)
  Layer(isa, call, buffers).run();
}

}  // namespace gatefold
