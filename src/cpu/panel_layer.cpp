// The layer of all CPU kernels: routing, activations as the multiply over panels wants them (panel.h),
// combine.

#include "cpu/layer.h"
#include "cpu/panel.h"
#include "cpu/panel_unpack.h"
#include "gatefold/codec.h"

namespace gatefold {
namespace {

PanelShape shape_of(const PackedMatrix& m) {
  return panel_shape(scheme(m.scheme), m.scale_format, m.n, m.k);
}

/// The form in which activations meet weights (PanelForm).
PanelForm choose_form(Isa isa, const Scheme& scheme, const Operand& activation) {
  const Format w = scheme.weight.value, a = activation.value;
  if (!a.stored() || w == formats::f16) return PanelForm::floats;
  if (w.is_integer() || w.bits == 4)
    return a == formats::int8 || a == formats::e2m1 ? PanelForm::limbs1 : PanelForm::limbs2;
  return a != formats::f16 && pairs_are_fast(isa) ? PanelForm::pairs : PanelForm::floats;
}

/// More than a core's own caches hold.
constexpr std::int64_t kManyBytes = 1 << 20;

/// Rows of activations as the multiply wants them (PanelInput).
struct InputRows {
  Operand activation;
  PanelForm form = PanelForm::floats;
  bool by_block = false;  // activations have scales along k
  InputScale scale = InputScale::none;
  Buffer<std::byte> codes;      // [rows] of `row_bytes`
  Buffer<float> scales;         // [rows, blocks]
  Buffer<std::int32_t> starts;  // [rows, blocks]
  Buffer<PanelInput> inputs;    // [rows], of these
  std::int64_t k = 0, block = 0, blocks = 0, row_bytes = 0;
  std::int32_t offset = 0;  // of the weights' bytes

  InputRows() = default;
  InputRows(const char* name, Isa isa, SchemeId id, const MoeSpec& spec, const PlanOptions& options,
            std::size_t rows, std::int64_t width, WorkspaceLayout& layout)
      : activation(effective_activation(id, spec, options)) {
    const Scheme& s = scheme(id);
    const PanelShape shape = panel_shape(s, s.weight.scale, kPanelRows, width);
    form = choose_form(isa, s, activation);
    by_block = activation.quantized() && activation.group.k != 0;
    scale = by_block && form != PanelForm::floats ? InputScale::block
            : form == PanelForm::limbs2           ? InputScale::chunk
                                                  : InputScale::none;
    offset = panel_offset(s.weight.value);
    k = shape.padded_k();
    block = shape.block;
    blocks = shape.blocks;
    // The same columns of different rows must not meet in the same set of a cache: a line more than a power
    // of two.
    const std::int64_t bytes = form == PanelForm::limbs2
                                   ? (k + kLimbColumns - 1) / kLimbColumns * (2 * kLimbColumns)
                               : form == PanelForm::floats ? 4 * k
                               : form == PanelForm::pairs  ? 2 * k
                                                           : k;
    row_bytes = (bytes + 63) / 64 * 64 + 64;
    const std::size_t each = rows * static_cast<std::size_t>(blocks);
    codes = {layout.add<std::byte>(name, rows * static_cast<std::size_t>(row_bytes))};
    scales = {layout.add<float>("input_scales", each)};
    starts = {layout.add<std::int32_t>("block_starts", each)};
    inputs = {layout.add<PanelInput>("panel_inputs", rows)};
  }
};

struct PanelBuffers : LayerBuffers {
  InputRows routed_in, routed_mid_in, shared_in, shared_mid_in;
  Buffer<float> row;           // per thread [K]
  Buffer<PanelInput> listed;   // per thread [list]
  Buffer<std::byte> gathered;  // per thread [list, codes of routed_in], if gather
  std::int64_t list = 0;       // rows of an expert that are looked up at once
  bool gather = false;  // whether their codes are copied side by side; else the multiply takes any rows

