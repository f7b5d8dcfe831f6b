#include "model/calibrate_layer.h"

#include <cblas.h>
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "format/row_kernels.h"
#include "gatefold/moe.h"
#include "model/blas.h"
#include "model/gram.h"
#include "model/smoothing.h"
#include "quantize/gptq.h"
#include "quantize/grid.h"

namespace gatefold {
namespace {

using Floats = std::vector<float>;

constexpr std::int64_t chunk = 1024;         // tokens multiplied at once
constexpr double damping_per_unknown = 3;    // times inputs over samples: what so few samples cannot tell
constexpr float borrowed_importance = 0.1f;  // of a token that is routed elsewhere, next to one that is not
constexpr int most_device_workers = 4;       // each has buffers of its own on the device

/// y [rows, n] = x [rows, k] W^T, W [n, k]
void multiply(const float* x, std::int64_t rows, const Floats& w, std::int64_t k, float* y) {
  const auto n = static_cast<int>(static_cast<std::int64_t>(w.size()) / k);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(rows), n, static_cast<int>(k), 1.0f,
              x, static_cast<int>(k), w.data(), static_cast<int>(k), 0.0f, y, n);
}

Floats widened(const MatrixView& view) {
  Floats out(static_cast<std::size_t>(view.rows * view.cols));
  row_kernels().widen(view.dtype, view.data, 0, view.rows * view.cols, out.data());
  return out;
}

Floats dequantized(const QuantizedMatrix& matrix) {
  Floats out(static_cast<std::size_t>(matrix.n * matrix.k));
  dequantize(matrix, out.data());
  return out;
}

/// One feed-forward network in f32: gate and up [I, H], down [H, I].
struct Ffn {
  Floats gate, up, down;
};

class Layer {
 public:
  Layer(const Checkpoint& checkpoint, int layer, const LayerOptions& options, Stream& stream)
      : checkpoint_(checkpoint),
        spec_(checkpoint.config().moe),
        activation_(scheme(options.scheme).activation),
        layer_(layer),
        options_(options),
        stream_(stream),
        hidden_(spec_.hidden),
        inner_(spec_.intermediate),
        tokens_(static_cast<std::int64_t>(stream.residual.size()) / hidden_) {}

  Result<QuantizedLayer> calibrate(const std::function<bool()>& expert_done);
  Status run(const QuantizedLayer& quantized);

 private:
  Status route_tokens();
  Status add_shared();
  Samples samples_of(int expert, std::int64_t at_least) const;
  Status start_device();
  Result<PlainExpert> views(int expert) const;
  Result<Ffn> load(int expert) const;
  GptqOptions gptq_options(const Samples& samples, std::int64_t k) const;
  Result<Floats> search_fold() const;
  void divide_normed(const Floats& fold);
  Floats gather(const Samples& samples, std::int64_t begin, std::int64_t count) const;
  Floats inner(const Ffn& ffn, const Floats& x) const;
  Floats inner_of(const Ffn& ffn, const Samples& samples) const;
  Status quantize_expert(Ffn ffn, const Samples& samples, QuantizedExpert& out, Floats& y) const;
  Status quantize_matrix(const Floats& weights, const Floats& hessian, const GptqOptions& gptq_options,
                         QuantizedMatrix& out) const;
  Floats output(const QuantizedMatrix& down, Floats y, const Samples& samples) const;
  void add(const Samples& samples, const Floats& output);
  Status for_each_expert(const std::function<Status(int, Samples&, Floats&)>& work,
                         const std::function<bool()>& done);
  Status at(int expert, const Status& status) const {
    return {status.code(), fmt::format("layer {}, expert {}: {}", layer_, expert, status.message())};
  }

