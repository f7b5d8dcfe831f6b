#include "gatefold/calibrate.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "format/row_kernels.h"
#include "model/calibration_files.h"
#include "model/eval.h"
#include "model/smoothing.h"
#include "model/step.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view method_names[] = {"gptq", "awq", "smoothquant"};

/// FNV-1a: tells runs apart, no more.
class Hash {
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) value_ = (value_ ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3;
  }
  void add(std::string_view text) { add(std::as_bytes(std::span(text))); }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325;
};

/// What must be the same for a run to be resumed.
std::string describe_job(const Checkpoint& source, std::span<const std::int32_t> tokens,
                         const CalibrateOptions& options) {
  Hash model, text;
  model.add(source.config_text());
  for (const TensorEntry& entry : source.tensors())
    model.add(fmt::format("{} {} {};", entry.name, entry.begin, entry.end));
  std::error_code ignored;
  for (const fs::path& file : source.files())
    model.add(fmt::format("{};", fs::last_write_time(file, ignored).time_since_epoch().count()));
  text.add(std::as_bytes(tokens));
  return fmt::format(
      "{} {} on {}, {}, window {}, damping {}, at least {} samples, model {:016x}, {} tokens {:016x}",
      name(options.method), scheme(options.scheme).name,
      options.device.kind == Device::Kind::cuda ? "cuda" : "cpu",
      options.activation_scale == ActivationScale::mse ? "mse" : "percentile", options.window,
      options.damping, options.min_samples, model.value(), tokens.size(), text.value());
}

Status check_method(const CalibrateOptions& options) {
  const Scheme& row = scheme(options.scheme);
  if (options.window < 2 || options.min_samples < 0 || options.threads < 0 || !(options.damping >= 0))
    return {Code::invalid_argument,
            fmt::format("window {}, min_samples {}, threads {}, damping {}", options.window,
                        options.min_samples, options.threads, options.damping)};
  if (!row.weight.quantized())
    return {Code::invalid_argument, fmt::format("{} is not quantized: nothing to calibrate", row.name)};
  if (options.method != Method::gptq && options.device.kind == Device::Kind::cuda)
    return {Code::invalid_argument,
            fmt::format("{} runs on the CPU; gptq runs on a GPU, too", name(options.method))};
  if (options.method == Method::smoothquant && !row.quantizes_activations())
    return {
        Code::invalid_argument,
        fmt::format("smoothquant balances weights and activations, but {} leaves activations as they are; "
                    "awq is for such schemes",
                    row.name)};
  return {};
}

/// All tokens, window by window, up to the experts of a layer.
class Text {
 public:
  Text(const Decoder::State& model, std::span<const std::int32_t> tokens, int window)
      : model_(model), hidden_(model.checkpoint.config().hidden), window_(window) {
    sequence_.layers.resize(model.layers.size());
    const auto size =
        tokens.size() / static_cast<std::size_t>(window) * static_cast<std::size_t>(window * hidden_);
    stream_.residual.resize(size);
    stream_.normed.resize(size);
    for_each_window([&](Step& step, float* residual, float*) {
      step.embed(tokens.data() + (residual - stream_.residual.data()) / hidden_);
      std::copy_n(sequence_.residual.data(), window_ * hidden_, residual);
    });
  }

  Stream& stream() { return stream_; }

  /// Through the attention of a layer and, where there are no experts, its MLP.
  Status advance(int index) {
    const DecoderLayer& layer = model_.layers[index];
    const bool dense = !model_.checkpoint.config().is_moe[index];
    Status status;
    for_each_window([&](Step& step, float* residual, float* normed) {
      std::copy_n(residual, window_ * hidden_, sequence_.residual.data());
      step.attend(layer, sequence_.layers[index]);
      step.normalize(layer.mlp_norm);
      std::copy_n(sequence_.normed.data(), window_ * hidden_, normed);
      if (dense && status.ok()) status = step.mlp(layer, index, 0, {});
      std::copy_n(sequence_.residual.data(), window_ * hidden_, residual);
    });
    for (auto* buffer : {&sequence_.layers[index].keys, &sequence_.layers[index].values}) *buffer = {};
    return status;
  }

 private:
  template <class Function>
  void for_each_window(const Function& f) {
    for (std::size_t at = 0; at < stream_.residual.size();
         at += static_cast<std::size_t>(window_ * hidden_)) {
      sequence_.length = 0;
      Step step(model_, sequence_, window_, window_);
      f(step, stream_.residual.data() + at, stream_.normed.data() + at);
    }
  }

  const Decoder::State& model_;
  const std::int64_t hidden_, window_;
  Sequence::State sequence_;
  Stream stream_;
};