  PanelBuffers(Isa isa, const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout)
      : LayerBuffers(spec, options, layout) {
    const auto inputs = [&](const char* name, SchemeId id, std::size_t rows, std::int64_t width) {
      return InputRows(name, isa, id, spec, options, rows, width, layout);
    };
    routed_in = inputs("routed_in", spec.scheme, may_be_static ? slots : tokens, spec.hidden);
    routed_mid_in = inputs("routed_mid_in", spec.scheme, slots, spec.intermediate);
    row = {layout.add<float>("row", threads * (k + 128))};
    gather = isa == Isa::amx;
    list = gather ? std::min<std::int64_t>(options.max_tokens, kPanelTokens) : options.max_tokens;
    const auto rows = threads * static_cast<std::size_t>(list);
    listed = {layout.add<PanelInput>("listed_inputs", rows)};
    gathered = {
        layout.add<std::byte>("gathered", gather ? rows * static_cast<std::size_t>(routed_in.row_bytes) : 0)};
    if (spec.shared.intermediate == 0) return;
    shared_in = inputs("shared_in", spec.shared.scheme, tokens, spec.hidden);
    shared_mid_in = inputs("shared_mid_in", spec.shared.scheme, tokens, spec.shared.intermediate);
  }
};

class PanelThread : LayerThread {
 public:
  PanelThread(Isa isa, const MoeCall& call, const PanelBuffers& b)
      : LayerThread(isa, call, b),
        in_(b),
        panels_(panel_kernels(isa)),
        row_(b.row.at(base_) + thread_ * (b.k + 128)) {}

  /// Routing and the activations of the first multiply. Threads of a team share it; all of it is done when
  /// all of them are back.
  void prepare() {
    load_and_route();
#pragma omp barrier
#pragma omp single
    sort_slots();
    code_inputs();
#pragma omp barrier
  }

  void run() {
    gate_up();
    if (per_batch()) {  // needs all rows, before any of them
      code_mid(batch_amax(b_.routed_mid.at(base_), slots_here(), spec_.intermediate, mid_k_));
#pragma omp barrier
    }
    if (shared_per_batch()) {
      const float amax = batch_amax(b_.shared_mid.at(base_), tokens_, spec_.shared.intermediate, shared_k_);
#pragma omp for schedule(static)
      for (std::int64_t t = 0; t < tokens_; ++t) code_shared_mid(t, amax);
    }
    down();
    combine();
  }

 private:
  /// x [k] to row `to` of `rows`: what the multiply takes, and scales beside it.
  void code(const InputRows& rows, const TensorRange& range, const float* x, std::int64_t k,
            std::int64_t to) {
    const Operand& act = rows.activation;
    std::copy_n(x, k, row_);
    std::fill(row_ + k, row_ + rows.k, 0.0f);
    if (act.quantized())
      code_activations(kernels_, act, range, scratch_, row_, k);
    else if (act.value.stored())
      (act.value == formats::f16 ? inputs_.round_f16 : inputs_.round_bf16)(row_, k);
    std::byte* codes = rows.codes.at(base_) + to * rows.row_bytes;
    float* scales = rows.scales.at(base_) + to * rows.blocks;
    std::int32_t* starts = rows.starts.at(base_) + to * rows.blocks;
    PanelInput& in = rows.inputs.at(base_)[to];
    in = {codes, scales, starts, 0, act.quantized() && !rows.by_block ? scratch_.scales[0] : 1.0f};
    if (rows.by_block) std::copy_n(scratch_.scales, rows.blocks, scales);
    switch (rows.form) {
      case PanelForm::limbs1:
      case PanelForm::limbs2:
        in.start = to_bytes(rows, codes, scales, starts);
        return;
      case PanelForm::pairs: {
        const float one = 1.0f, zero = 0.0f;
        return kernels_[formats::bf16].encode(row_, rows.k, rows.k, &one, &zero, codes);
      }
      case PanelForm::floats:
        return to_floats(rows, codes, scales);
    }
  }