  const Checkpoint& checkpoint_;
  const MoeSpec& spec_;
  const Operand& activation_;
  const int layer_;
  const LayerOptions& options_;
  Stream& stream_;
  const std::int64_t hidden_, inner_, tokens_;
  std::vector<std::int32_t> ids_;
  Floats weights_, fold_;
  std::optional<TensorScale> input_scale_;  // static, of gate and up
  std::unique_ptr<LayerQuantizer> device_;  // none: on the CPU
  int workers_ = 0;                         // experts at a time
};

/// What comes now is done on the device, if there is one.
Status Layer::start_device() {
  const bool on_cpu = options_.device.kind == Device::Kind::cpu;
  workers_ = on_cpu ? options_.threads : std::min(options_.threads, most_device_workers);
  if (on_cpu) return {};
  auto device =
      cuda_layer_quantizer({.scheme = options_.scheme,
                            .method = options_.method,
                            .tokens = tokens_,
                            .hidden = hidden_,
                            .inner = inner_,
                            .normed = stream_.normed.data(),
                            .residual = stream_.residual.data(),
                            .fold = fold_,
                            .input_scale = input_scale_,
                            .down_scale =
                                [this](const Floats& y) {
                                  return static_scale(options_.activation_scale, activation_, y, inner_);
                                }},
                           workers_, options_.device.index);
  if (!device) return device.status();
  device_ = std::move(*device);
  return {};
}

Status Layer::route_tokens() {
  const auto router = checkpoint_.router(layer_);
  if (!router) return router.status();
  const Floats w = widened({router->data, router->dtype, spec_.experts, hidden_});
  Floats logits(static_cast<std::size_t>(tokens_ * spec_.experts));
  multiply(stream_.normed.data(), tokens_, w, hidden_, logits.data());
  ids_.resize(static_cast<std::size_t>(tokens_ * spec_.top_k));
  weights_.resize(ids_.size());
  route(spec_.routing, spec_.experts, spec_.top_k, logits.data(), tokens_, nullptr, ids_.data(),
        weights_.data());
  return {};
}

/// The shared expert, as it is or rounded to nearest.
Status Layer::add_shared() {
  if (spec_.shared.intermediate == 0) return {};
  Floats parts[3];
  for (const Projection p : {Projection::gate, Projection::up, Projection::down}) {
    const auto matrix = plain_shared_expert(checkpoint_, layer_, p);
    if (!matrix) return matrix.status();
    Floats& part = parts[static_cast<int>(p)];
    part = widened(*matrix);
    if (!options_.shared) continue;
    const auto rounded = quantize(*options_.shared, *matrix);
    if (!rounded) return rounded.status();
    part = dequantized(*rounded);
  }
  const Operand activation = options_.shared ? scheme(*options_.shared).activation : Operand{};
  const Ffn ffn{std::move(parts[0]), std::move(parts[1]), std::move(parts[2])};
  Floats gate;
  if (spec_.shared.gated) {
    const auto vector = checkpoint_.shared_expert_gate(layer_);
    if (!vector) return vector.status();
    gate = widened({vector->data, vector->dtype, 1, hidden_});
  }
#pragma omp parallel for schedule(dynamic) num_threads(options_.threads)
  for (std::int64_t begin = 0; begin < tokens_; begin += chunk) {
    const SerialBlas serial;
    const std::int64_t count = std::min(chunk, tokens_ - begin);
    const float* first = stream_.normed.data() + begin * hidden_;
    const Floats x(first, first + count * hidden_);
    Floats in = x, out(x.size());
    round_activations(activation, nullptr, hidden_, in);
    Floats y = inner(ffn, in);
    round_activations(activation, nullptr, spec_.shared.intermediate, y);
    multiply(y.data(), count, ffn.down, spec_.shared.intermediate, out.data());
    for (std::int64_t t = 0; t < count; ++t) {
      float factor = 1;
      if (!gate.empty())
        factor =
            1 / (1 + std::exp(-std::inner_product(gate.begin(), gate.end(), x.begin() + t * hidden_, 0.0f)));
      for (std::int64_t j = 0; j < hidden_; ++j)
        stream_.residual[(begin + t) * hidden_ + j] += factor * out[t * hidden_ + j];
    }
  }
  return {};
}

/// The tokens routed to an expert and, if they are fewer than `at_least`, others that are spread evenly.
Samples Layer::samples_of(int expert, std::int64_t at_least) const {
  Floats weights(static_cast<std::size_t>(tokens_), -1.0f);
  Samples samples;
  double squares = 0;
  for (std::size_t slot = 0; slot < ids_.size(); ++slot)
    if (ids_[slot] == expert) {
      weights[slot / static_cast<std::size_t>(spec_.top_k)] = weights_[slot];
      squares += static_cast<double>(weights_[slot]) * weights_[slot];
      ++samples.routed;
    }
  const std::int64_t others = tokens_ - samples.routed;
  const std::int64_t borrowed = std::clamp<std::int64_t>(at_least - samples.routed, 0, others);
  const float importance =
      samples.routed == 0
          ? 1.0f
          : borrowed_importance * static_cast<float>(squares / static_cast<double>(samples.routed));
  std::int64_t seen = 0;
  for (std::int64_t t = 0; t < tokens_; ++t) {
    const bool routed = weights[t] >= 0;
    if (!routed) {
      const bool take = (seen + 1) * borrowed / others > seen * borrowed / others;
      ++seen;
      if (!take) continue;
    }
    samples.tokens.push_back(static_cast<std::int32_t>(t));
    samples.weights.push_back(routed ? weights[t] : 0.0f);
    samples.importance.push_back(routed ? weights[t] * weights[t] : importance);
  }
  return samples;
}

Result<PlainExpert> Layer::views(int expert) const {
  PlainExpert views;
  MatrixView* const parts[] = {&views.gate, &views.up, &views.down};
  for (const Projection p : {Projection::gate, Projection::up, Projection::down}) {
    const auto matrix = checkpoint_.expert(layer_, expert, p);
    if (!matrix) return matrix.status();
    *parts[static_cast<int>(p)] = std::get<MatrixView>(*matrix);
  }
  return views;
}

/// An expert's weights, gate and up times the fold.
Result<Ffn> Layer::load(int expert) const {
  const auto from = views(expert);
  if (!from) return from.status();
  Ffn ffn{widened(from->gate), widened(from->up), widened(from->down)};
  for (Floats* part : {&ffn.gate, &ffn.up})
    for (std::size_t i = 0; !fold_.empty() && i < part->size(); ++i) (*part)[i] *= fold_[i % fold_.size()];
  return ffn;
}

/// One scale per hidden channel for all experts, found with some of them.
Result<Floats> Layer::search_fold() const {
  constexpr int at_most = 16;
  std::vector<Floats> matrices;
  for (int e = 0; e < spec_.experts; e += (spec_.experts + at_most - 1) / at_most) {
    auto ffn = load(e);
    if (!ffn) return at(e, ffn.status());
    matrices.push_back(std::move(ffn->gate));
    matrices.push_back(std::move(ffn->up));
  }
  const Sample sample = sample_of(stream_.normed, hidden_);
  const bool maxima = options_.method == Method::smoothquant;
  if (options_.device.kind == Device::Kind::cuda)
    return cuda_search_smoothing(options_.scheme, maxima, true, sample, matrices, options_.device.index);
  return search_smoothing(options_.scheme, maxima, true, sample, matrices);
}

void Layer::divide_normed(const Floats& fold) {
  fold_ = fold;
  for (std::size_t i = 0; !fold_.empty() && i < stream_.normed.size(); ++i)
    stream_.normed[i] /= fold_[i % fold_.size()];
}

/// Inputs [count, H] of an expert as it will see them.
Floats Layer::gather(const Samples& samples, std::int64_t begin, std::int64_t count) const {
  Floats x(static_cast<std::size_t>(count * hidden_));
  for (std::int64_t i = 0; i < count; ++i)
    std::copy_n(stream_.normed.data() + static_cast<std::int64_t>(samples.tokens[begin + i]) * hidden_,
                hidden_, x.data() + i * hidden_);
  round_activations(activation_, input_scale_ ? &*input_scale_ : nullptr, hidden_, x);
  return x;
}

/// silu(gate x) * (up x), for rows of x.
Floats Layer::inner(const Ffn& ffn, const Floats& x) const {
  const auto rows = static_cast<std::int64_t>(x.size()) / hidden_;
  const auto width = static_cast<std::int64_t>(ffn.gate.size()) / hidden_;
  Floats y(static_cast<std::size_t>(rows * width)), up(y.size());
  multiply(x.data(), rows, ffn.gate, hidden_, y.data());
  multiply(x.data(), rows, ffn.up, hidden_, up.data());
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = y[i] / (1.0f + std::exp(-y[i])) * up[i];
  return y;
}

/// The same for all samples, [samples, I].
Floats Layer::inner_of(const Ffn& ffn, const Samples& samples) const {
  Floats all;
  all.reserve(static_cast<std::size_t>(samples.size() * inner_));
  for (std::int64_t begin = 0; begin < samples.size(); begin += chunk) {
    const Floats y = inner(ffn, gather(samples, begin, std::min(chunk, samples.size() - begin)));
    all.insert(all.end(), y.begin(), y.end());
  }
  return all;
}

GptqOptions Layer::gptq_options(const Samples& samples, std::int64_t k) const {
  const double unknown =
      static_cast<double>(k) / static_cast<double>(std::max<std::int64_t>(1, samples.routed));
  return {.damping = options_.effective_damping() + std::min(1.0, damping_per_unknown * unknown)};
}

Status Layer::quantize_matrix(const Floats& weights, const Floats& hessian, const GptqOptions& gptq_options,
                              QuantizedMatrix& out) const {
  const auto k = static_cast<std::int64_t>(std::lround(std::sqrt(static_cast<double>(hessian.size()))));
  const auto n = static_cast<std::int64_t>(weights.size()) / k;
  if (options_.method != Method::awq) {
    auto matrix = gptq(options_.scheme, n, k, weights.data(), hessian, gptq_options);
    if (!matrix) return matrix.status();
    out = std::move(*matrix);
    return {};
  }
  if (Status status = check_shape(options_.scheme, n, k); !status.ok()) return status;
  Floats importance(static_cast<std::size_t>(k));
  for (std::int64_t j = 0; j < k; ++j) importance[j] = hessian[j * k + j] + 1e-20f;
  out = Grid(options_.scheme, n, k, weights.data(), importance.data(), gptq_options.tensor_amax)
            .encode(weights.data());
  return {};
}

/// `y` gets inner_of the quantized expert.
Status Layer::quantize_expert(Ffn ffn, const Samples& samples, QuantizedExpert& out, Floats& y) const {
  if (options_.method != Method::gptq) {
    // What down reads is scaled in the rows of up.
    Samples few;
    for (std::int64_t i = 0; i < std::min(sample_rows, samples.size()); ++i)
      few.tokens.push_back(samples.tokens[i * samples.size() / std::min(sample_rows, samples.size())]);
    const Floats s = search_smoothing(options_.scheme, options_.method == Method::smoothquant, false,
                                      {inner_of(ffn, few), few.size(), inner_}, {&ffn.down, 1});
    for (std::size_t i = 0; i < ffn.up.size(); ++i) ffn.up[i] /= s[i / static_cast<std::size_t>(hidden_)];
    for (std::size_t i = 0; i < ffn.down.size(); ++i) ffn.down[i] *= s[i % s.size()];
  }
  Gram inputs(hidden_);
  for (std::int64_t begin = 0; begin < samples.size(); begin += chunk) {
    const std::int64_t count = std::min(chunk, samples.size() - begin);
    inputs.add(gather(samples, begin, count).data(), samples.importance.data() + begin, count);
  }
  const Floats hessian = std::move(inputs).finish();
  GptqOptions gate_up = gptq_options(samples, hidden_);
  for (const Floats* part : {&ffn.gate, &ffn.up})
    gate_up.tensor_amax =
        std::max(gate_up.tensor_amax, largest_magnitude({part->data(), DType::f32, inner_, hidden_}));
  if (Status status = quantize_matrix(ffn.gate, hessian, gate_up, out.gate); !status.ok()) return status;
  if (Status status = quantize_matrix(ffn.up, hessian, gate_up, out.up); !status.ok()) return status;
  out.gate.input_scale = out.up.input_scale = input_scale_;

  y = inner_of({dequantized(out.gate), dequantized(out.up), {}}, samples);
  std::optional<TensorScale> scale;
  if (input_scale_) scale = static_scale(options_.activation_scale, activation_, y, inner_);
  Gram middle(inner_);
  for (std::int64_t begin = 0; begin < samples.size(); begin += chunk) {
    const std::int64_t count = std::min(chunk, samples.size() - begin);
    Floats part(y.begin() + begin * inner_, y.begin() + (begin + count) * inner_);
    round_activations(activation_, scale ? &*scale : nullptr, inner_, part);
    middle.add(part.data(), samples.importance.data() + begin, count);
  }
  if (Status status =
          quantize_matrix(ffn.down, std::move(middle).finish(), gptq_options(samples, inner_), out.down);
      !status.ok())
    return status;
  out.down.input_scale = scale;
  return {};
}

/// What an expert adds to the residual, [samples, H].
Floats Layer::output(const QuantizedMatrix& down, Floats y, const Samples& samples) const {
  round_activations(activation_, down.input_scale ? &*down.input_scale : nullptr, inner_, y);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] *= samples.weights[i / static_cast<std::size_t>(inner_)];
  Floats out(static_cast<std::size_t>(samples.size() * hidden_));
  multiply(y.data(), samples.size(), dequantized(down), inner_, out.data());
  return out;
}

