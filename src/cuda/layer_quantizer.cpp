// Calibration of a layer's experts on a GPU: each worker has a stream, and does what quantize_expert in
// model/calibrate_layer.cpp does.
#include "quantize/layer_quantizer.h"

#include <algorithm>
#include <vector>

#include "cuda/activation_rounder.h"
#include "cuda/expert_kernels.h"
#include "cuda/gptq.h"
#include "cuda/smoothing.h"

namespace gatefold::cuda {
namespace {

constexpr std::int64_t kChunk = 4096;  // tokens multiplied at once

/// What all workers share: tokens on the device.
struct Shared {
  LayerInputs inputs;
  int device = 0;
  Memory normed, residual, fold;
  cudaEvent_t last_added = nullptr;
};

class Worker {
 public:
  Worker(Shared& shared, cudaStream_t stream, cudaEvent_t added, Blas blas)
      : shared_(shared),
        stream_(stream),
        added_(added),
        blas_(std::move(blas)),
        gptq_(shared.inputs.scheme, shared.device, stream),
        rounder_(shared.inputs.scheme, shared.device, stream),
        smoothing_(shared.inputs.scheme, shared.device, stream) {}
  ~Worker() {
    cudaStreamSynchronize(stream_);
    cudaEventDestroy(added_);
    cudaStreamDestroy(stream_);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  static Result<std::unique_ptr<Worker>> create(Shared& shared);

  Status quantize(const PlainExpert& expert, const Samples& samples, const LayerQuantizer::Options& options,
                  QuantizedExpert& out);
  Status run(const QuantizedExpert& expert, const Samples& samples);
  Status add();

 private:
  Status start(const PlainExpert& expert, const Samples& samples, float* gate_up, float* down);
  Status upload(const MatrixView& view, float* out);
  template <class Load>
  Status add_up(std::int64_t k, const Load& load);
  Status load_inputs(std::int64_t begin, std::int64_t count);
  Status load_inner(std::int64_t begin, std::int64_t count);
  Status smooth(const Samples& samples);
  Status run_inner(const float* gate_up);
  Status quantize_matrices(int count, std::int64_t n, std::int64_t k, const float* weights,
                           const GptqOptions& options, float* values, QuantizedMatrix* out);
  std::int64_t count_from(std::int64_t begin) const { return std::min(kChunk, samples_ - begin); }
  Status reserve(Buffer& buffer, std::int64_t numbers) {
    return buffer.reserve(static_cast<std::size_t>(numbers) * sizeof(float), shared_.device);
  }
  Status finish_launches(std::string_view what) {
    return blas_.status().ok() ? check_launch(what) : blas_.status();
  }

  Shared& shared_;
  cudaStream_t stream_;
  cudaEvent_t added_;
  Blas blas_;
  Gptq gptq_;
  ActivationRounder rounder_;
  Smoothing smoothing_;
  std::int64_t samples_ = 0;
  std::optional<TensorScale> down_scale_;  // static, of down's inputs
  Buffer tokens_, weights_, importance_;   // [samples]
  Buffer staged_, plain_, plain_down_;     // one matrix as it was uploaded; gate and up; down
  Buffer gate_up_, down_;                  // as quantized
  Buffer hessian_, rows_, products_;       // rows_, products_: of a chunk
  Buffer inner_;                           // [samples, I]
  Buffer factors_;                         // [I]
};

Result<std::unique_ptr<Worker>> Worker::create(Shared& shared) {
  cudaStream_t stream = nullptr;
  cudaEvent_t added = nullptr;
  if (Status status = check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
      !status.ok())
    return status;
  Status status = check(cudaEventCreateWithFlags(&added, cudaEventDisableTiming), "make an event");
  if (status.ok()) {
    Result<Blas> blas = Blas::create(shared.device, stream);
    if (blas) return std::make_unique<Worker>(shared, stream, added, std::move(*blas));
    status = blas.status();
    cudaEventDestroy(added);
  }
  cudaStreamDestroy(stream);
  return status;
}

Status Worker::upload(const MatrixView& view, float* out) {
  const std::int64_t count = view.rows * view.cols;
  const auto bytes = static_cast<std::size_t>(count * (bits(view.dtype) / 8));
  if (Status status = staged_.reserve(bytes, shared_.device); !status.ok()) return status;
  if (Status status = copy(staged_.as<void>(), view.data, bytes, stream_); !status.ok()) return status;
  widen(view.dtype, staged_.as<void>(), count, out, stream_);
  return {};
}

Status Worker::start(const PlainExpert& expert, const Samples& samples, float* gate_up, float* down) {
  const std::int64_t hidden = shared_.inputs.hidden, inner = shared_.inputs.inner;
  samples_ = samples.size();
  for (const auto& [buffer, numbers] : {std::pair{&tokens_, samples_},
                                        {&weights_, samples_},
                                        {&importance_, samples_},
                                        {&inner_, samples_ * inner},
                                        {&hessian_, std::max(hidden * hidden, inner * inner)},
                                        {&rows_, kChunk * std::max(hidden, inner)},
                                        {&products_, kChunk * std::max(hidden, 2 * inner)}})
    if (Status status = reserve(*buffer, numbers); !status.ok()) return status;
  const auto bytes = static_cast<std::size_t>(samples_) * sizeof(float);
  for (const auto& [to, from] : {std::pair<void*, const void*>{tokens_.as<void>(), samples.tokens.data()},
                                 {weights_.as<void>(), samples.weights.data()},
                                 {importance_.as<void>(), samples.importance.data()}})
    if (Status status = copy(to, from, bytes, stream_); !status.ok()) return status;
  if (Status status = upload(expert.gate, gate_up); !status.ok()) return status;
  if (Status status = upload(expert.up, gate_up + inner * hidden); !status.ok()) return status;
  return upload(expert.down, down);
}

/// Inputs of gate and up, to rows_.
Status Worker::load_inputs(std::int64_t begin, std::int64_t count) {
  gather_rows(shared_.normed.as<float>(), tokens_.as<std::int32_t>() + begin, count, shared_.inputs.hidden,
              rows_.as<float>(), stream_);
  return rounder_.round(shared_.inputs.input_scale, count, shared_.inputs.hidden, rows_.as<float>());
}

/// Inputs of down.
Status Worker::load_inner(std::int64_t begin, std::int64_t count) {
  const std::int64_t inner = shared_.inputs.inner;
  if (Status status = copy(rows_.as<float>(), inner_.as<float>() + begin * inner,
                           static_cast<std::size_t>(count * inner) * sizeof(float), stream_);
      !status.ok())
    return status;
  return rounder_.round(down_scale_, count, inner, rows_.as<float>());
}

/// hessian_ [k, k] = sum of importance * x x^T
template <class Load>
Status Worker::add_up(std::int64_t k, const Load& load) {
  float *x = rows_.as<float>(), *hessian = hessian_.as<float>();
  if (Status status = fill(hessian, 0, static_cast<std::size_t>(k * k) * sizeof(float), stream_);
      !status.ok())
    return status;
  for (std::int64_t begin = 0; begin < samples_; begin += kChunk) {
    const std::int64_t count = count_from(begin);
    if (Status status = load(begin, count); !status.ok()) return status;
    scale_rows(importance_.as<float>() + begin, true, count, k, x, stream_);
    blas_.multiply(k, k, count, 1, {x, k, true}, {x, k}, 1, hessian, k);
  }
  return {};
}

/// inner_ = silu(gate x) * (up x), of the tokens that tokens_ begins with
Status Worker::run_inner(const float* gate_up) {
  const std::int64_t hidden = shared_.inputs.hidden, inner = shared_.inputs.inner;
  for (std::int64_t begin = 0; begin < samples_; begin += kChunk) {
    const std::int64_t count = count_from(begin);
    if (Status status = load_inputs(begin, count); !status.ok()) return status;
    blas_.multiply(count, 2 * inner, hidden, 1, {rows_.as<float>(), hidden}, {gate_up, hidden, true}, 0,
                   products_.as<float>(), 2 * inner);
    activate(products_.as<float>(), count, inner, inner_.as<float>() + begin * inner, stream_);
  }
  return finish_launches("run an expert");
}

/// What down reads is scaled in the rows of up.
Status Worker::smooth(const Samples& samples) {
  const std::int64_t hidden = shared_.inputs.hidden, inner = shared_.inputs.inner, all = samples_;
  std::vector<std::int32_t> few(static_cast<std::size_t>(std::min(sample_rows, all)));
  for (std::size_t i = 0; i < few.size(); ++i)
    few[i] = samples.tokens[i * static_cast<std::size_t>(all) / few.size()];
  if (Status status = copy(tokens_.as<void>(), few.data(), few.size() * sizeof(std::int32_t), stream_);
      !status.ok())
    return status;
  samples_ = static_cast<std::int64_t>(few.size());
  float *up = plain_.as<float>() + inner * hidden, *down = plain_down_.as<float>();
  if (Status status = run_inner(plain_.as<float>()); !status.ok()) return status;
  const auto s = smoothing_.search(blas_, gptq_, shared_.inputs.method == Method::smoothquant, false,
                                   inner_.as<float>(), samples_, down, 1, hidden, inner);
  if (!s) return s.status();
  const std::size_t bytes = s->size() * sizeof(float);
  if (Status status = copy(factors_.as<void>(), s->data(), bytes, stream_); !status.ok()) return status;
  scale_columns(factors_.as<float>(), false, hidden, inner, down, down, stream_);
  std::vector<float> reciprocals(*s);
  for (float& factor : reciprocals) factor = 1 / factor;
  if (Status status = copy(factors_.as<void>(), reciprocals.data(), bytes, stream_); !status.ok())
    return status;
  scale_rows(factors_.as<float>(), false, inner, hidden, up, stream_);
  samples_ = all;
  return copy(tokens_.as<void>(), samples.tokens.data(), samples.tokens.size() * sizeof(std::int32_t),
              stream_);
}

/// For inputs with hessian_.
Status Worker::quantize_matrices(int count, std::int64_t n, std::int64_t k, const float* weights,
                                 const GptqOptions& options, float* values, QuantizedMatrix* out) {
  return shared_.inputs.method == Method::awq
             ? gptq_.nearest(count, n, k, weights, hessian_.as<float>(), values, out)
             : gptq_.run(blas_, count, n, k, weights, hessian_.as<float>(), options, values, out);
}

Status Worker::quantize(const PlainExpert& expert, const Samples& samples,
                        const LayerQuantizer::Options& options, QuantizedExpert& out) {
  const LayerInputs& inputs = shared_.inputs;
  const std::int64_t hidden = inputs.hidden, inner = inputs.inner;
  for (const auto& [buffer, numbers] : {std::pair{&plain_, 2 * inner * hidden},
                                        {&gate_up_, 2 * inner * hidden},
                                        {&plain_down_, inner * hidden},
                                        {&down_, inner * hidden},
                                        {&factors_, inner}})
    if (Status status = reserve(*buffer, numbers); !status.ok()) return status;
  if (Status status = start(expert, samples, plain_.as<float>(), plain_down_.as<float>()); !status.ok())
    return status;
  if (!inputs.fold.empty())
    scale_columns(shared_.fold.as<float>(), false, 2 * inner, hidden, plain_.as<float>(), plain_.as<float>(),
                  stream_);
  if (inputs.method != Method::gptq)
    if (Status status = smooth(samples); !status.ok()) return status;

  if (Status status = add_up(hidden, [&](auto begin, auto count) { return load_inputs(begin, count); });
      !status.ok())
    return status;
  QuantizedMatrix both[2];
  if (Status status = quantize_matrices(2, inner, hidden, plain_.as<float>(), options.gate_up,
                                        gate_up_.as<float>(), both);
      !status.ok())
    return status;
  both[0].input_scale = both[1].input_scale = inputs.input_scale;
  out.gate = std::move(both[0]);
  out.up = std::move(both[1]);

  if (Status status = run_inner(gate_up_.as<float>()); !status.ok()) return status;
  down_scale_.reset();
  if (inputs.input_scale) {
    std::vector<float> y(static_cast<std::size_t>(samples_ * inner));
    if (Status status = copy(y.data(), inner_.as<float>(), y.size() * sizeof(float), stream_); !status.ok())
      return status;
    down_scale_ = inputs.down_scale(y);
  }
  if (Status status = add_up(inner, [&](auto begin, auto count) { return load_inner(begin, count); });
      !status.ok())
    return status;
  if (Status status = quantize_matrices(1, hidden, inner, plain_down_.as<float>(), options.down,
                                        down_.as<float>(), &out.down);
      !status.ok())
    return status;
  out.down.input_scale = down_scale_;
  return {};
}

Status Worker::run(const QuantizedExpert& expert, const Samples& samples) {
  const std::int64_t hidden = shared_.inputs.hidden, inner = shared_.inputs.inner;
  if (Status status = reserve(gate_up_, 2 * inner * hidden); !status.ok()) return status;
  if (Status status = reserve(down_, inner * hidden); !status.ok()) return status;
  std::vector<float> values[3];
  for (const auto& [matrix, to] :
       {std::pair{&expert.gate, &values[0]}, {&expert.up, &values[1]}, {&expert.down, &values[2]}}) {
    to->resize(static_cast<std::size_t>(matrix->n * matrix->k));
    dequantize(*matrix, to->data());
  }
  const PlainExpert plain{.gate = {values[0].data(), DType::f32, inner, hidden},
                          .up = {values[1].data(), DType::f32, inner, hidden},
                          .down = {values[2].data(), DType::f32, hidden, inner}};
  if (Status status = start(plain, samples, gate_up_.as<float>(), down_.as<float>()); !status.ok())
    return status;
  down_scale_ = expert.down.input_scale;
  return run_inner(gate_up_.as<float>());
}

Status Worker::add() {
  const std::int64_t hidden = shared_.inputs.hidden, inner = shared_.inputs.inner;
  if (shared_.last_added != nullptr)
    if (Status status = check(cudaStreamWaitEvent(stream_, shared_.last_added), "wait for an event");
        !status.ok())
      return status;
  for (std::int64_t begin = 0; begin < samples_; begin += kChunk) {
    const std::int64_t count = count_from(begin);
    if (Status status = load_inner(begin, count); !status.ok()) return status;
    scale_rows(weights_.as<float>() + begin, false, count, inner, rows_.as<float>(), stream_);
    blas_.multiply(count, hidden, inner, 1, {rows_.as<float>(), inner}, {down_.as<float>(), inner, true}, 0,
                   products_.as<float>(), hidden);
    add_rows(products_.as<float>(), tokens_.as<std::int32_t>() + begin, count, hidden,
             shared_.residual.as<float>(), stream_);
  }
  if (Status status = finish_launches("add an expert's output"); !status.ok()) return status;
  shared_.last_added = added_;
  return check(cudaEventRecord(added_, stream_), "record an event");
}

class CudaLayerQuantizer final : public LayerQuantizer {
 public:
  Status init(const LayerInputs& inputs, int workers, int device) {
    shared_.inputs = inputs;
    shared_.device = device;
    const auto bytes = static_cast<std::size_t>(inputs.tokens * inputs.hidden) * sizeof(float);
    for (const auto& [memory, from] :
         {std::pair{&shared_.normed, inputs.normed}, {&shared_.residual, inputs.residual}}) {
      Result<Memory> allocated = Memory::allocate(bytes, "hidden states", device);
      if (!allocated) return allocated.status();
      *memory = std::move(*allocated);
      if (Status status = copy(memory->data(), from, bytes); !status.ok()) return status;
    }
    if (!inputs.fold.empty()) {
      Result<Memory> fold = Memory::allocate(inputs.fold.size_bytes(), "scales of channels", device);
      if (!fold) return fold.status();
      shared_.fold = std::move(*fold);
      if (Status status = copy(shared_.fold.data(), inputs.fold.data(), inputs.fold.size_bytes());
          !status.ok())
        return status;
    }
    if (Status status = synchronize(); !status.ok()) return status;
    const DeviceGuard guard(device);
    for (int i = 0; i < workers; ++i) {
      auto worker = Worker::create(shared_);
      if (!worker) return worker.status();
      workers_.push_back(std::move(*worker));
    }
    return {};
  }