  /// Returns the sum of the starts.
  std::int32_t to_bytes(const InputRows& rows, std::byte* codes, float* scales, std::int32_t* starts) {
    auto* bytes = reinterpret_cast<std::int8_t*>(codes);
    float* units = rows.by_block ? scratch_.zeros : scales;  // of blocks or chunks
    float factor = 1;                                        // of the blocks' scales
    if (rows.form == PanelForm::limbs2) {
      inputs_.fixed_point(row_, rows.k, rows.by_block ? rows.block : kPanelChunk, rows.block, bytes, units,
                          starts);
    } else {
      factor = rows.activation.value == formats::e2m1 ? 0.5f : 1.0f;
      inputs_.to_bytes(row_, rows.k, rows.block, 1 / factor, bytes, starts);
    }
    std::int32_t start = 0;
    for (std::int64_t b = 0; b < rows.blocks; ++b) {
      if (rows.by_block) scales[b] *= rows.form == PanelForm::limbs2 ? units[b] : factor;
      starts[b] *= -rows.offset;
      start += starts[b];
    }
    return start;
  }

  void to_floats(const InputRows& rows, std::byte* codes, const float* scales) {
    auto* out = reinterpret_cast<float*>(codes);
    for (std::int64_t b = 0; b < rows.blocks; ++b)
      for (std::int64_t i = b * rows.block; i < (b + 1) * rows.block; ++i)
        out[i] = rows.by_block ? row_[i] * scales[b] : row_[i];
  }

  void code_inputs() {
    const float* hidden = b_.hidden.at(base_);
    const float amax =
        per_batch() || shared_per_batch() ? batch_amax(hidden, tokens_, spec_.hidden, hidden_k_) : 0;
#pragma omp for schedule(static) nowait
    for (std::int64_t row = 0; row < input_rows(); ++row)
      code(in_.routed_in, routed_range(false, row, amax), hidden + input_token(row) * hidden_k_, spec_.hidden,
           row);
    if (shared_k_ == 0) return;
#pragma omp for schedule(static) nowait
    for (std::int64_t t = 0; t < tokens_; ++t)
      code(in_.shared_in, shared_range(false, amax), hidden + t * hidden_k_, spec_.hidden, t);
  }

  void code_mid(float amax) {
#pragma omp for schedule(static) nowait
    for (std::int64_t row = 0; row < slots_here(); ++row) code_mid(row, amax);
  }
  void code_mid(std::int64_t row, float amax) {
    code(in_.routed_mid_in, routed_range(true, row, amax), b_.routed_mid.at(base_) + row * mid_k_,
         spec_.intermediate, row);
  }
  void code_shared_mid(std::int64_t token, float amax) {
    code(in_.shared_mid_in, shared_range(true, amax), b_.shared_mid.at(base_) + token * shared_k_,
         spec_.shared.intermediate, token);
  }
  /// The intermediate rows of a job whose panels are all done, unless all rows have one scale.
  void code_mid(const Job& job) {
    for (std::int64_t i = 0; i < job.rows && job.routed && !per_batch(); ++i) code_mid(job.first + i, 0);
    for (std::int64_t t = 0; t < job.rows && !job.routed && !shared_per_batch(); ++t) code_shared_mid(t, 0);
  }

  PanelMultiply kernel(const PackedMatrix& m, const InputRows& rows) const {
    return panels_.find(m.scheme, rows.form, rows.scale, m.scale_format != scheme(m.scheme).weight.scale);
  }

  PanelShape tuned_shape(const PackedMatrix& m) const {
    PanelShape shape = shape_of(m);
    if (call_.tuning.prefetch >= 0) shape.prefetch = call_.tuning.prefetch;
    return shape;
  }

  void gate_up() {
    for_each_run(0, spec_.intermediate, spec_.shared.intermediate,
                 [&](const Job& job, std::int64_t begin, std::int64_t end) {
                   // A job has more rows than there are tokens if some chose their expert twice.
                   const std::int64_t most = job.slot == nullptr ? job.rows : in_.list;
                   for (std::int64_t token = 0; token < job.rows; token += most)
                     gate_up(job, token, std::min(token + most, job.rows), begin, end);
                   // Who does the last panels of an expert rounds its rows.
                   const std::atomic_ref<std::int64_t> done(*job.done);
                   const std::int64_t all = panels(job.ffn->gate.n);
                   if (done.fetch_add(end - begin, std::memory_order_acq_rel) + end - begin == all)
                     code_mid(job);
                 });
  }