void Layer::add(const Samples& samples, const Floats& output) {
  for (std::int64_t i = 0; i < samples.size(); ++i)
    for (std::int64_t j = 0; j < hidden_; ++j)
      stream_.residual[static_cast<std::int64_t>(samples.tokens[i]) * hidden_ + j] += output[i * hidden_ + j];
}

/// `work` on several experts at a time; their outputs are added in the order of experts.
Status Layer::for_each_expert(const std::function<Status(int, Samples&, Floats&)>& work,
                              const std::function<bool()>& done) {
  Status failure;
  bool stopped = false;
#pragma omp parallel num_threads(workers_)
  {
    const SerialBlas serial;
#pragma omp for schedule(dynamic, 1) ordered
    for (int expert = 0; expert < spec_.experts; ++expert) {
      bool skip = false;
#pragma omp atomic read
      skip = stopped;
      Samples samples;
      Floats out;
      Status status = skip ? Status() : work(expert, samples, out);
#pragma omp ordered
      {
        if (!stopped && status.ok()) {
          if (device_ != nullptr)
            status = device_->add(omp_get_thread_num());
          else
            add(samples, out);
        }
        if (!stopped && !status.ok()) failure = at(expert, status);
        const bool stop = stopped || !status.ok() || (done && !done());
#pragma omp atomic write
        stopped = stop;
      }
    }
  }
  if (failure.ok() && stopped) return {Code::io_error, "interrupted"};
  if (failure.ok() && device_ != nullptr) return device_->finish(stream_.residual.data());
  return failure;
}

