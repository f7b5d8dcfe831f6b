// The plain kernel, for every scheme and option: rows of weights are decoded to f32 and multiplied with f32.

#include <cstring>

#include "cpu/layer.h"
#include "format/matrix.h"

namespace gatefold {
namespace {

/// Rows of gate and of up (or of down) that one step decodes: they stay in L2 while tokens pass by.
constexpr std::int64_t kBlock = 8;
/// Tokens of one step: their outputs stay in L1.
constexpr std::int64_t kTokenBlock = 32;

struct RowsBuffers : LayerBuffers {
  Buffer<float> routed_in;  // [T, H] or, with static scales, [S, H] by position
  Buffer<float> shared_in;  // [T, H]
  Buffer<float> decoded;    // per thread [2 * kBlock, K]

  RowsBuffers(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout)
      : LayerBuffers(spec, options, layout) {
    const auto hidden_k = static_cast<std::size_t>(padded(spec.hidden));
    routed_in = {layout.add<float>("routed_in", (may_be_static ? slots : tokens) * hidden_k)};
    shared_in = {layout.add<float>("shared_in", spec.shared.intermediate != 0 ? tokens * hidden_k : 0)};
    decoded = {layout.add<float>("decoded_rows", threads * 2 * kBlock * k)};
  }
};

class RowsThread : LayerThread {
 public:
  RowsThread(Isa isa, const MoeCall& call, const RowsBuffers& b)
      : LayerThread(isa, call, b), in_(b), decoded_(b.decoded.at(base_) + thread_ * 2 * kBlock * b.k) {}

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
  void round_inputs() {
    const float* hidden = b_.hidden.at(base_);
    const float amax = per_batch() ? batch_amax(hidden, tokens_, spec_.hidden, hidden_k_) : 0;
#pragma omp for schedule(static) nowait
    for (std::int64_t row = 0; row < input_rows(); ++row) {
      float* out = in_.routed_in.at(base_) + row * hidden_k_;
      std::copy_n(hidden + input_token(row) * hidden_k_, hidden_k_, out);
      round_activations(kernels_, routed_act_, routed_range(false, row, amax), scratch_, out, spec_.hidden);
    }
    if (shared_k_ == 0) return;
#pragma omp for schedule(static) nowait
    for (std::int64_t t = 0; t < tokens_; ++t) {
      float* out = in_.shared_in.at(base_) + t * hidden_k_;
      std::copy_n(hidden + t * hidden_k_, hidden_k_, out);
      round_activations(kernels_, shared_act_, {}, scratch_, out, spec_.hidden);
    }
  }

  void round_mid() {
    float* mid = b_.routed_mid.at(base_);
    const float amax = per_batch() ? batch_amax(mid, slots_, spec_.intermediate, mid_k_) : 0;
#pragma omp for schedule(static) nowait
    for (std::int64_t row = 0; row < slots_; ++row)
      round_activations(kernels_, routed_act_, routed_range(true, row, amax), scratch_, mid + row * mid_k_,
                        spec_.intermediate);
    if (shared_k_ == 0) return;
#pragma omp for schedule(static) nowait
    for (std::int64_t t = 0; t < tokens_; ++t)
      round_activations(kernels_, shared_act_, {}, scratch_, b_.shared_mid.at(base_) + t * shared_k_,
                        spec_.shared.intermediate);
  }

  /// Rows [first, first + count) of a matrix as f32, padded with zeros.
  void decode(const PackedMatrix& matrix, std::int64_t first, std::int64_t count, float* out) {
    const Operand& operand = scheme(matrix.scheme).weight;
    const QuantizedLayout layout = quantized_layout(operand, matrix.scale_format, matrix.n, matrix.k);
    const std::int64_t group = operand.group.k == 0 ? matrix.k : operand.group.k, stride = padded(matrix.k);
    const MatrixParts parts{operand, matrix.scale_format, matrix.tensor_scale,
                            matrix.data + layout.value_bytes,
                            matrix.data + layout.value_bytes + layout.scale_bytes};
    for (std::int64_t row = first; row < first + count; ++row, out += stride) {
      row_scales(parts, layout, row, scratch_.scales, scratch_.zeros);
      kernels_[operand.value].decode(matrix.data + row * layout.row_bytes, matrix.k, group, scratch_.scales,
                                     scratch_.zeros, out);
      std::fill(out + matrix.k, out + stride, 0.0f);
    }
  }

  void gate_up() {
    for_each_block(
        kBlock, spec_.intermediate, spec_.shared.intermediate, [&](const Job& job, std::int64_t first) {
          const std::int64_t width = job.ffn->gate.n, count = std::min(kBlock, width - first),
                             stride = padded(width);
          const float* inputs = (job.routed ? in_.routed_in : in_.shared_in).at(base_);
          float* up_rows = decoded_ + kBlock * hidden_k_;
          decode(job.ffn->gate, first, count, decoded_);
          decode(job.ffn->up, first, count, up_rows);
          for (std::int64_t at = 0; at < job.rows; at += kTokenBlock) {
            const std::int64_t rows = std::min(kTokenBlock, job.rows - at);
            const float* in[kTokenBlock];
            float gate[kTokenBlock * kBlock], up[kTokenBlock * kBlock];
            for (std::int64_t i = 0; i < rows; ++i) in[i] = inputs + input_row(job, at + i) * hidden_k_;
            multiply_(in, rows, decoded_, count, hidden_k_, gate, kBlock);
            multiply_(in, rows, up_rows, count, hidden_k_, up, kBlock);
            for (std::int64_t i = 0; i < rows; ++i)
              for (std::int64_t n = 0; n < count; ++n) {
                const float g =
                    gate[i * kBlock + n] + (job.gate_bias != nullptr ? job.gate_bias[first + n] : 0);
                const float u = up[i * kBlock + n] + (job.up_bias != nullptr ? job.up_bias[first + n] : 0);
                job.mid[(at + i) * stride + first + n] = activate(spec_.activation, g, u);
              }
          }
          if (first + count == width)
            for (std::int64_t i = 0; i < job.rows; ++i)
              std::fill(job.mid + i * stride + width, job.mid + (i + 1) * stride, 0.0f);
        });
  }

  void down() {
    for_each_block(kBlock, spec_.hidden, spec_.hidden, [&](const Job& job, std::int64_t first) {
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

  const RowsBuffers& in_;
  float* decoded_;
};

std::size_t rows_bytes(SchemeId id, Format scale_format, std::int64_t n, std::int64_t k) {
  const QuantizedLayout layout = quantized_layout(scheme(id).weight, scale_format, n, k);
  return layout.total();
}

void pack_rows(const QuantizedMatrix& matrix, std::byte* out) {
  for (const auto* part : {&matrix.values, &matrix.scales, &matrix.zero_points})
    out = std::copy(part->begin(), part->end(), out);
}

}  // namespace

/// The canonical layout: values, scales, zero points, one after the other.
const WeightLayout rows_layout{"rows", rows_bytes, pack_rows};

void rows_workspace(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout) {
  RowsBuffers(spec, options, layout);
}

void rows_layer(Isa isa, const MoeCall& call) {
  WorkspaceLayout layout(call.options.debug_workspace);
  const RowsBuffers buffers(call.spec, call.options, layout);
#pragma omp parallel num_threads(call.options.threads)
  RowsThread(isa, call, buffers).run();
}

}  // namespace gatefold
