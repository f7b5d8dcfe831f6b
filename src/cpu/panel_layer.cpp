// Kernels over panels (panel.h): codes are multiplied as bf16, 16 rows at a time, and scales applied to sums.

#include "cpu/layer.h"
#include "cpu/panel.h"
#include "gatefold/codec.h"

namespace gatefold {
namespace {

/// Tokens of one step: their outputs stay in L1.
constexpr std::int64_t kTokenBlock = 32;

PanelShape shape_of(const PackedMatrix& m) {
  return panel_shape(scheme(m.scheme), m.scale_format, m.n, m.k);
}

/// Rows of activations as the multiply wants them (PanelInput).
struct InputRows {
  Buffer<std::uint16_t> codes;  // [rows, padded k]
  Buffer<float> scales, sums;   // [rows, blocks]
  Buffer<float> row_scale;      // [rows]
  std::int64_t stride = 0, blocks = 0;

  InputRows() = default;
  InputRows(const char* name, const Scheme& scheme, std::size_t rows, std::int64_t k,
            WorkspaceLayout& layout) {
    const PanelShape shape = panel_shape(scheme, scheme.weight.scale, kPanelRows, k);
    stride = shape.padded_k();
    blocks = shape.blocks;
    const auto each = static_cast<std::size_t>(blocks);
    codes = {layout.add<std::uint16_t>(name, rows * static_cast<std::size_t>(stride))};
    scales = {layout.add<float>("block_scales", rows * each)};
    sums = {layout.add<float>("block_sums", rows * each)};
    row_scale = {layout.add<float>("row_scales", rows)};
  }

  PanelInput at(std::byte* base, std::int64_t row) const {
    return {codes.at(base) + row * stride, scales.at(base) + row * blocks, sums.at(base) + row * blocks,
            row_scale.at(base)[row]};
  }
};

struct PanelBuffers : LayerBuffers {
  InputRows routed_in, routed_mid_in, shared_in, shared_mid_in;
  Buffer<float> row;  // per thread [K]

  PanelBuffers(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout)
      : LayerBuffers(spec, options, layout) {
    const Scheme& routed = scheme(spec.scheme);
    routed_in = InputRows("routed_in", routed, may_be_static ? slots : tokens, spec.hidden, layout);
    routed_mid_in = InputRows("routed_mid_in", routed, slots, spec.intermediate, layout);
    row = {layout.add<float>("row", threads * k)};
    if (spec.shared.intermediate == 0) return;
    const Scheme& shared = scheme(spec.shared.scheme);
    shared_in = InputRows("shared_in", shared, tokens, spec.hidden, layout);
    shared_mid_in = InputRows("shared_mid_in", shared, tokens, spec.shared.intermediate, layout);
  }
};

class PanelThread : LayerThread {
 public:
  PanelThread(const MoeCall& call, const PanelBuffers& b)
      : LayerThread(Isa::avx512, call, b), in_(b), row_(b.row.at(base_) + thread_ * b.k) {}

  void run() {
    load_and_route();
#pragma omp barrier
#pragma omp single
    sort_slots();
    code_inputs();
#pragma omp barrier
    gate_up();
    code_mid();
#pragma omp barrier
    down();
    combine();
  }

 private:
  /// x [k] to row `to` of `rows`: codes as bf16, exactly, and scales beside them.
  void code(const InputRows& rows, const Operand& act, const TensorRange& range, const float* x,
            std::int64_t k, std::int64_t to) {
    std::copy_n(x, k, row_);
    if (act.quantized()) code_activations(kernels_, act, range, scratch_, row_, k);
    std::uint16_t* codes = rows.codes.at(base_) + to * rows.stride;
    const float one = 1.0f, zero = 0.0f;
    kernels_[formats::bf16].encode(row_, k, k, &one, &zero, reinterpret_cast<std::byte*>(codes));
    std::fill(codes + k, codes + rows.stride, std::uint16_t{0});
    const bool by_block = act.quantized() && act.group.k != 0;
    rows.row_scale.at(base_)[to] = act.quantized() && !by_block ? scratch_.scales[0] : 1.0f;
    if (by_block) std::copy_n(scratch_.scales, rows.blocks, rows.scales.at(base_) + to * rows.blocks);
    const std::int64_t block = rows.stride / rows.blocks;
    float* sums = rows.sums.at(base_) + to * rows.blocks;
    for (std::int64_t b = 0; b < rows.blocks; ++b) {
      float sum = 0;
      for (std::int64_t i = b * block; i < (b + 1) * block; ++i) sum += decode<formats::bf16>(codes[i]);
      sums[b] = sum;
    }
  }

  void code_inputs() {
    const float* hidden = b_.hidden.at(base_);
    const float amax = per_batch() ? batch_amax(hidden, tokens_, spec_.hidden, hidden_k_) : 0;
#pragma omp for schedule(static) nowait
    for (std::int64_t row = 0; row < input_rows(); ++row)
      code(in_.routed_in, routed_act_, routed_range(false, row, amax), hidden + input_token(row) * hidden_k_,
           spec_.hidden, row);
    if (shared_k_ == 0) return;
#pragma omp for schedule(static) nowait
    for (std::int64_t t = 0; t < tokens_; ++t)
      code(in_.shared_in, shared_act_, {}, hidden + t * hidden_k_, spec_.hidden, t);
  }