Result<QuantizedLayer> Layer::calibrate(const std::function<bool()>& expert_done) {
  if (Status status = route_tokens(); !status.ok()) return status;
  if (Status status = add_shared(); !status.ok()) return status;
  QuantizedLayer layer;
  layer.experts.resize(static_cast<std::size_t>(spec_.experts));
  layer.samples.resize(layer.experts.size());
  if (options_.method != Method::gptq) {
    auto fold = search_fold();
    if (!fold) return fold.status();
    divide_normed(*fold);
    layer.fold = std::move(*fold);
    if (activation_.may_be_static())
      input_scale_ = static_scale(options_.activation_scale, activation_, stream_.normed, hidden_);
  }
  if (Status status = start_device(); !status.ok()) return status;
  const auto work = [&](int expert, Samples& samples, Floats& out) -> Status {
    samples = samples_of(expert, options_.min_samples);
    layer.samples[expert] = samples.routed;
    QuantizedExpert& quantized = layer.experts[expert];
    if (device_ != nullptr) {
      const auto plain = views(expert);
      if (!plain) return plain.status();
      const LayerQuantizer::Options each{gptq_options(samples, hidden_), gptq_options(samples, inner_)};
      return device_->quantize(omp_get_thread_num(), *plain, samples, each, quantized);
    }
    auto ffn = load(expert);
    if (!ffn) return ffn.status();
    Floats y;
    if (Status status = quantize_expert(std::move(*ffn), samples, quantized, y); !status.ok()) return status;
    out = output(quantized.down, std::move(y), samples);
    return {};
  };
  if (Status status = for_each_expert(work, expert_done); !status.ok()) return status;
  return layer;
}