  Status quantize(int worker, const PlainExpert& expert, const Samples& samples, const Options& options,
                  QuantizedExpert& out) override {
    const DeviceGuard guard(shared_.device);
    return workers_[static_cast<std::size_t>(worker)]->quantize(expert, samples, options, out);
  }
  Status run(int worker, const QuantizedExpert& expert, const Samples& samples) override {
    const DeviceGuard guard(shared_.device);
    return workers_[static_cast<std::size_t>(worker)]->run(expert, samples);
  }
  Status add(int worker) override {
    const DeviceGuard guard(shared_.device);
    return workers_[static_cast<std::size_t>(worker)]->add();
  }
  Status finish(float* residual) override {
    const DeviceGuard guard(shared_.device);
    if (Status status = check(cudaDeviceSynchronize(), "calibrate a layer"); !status.ok()) return status;
    return copy(residual, shared_.residual.data(), shared_.residual.bytes());
  }

 private:
  Shared shared_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace
}  // namespace gatefold::cuda

namespace gatefold {

Result<std::unique_ptr<LayerQuantizer>> cuda_layer_quantizer(const LayerInputs& inputs, int workers,
                                                             int device) {
  auto layer = std::make_unique<cuda::CudaLayerQuantizer>();
  if (Status status = layer->init(inputs, workers, device); !status.ok()) return status;
  return std::unique_ptr<LayerQuantizer>(std::move(layer));
}

}  // namespace gatefold