  void code_mid() {
    const float* mid = b_.routed_mid.at(base_);
    const float amax = per_batch() ? batch_amax(mid, slots_, spec_.intermediate, mid_k_) : 0;
#pragma omp for schedule(static) nowait
    for (std::int64_t row = 0; row < slots_; ++row)
      code(in_.routed_mid_in, routed_act_, routed_range(true, row, amax), mid + row * mid_k_,
           spec_.intermediate, row);
    if (shared_k_ == 0) return;
#pragma omp for schedule(static) nowait
    for (std::int64_t t = 0; t < tokens_; ++t)
      code(in_.shared_mid_in, shared_act_, {}, b_.shared_mid.at(base_) + t * shared_k_,
           spec_.shared.intermediate, t);
  }

  /// out[row][0..16) = panel times inputs, for rows [0, count) of `inputs`.
  void multiply(const PackedMatrix& matrix, const PanelShape& shape, std::int64_t first,
                const PanelInput* inputs, std::int64_t count, float* out, std::int64_t stride) const {
    const auto id = static_cast<std::size_t>(matrix.scheme);
    const auto& kernels = panel_kernels();
    const std::byte* panel = matrix.data + static_cast<std::size_t>(first / kPanelRows) * shape.panel_bytes;
    (call_.options.weights_only ? kernels.weights_only : kernels.multiply)[id](shape, panel, inputs, count,
                                                                               out, stride);
  }

  void gate_up() {
    for_each_block(
        kPanelRows, spec_.intermediate, spec_.shared.intermediate, [&](const Job& job, std::int64_t first) {
          const PackedMatrix &gate = job.ffn->gate, &up = job.ffn->up;
          const PanelShape gate_shape = shape_of(gate), up_shape = shape_of(up);
          const std::int64_t width = gate.n, count = std::min(kPanelRows, width - first),
                             stride = padded(width);
          for (std::int64_t at = 0; at < job.rows; at += kTokenBlock) {
            const std::int64_t rows = std::min(kTokenBlock, job.rows - at);
            PanelInput in[kTokenBlock];
            float g[kTokenBlock * kPanelRows], u[kTokenBlock * kPanelRows];
            for (std::int64_t i = 0; i < rows; ++i)
              in[i] = (job.routed ? in_.routed_in : in_.shared_in).at(base_, input_row(job, at + i));
            multiply(gate, gate_shape, first, in, rows, g, kPanelRows);
            multiply(up, up_shape, first, in, rows, u, kPanelRows);
            for (std::int64_t i = 0; i < rows; ++i)
              activate_row(job, first, count, g + i * kPanelRows, u + i * kPanelRows,
                           job.mid + (at + i) * stride + first);
          }
        });
  }

  void activate_row(const Job& job, std::int64_t first, std::int64_t count, float* gate, float* up,
                    float* y) const {
    for (std::int64_t n = 0; job.gate_bias != nullptr && n < count; ++n) {
      gate[n] += job.gate_bias[first + n];
      up[n] += job.up_bias[first + n];
    }
    const Activation& a = spec_.activation;
    if (a.kind == Activation::Kind::swiglu)
      return panel_kernels().swiglu(gate, up, count, a.alpha, a.beta, a.limit, y);
    for (std::int64_t n = 0; n < count; ++n) y[n] = activate(a, gate[n], up[n]);
  }

  void down() {
    for_each_block(kPanelRows, spec_.hidden, spec_.hidden, [&](const Job& job, std::int64_t first) {
      const PackedMatrix& matrix = job.ffn->down;
      const PanelShape shape = shape_of(matrix);
      const std::int64_t count = std::min(kPanelRows, spec_.hidden - first);
      for (std::int64_t at = 0; at < job.rows; at += kTokenBlock) {
        const std::int64_t rows = std::min(kTokenBlock, job.rows - at);
        PanelInput in[kTokenBlock];
        for (std::int64_t i = 0; i < rows; ++i)
          in[i] = (job.routed ? in_.routed_mid_in : in_.shared_mid_in).at(base_, job.first + at + i);
        float* out = job.out + at * hidden_k_ + first;  // H is padded to whole panels
        multiply(matrix, shape, first, in, rows, out, hidden_k_);
        for (std::int64_t i = 0; job.down_bias != nullptr && i < rows; ++i)
          for (std::int64_t n = 0; n < count; ++n) out[i * hidden_k_ + n] += job.down_bias[first + n];
      }
    });
  }

  const PanelBuffers& in_;
  float* row_;
};

std::size_t panel_layout_bytes(SchemeId id, Format scale_format, std::int64_t n, std::int64_t k) {
  return panel_shape(scheme(id), scale_format, n, k).bytes();
}

void pack_panel_layout(const QuantizedMatrix& m, std::byte* out) {
  pack_panels(m, panel_shape(scheme(m.scheme), m.scale_format, m.n, m.k), out);
}

}  // namespace

const WeightLayout panel_layout{"panels", panel_layout_bytes, pack_panel_layout};

void panel_workspace(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout) {
  PanelBuffers(spec, options, layout);
}

void panel_layer(const MoeCall& call) {
  WorkspaceLayout layout(call.options.debug_workspace);
  const PanelBuffers buffers(call.spec, call.options, layout);
#pragma omp parallel num_threads(call.options.threads)
  PanelThread(call, buffers).run();
}

}  // namespace gatefold