  /// Rows [from, to) of a job's inputs.
  const PanelInput* job_inputs(const Job& job, std::int64_t from, std::int64_t to) {
    const InputRows& rows = job.routed ? in_.routed_in : in_.shared_in;
    const PanelInput* all = rows.inputs.at(base_);
    if (job.slot == nullptr) return all + job.first + from;
    PanelInput* list = in_.listed.at(base_) + static_cast<std::int64_t>(thread_) * in_.list;
    std::byte* codes =
        in_.gathered.at(base_) + static_cast<std::int64_t>(thread_) * in_.list * rows.row_bytes;
    for (std::int64_t i = from; i < to; ++i, codes += rows.row_bytes) {
      PanelInput& in = list[i - from];
      in = all[input_row(job, i)];
      if (!in_.gather) continue;
      std::copy_n(in.codes, rows.row_bytes, codes);
      in.codes = codes;
    }
    return list;
  }

  /// Panels [begin, end) by rows [from, to) of a job.
  void gate_up(const Job& job, std::int64_t from, std::int64_t to, std::int64_t begin, std::int64_t end) {
    const InputRows& inputs = job.routed ? in_.routed_in : in_.shared_in;
    const PanelInput* in = job_inputs(job, from, to);
    const PackedMatrix &gate = job.ffn->gate, &up = job.ffn->up;
    const PanelShape gate_shape = tuned_shape(gate), up_shape = tuned_shape(up);
    const PanelMultiply gate_kernel = kernel(gate, inputs), up_kernel = kernel(up, inputs);
    const auto apart = static_cast<std::int64_t>(gate_shape.panel_bytes),
               pair = apart + static_cast<std::int64_t>(up_shape.panel_bytes);
    const std::int64_t mid_stride = padded(gate.n), calls = (to - from + kPanelTokens - 1) / kPanelTokens;
    // Few tokens: several panels, so that the activation has something to do.
    constexpr std::int64_t kBatch = kPanelTokens, kUp = kBatch * kPanelRows;
    const std::int64_t batch = std::max<std::int64_t>(1, kBatch / (to - from)), width = batch * kPanelRows;
    alignas(64) float out[2][kUp];  // [gate, up][tokens, width]
    for (std::int64_t at = begin; at < end; at += batch)
      for (std::int64_t token = from, left = calls; left > 0; --left) {
        const std::int64_t rows = (to - token + left - 1) / left;
        for (std::int64_t panel = at; panel < std::min(at + batch, end); ++panel) {
          float* y = out[0] + (panel - at) * kPanelRows;
          if (gate_kernel == up_kernel) {
            gate_kernel(gate_shape, gate.data + panel * pair, apart, 2, in + (token - from), rows, y, width,
                        kUp);
          } else {  // their scales have different formats
            gate_kernel(gate_shape, gate.data + panel * pair, 0, 1, in + (token - from), rows, y, width, 0);
            up_kernel(up_shape, up.data + panel * pair, 0, 1, in + (token - from), rows, y + kUp, width, 0);
          }
        }
        const std::int64_t first = at * kPanelRows,
                           count = std::min(std::min(at + batch, end) * kPanelRows, gate.n) - first;
        activate_rows(job, first, rows, count, out[0], out[1], width, job.mid + token * mid_stride + first,
                      mid_stride);
        token += rows;
      }
  }

  /// y [rows, count] = the activation of columns [first, first + count).
  void activate_rows(const Job& job, std::int64_t first, std::int64_t rows, std::int64_t count, float* gate,
                     float* up, std::int64_t stride, float* y, std::int64_t y_stride) const {
    for (std::int64_t i = 0; job.gate_bias != nullptr && i < rows; ++i)
      for (std::int64_t n = 0; n < count; ++n) {
        gate[i * stride + n] += job.gate_bias[first + n];
        up[i * stride + n] += job.up_bias[first + n];
      }
    const Activation& a = spec_.activation;
    if (a.kind == Activation::Kind::swiglu)
      return inputs_.swiglu(gate, up, stride, rows, count, a.alpha, a.beta, a.limit, y, y_stride);
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t n = 0; n < count; ++n)
        y[i * y_stride + n] = activate(a, gate[i * stride + n], up[i * stride + n]);
  }