Status Layer::run(const QuantizedLayer& quantized) {
  if (Status status = route_tokens(); !status.ok()) return status;
  if (Status status = add_shared(); !status.ok()) return status;
  divide_normed(quantized.fold);
  input_scale_ = quantized.experts.front().gate.input_scale;
  if (Status status = start_device(); !status.ok()) return status;
  const auto work = [&](int expert, Samples& samples, Floats& out) -> Status {
    samples = samples_of(expert, 0);
    const QuantizedExpert& e = quantized.experts[expert];
    if (device_ != nullptr) return device_->run(omp_get_thread_num(), e, samples);
    out = output(e.down, inner_of({dequantized(e.gate), dequantized(e.up), {}}, samples), samples);
    return {};
  };
  return for_each_expert(work, {});
}

}  // namespace

Result<QuantizedLayer> calibrate_layer(const Checkpoint& checkpoint, int layer, const LayerOptions& options,
                                       Stream& stream, const std::function<bool()>& expert_done) {
  return Layer(checkpoint, layer, options, stream).calibrate(expert_done);
}

Status run_layer(const Checkpoint& checkpoint, int layer, const LayerOptions& options,
                 const QuantizedLayer& quantized, Stream& stream) {
  return Layer(checkpoint, layer, options, stream).run(quantized);
}

Result<MatrixView> plain_shared_expert(const Checkpoint& checkpoint, int layer, Projection projection) {
  const auto matrix = checkpoint.shared_expert(layer, projection);
  if (!matrix) return matrix.status();
  if (const auto* view = std::get_if<MatrixView>(&*matrix)) return *view;
  return Status(Code::unsupported, fmt::format("{}: layer {}: the shared expert is quantized already",
                                               checkpoint.directory().string(), layer));
}

}  // namespace gatefold