/// Tensors that the folds of the layers change: what writes the experts' inputs, and what else reads them.
class Replacements {
 public:
  explicit Replacements(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  Status add(int layer, const std::vector<float>& fold) {
    if (fold.empty()) return {};
    const std::string norm = fmt::format("model.layers.{}.post_attention_layernorm.weight", layer);
    const auto written = checkpoint_.tensor(norm);
    if (!written) return written.status();
    scale(*written, fold, true);
    const auto router = checkpoint_.router(layer);
    if (!router) return router.status();
    scale(*router, fold, false);
    const SharedExpert& shared = checkpoint_.config().moe.shared;
    if (shared.intermediate == 0) return {};
    for (const Projection p : {Projection::gate, Projection::up}) {
      const auto matrix = plain_shared_expert(checkpoint_, layer, p);
      if (!matrix) return matrix.status();
      const auto count = static_cast<std::size_t>(matrix->rows * matrix->cols);
      scale({static_cast<const std::byte*>(matrix->data),
             matrix->dtype,
             {},
             count * static_cast<std::size_t>(bits(matrix->dtype) / 8)},
            fold, false);
    }
    if (!shared.gated) return {};
    const auto gate = checkpoint_.shared_expert_gate(layer);
    if (!gate) return gate.status();
    scale(*gate, fold, false);
    return {};
  }

  std::optional<std::span<const std::byte>> find(const TensorEntry& entry) const {
    const auto found = bytes_.find(checkpoint_.view(entry).data);
    if (found == bytes_.end()) return std::nullopt;
    return found->second;
  }

 private:
  /// Channel by channel along the last dimension.
  void scale(const TensorView& view, const std::vector<float>& fold, bool divide) {
    const std::size_t width = static_cast<std::size_t>(bits(view.dtype)) / 8;
    std::vector<float> values(view.bytes / width);
    row_kernels().widen(view.dtype, view.data, 0, static_cast<std::int64_t>(values.size()), values.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float factor = fold[i % fold.size()];
      values[i] = divide ? values[i] / factor : values[i] * factor;
    }
    std::vector<std::byte>& out = bytes_[view.data];
    out.resize(view.bytes);
    const Format format = view.dtype == DType::f32   ? formats::f32
                          : view.dtype == DType::f16 ? formats::f16
                                                     : formats::bf16;
    with_format(format, [&]<Format F>() {
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint32_t code = encode<F>(values[i]);
        std::memcpy(out.data() + i * width, &code, width);
      }
    });
  }

  const Checkpoint& checkpoint_;
  std::map<const std::byte*, std::vector<std::byte>> bytes_;  // by where the tensor lies in the mapping
};

/// A layer that a former run has done: read, and run.
Result<QuantizedLayer> resume_layer(const CalibrationFiles& files, const Checkpoint& source, int layer,
                                    const CalibrateOptions& options, Stream& stream) {
  const auto file = files.load(layer);
  if (!file) return file.status();
  auto quantized = file->layer(options.scheme, source.config().moe);
  if (!quantized) return quantized.status();
  if (Status status = run_layer(source, layer, options, *quantized, stream); !status.ok()) return status;
  return quantized;
}

}  // namespace

std::string_view name(Method method) {
  return method_names[static_cast<std::size_t>(method)];
}

std::optional<Method> find_method(std::string_view wanted) {
  for (std::size_t i = 0; i < std::size(method_names); ++i)
    if (method_names[i] == wanted) return static_cast<Method>(i);
  return std::nullopt;
}

Result<CalibrateReport> calibrate(const Checkpoint& source, const fs::path& destination,
                                  std::span<const std::int32_t> tokens, const CalibrateOptions& given) {
  const auto start = std::chrono::steady_clock::now();
  CalibrateOptions options = given;
  if (options.threads == 0) options.threads = omp_get_max_threads();
  if (Status status = check_method(options); !status.ok()) return status;
  if (options.device.kind == Device::Kind::cuda)
    if (const auto device = cuda::device_info(options.device.index); !device) return device.status();
  if (Status status = check_windows(tokens, options.window); !status.ok()) return status;
  const ModelConfig& config = source.config();
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= config.vocab)
      return Status(Code::invalid_argument,
                    fmt::format("token {} is {}: not in [0, {})", i, tokens[i], config.vocab));
  const auto stored = source.stored_scheme();
  if (!stored || scheme(*stored).weight.quantized())
    return Status(Code::invalid_argument,
                  fmt::format("{}: its experts are quantized already", source.directory().string()));
  auto dense = load_dense(source, {.threads = options.threads});
  if (!dense) return dense.status();
  const auto files =
      CalibrationFiles::open(destination, describe_job(source, tokens, options), options.resume);
  if (!files) return files.status();

  CalibrateReport report;
  report.fewest_samples = static_cast<std::int64_t>(tokens.size());
  std::map<int, LayerFile> layers;
  Replacements replacements(source);
  std::int64_t done = 0, total = 0;
  for (int i = 0; i < config.layers; ++i)
    if (config.is_moe[i] && !files->has(i)) total += config.moe.experts;
  const auto expert_done = [&] {
    if (options.progress) options.progress(++done, total);
    return !(options.cancelled && options.cancelled());
  };
  Text text(**dense, tokens, options.window);
  for (int i = 0; i < config.layers; ++i) {
    if (Status status = text.advance(i); !status.ok()) return status;
    if (!config.is_moe[i]) continue;
    const bool resumed = files->has(i);
    const auto layer = resumed ? resume_layer(*files, source, i, options, text.stream())
                               : calibrate_layer(source, i, options, text.stream(), expert_done);
    if (!layer) return layer.status();
    report.resumed_layers += resumed;
    if (!resumed)
      if (Status status = files->save(i, *layer); !status.ok()) return status;
    auto file = files->load(i);
    if (!file) return file.status();
    layers.emplace(i, std::move(*file));
    for (const std::int64_t samples : layer->samples) {
      report.rare_experts += samples < options.min_samples;
      report.fewest_samples = std::min(report.fewest_samples, samples);
    }
    if (Status status = replacements.add(i, layer->fold); !status.ok()) return status;
  }

  ConvertOptions convert_options;
  convert_options.scheme = options.scheme;
  convert_options.shard_bytes = options.shard_bytes;
  convert_options.threads = options.threads;
  convert_options.cancelled = options.cancelled;
  convert_options.static_input =
      options.method != Method::gptq && has_static_scale(scheme(options.scheme).activation);
  convert_options.matrix = [&](int layer, int expert, Projection projection) -> Result<QuantizedMatrix> {
    return layers.at(layer).matrix(options.scheme, config.moe, expert, projection);
  };
  convert_options.replacement = [&](const TensorEntry& entry) { return replacements.find(entry); };
  auto written = convert(source, destination, convert_options);
  if (!written) return written.status();
  files->remove();
  report.written = *written;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace gatefold