  void down() {
    const auto run = [&](const Job& job, std::int64_t begin, std::int64_t end) {
      const PackedMatrix& matrix = job.ffn->down;
      const InputRows& inputs = job.routed ? in_.routed_mid_in : in_.shared_mid_in;
      PanelShape shape = tuned_shape(matrix);
      shape.write_around =
          job.down_bias == nullptr && slots_ * hidden_k_ * std::int64_t{sizeof(float)} > kManyBytes;
      const PanelMultiply multiply = kernel(matrix, inputs);
      const auto apart = static_cast<std::int64_t>(shape.panel_bytes);
      for (std::int64_t panel = begin; panel < end; panel += 2) {
        const std::int64_t first = panel * kPanelRows;
        const auto panels = static_cast<int>(std::min<std::int64_t>(2, end - panel));
        for (std::int64_t token = 0, left = (job.rows + kPanelTokens - 1) / kPanelTokens; left > 0; --left) {
          const std::int64_t rows = (job.rows - token + left - 1) / left;
          const PanelInput* in = inputs.inputs.at(base_) + job.first + token;
          float* out = job.out + token * hidden_k_ + first;  // H is padded to whole panels
          multiply(shape, matrix.data + panel * apart, apart, panels, in, rows, out, hidden_k_, kPanelRows);
          const std::int64_t count = std::min(panels * kPanelRows, spec_.hidden - first);
          for (std::int64_t i = 0; job.down_bias != nullptr && i < rows; ++i)
            for (std::int64_t n = 0; n < count; ++n) out[i * hidden_k_ + n] += job.down_bias[first + n];
          token += rows;
        }
      }
    };
    for_each_run(1, spec_.hidden, spec_.hidden, run);
  }

  const PanelBuffers& in_;
  const PanelKernels& panels_;
  float* row_;
};

std::size_t panel_layout_bytes(SchemeId id, Format scale_format, std::int64_t n, std::int64_t k) {
  return panel_shape(scheme(id), scale_format, n, k).bytes();
}

/// The matrices take turns, a panel each.
void pack_panel_layout(const QuantizedMatrix* matrices, int count, std::byte* out, PackedMatrix* packed) {
  std::size_t stride = 0;
  for (int i = 0; i < count; ++i) {
    packed[i].data = out + stride;
    stride += shape_of(packed[i]).panel_bytes;
  }
  for (int i = 0; i < count; ++i)
    pack_panels(matrices[i], shape_of(packed[i]), out + (packed[i].data - out), stride);
}

Result<QuantizedMatrix> unpack_panel_layout(const Ffn& ffn, Projection projection) {
  const bool alone = projection == Projection::down;
  const PackedMatrix& packed = alone ? ffn.down : projection == Projection::up ? ffn.up : ffn.gate;
  QuantizedMatrix matrix{.scheme = packed.scheme, .n = packed.n, .k = packed.k};
  matrix.scale_format = packed.scale_format;
  matrix.tensor_scale = packed.tensor_scale;
  matrix.input_scale = packed.input_scale;
  const PanelShape shape = shape_of(packed);
  const std::size_t stride =
      alone ? shape.panel_bytes : shape_of(ffn.gate).panel_bytes + shape_of(ffn.up).panel_bytes;
  if (Status status = unpack_panels(packed.data, shape, stride, matrix); !status.ok()) return status;
  return matrix;
}

}  // namespace

const WeightLayout panel_layout{"panels", panel_layout_bytes, [](std::size_t bytes, const Device&) {
                                  return HostWeights::allocate(bytes, pack_panel_layout, unpack_panel_layout);
                                }};

void panel_workspace(Isa isa, const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout) {
  PanelBuffers(isa, spec, options, layout);
}

void panel_layer(Isa isa, const MoeCall& call) {
  WorkspaceLayout layout(call.options.debug_workspace);
  const PanelBuffers buffers(isa, call.spec, call.options, layout);
  // With few tokens, threads would wait for each other longer than one of them works.
  const bool routed = call.inputs.topk_ids != nullptr || call.inputs.router_logits != nullptr;
  const bool few = call.inputs.hidden.rows <= (routed ? call.tuning.serial_tokens : 2);
  if (few) PanelThread(isa, call, buffers).prepare();
#pragma omp parallel num_threads(call.options.threads)
  {
    PanelThread thread(isa, call, buffers);
    if (!few) thread.prepare();
    thread.run();
  }
}

}  // namespace gatefold
