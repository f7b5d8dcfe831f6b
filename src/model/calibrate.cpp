#include "gatefold/calibrate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "format/row_kernels.h"
#include "model/calibration_checks.h"
#include "model/calibration_files.h"
#include "model/text_stream.h"

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

/// "mxfp4", or of layers and modules in different schemes "mxfp4, none, int8; lm_head int8".
std::string describe(const ModelSchemes& schemes) {
  std::vector<std::string> parts;
  for (const auto& id : schemes.experts) parts.emplace_back(id ? scheme(*id).name : "none");
  const bool same = std::all_of(parts.begin(), parts.end(), [&](const auto& p) { return p == parts[0]; });
  if (same) parts.resize(1);
  for (const auto& [module, id] : schemes.others)
    parts.push_back(module + " " + std::string(scheme(id).name));
  return fmt::format("{}{}", fmt::join(parts, ", "), schemes.fp8_kv_cache ? ", fp8 KV cache" : "");
}

/// What must be the same for a run to be resumed.
std::string describe_job(const Checkpoint& source, std::span<const std::int32_t> tokens,
                         const ModelSchemes& schemes, const CalibrateOptions& options) {
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
      name(options.method), describe(schemes), options.device.kind == Device::Kind::cuda ? "cuda" : "cpu",
      options.activation_scale == ActivationScale::mse ? "mse" : "percentile", options.window,
      options.effective_damping(), options.min_samples, model.value(), tokens.size(), text.value());
}

Status check_schemes(const Checkpoint& source, const ModelSchemes& schemes, const CalibrateOptions& options) {
  bool any = false;
  for (int i = 0; i < source.config().layers; ++i) {
    const auto& id = schemes.experts[static_cast<std::size_t>(i)];
    if (id)
      if (Status status = check_method(scheme(*id), options.method); !status.ok()) return status;
    any |= id.has_value();
    if (source.config().moe.shared.intermediate == 0 || options.method == Method::gptq) continue;
    const std::string shared = source.shared_expert_module(i, Projection::gate);
    if (schemes.other(shared))
      return {Code::unsupported,
              fmt::format("{} scales the inputs of {}, which the recipe quantizes: gptq does not",
                          name(options.method), shared)};
  }
  if (!any)
    return {Code::invalid_argument,
            fmt::format("{} is for routed experts, and the recipe quantizes none", name(options.method))};
  return {};
}

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
                                    const LayerOptions& options, Stream& stream) {
  const auto file = files.load(layer);
  if (!file) return file.status();
  auto quantized = file->layer(options.scheme, source.config().moe);
  if (!quantized) return quantized.status();
  if (Status status = run_layer(source, layer, options, *quantized, stream); !status.ok()) return status;
  return quantized;
}

/// A layer that the recipe leaves as it is.
Status pass_layer(const Checkpoint& source, int layer, const LayerOptions& options, Stream& stream) {
  const auto same = rounded_layer(source, layer, options.scheme, {}, options.threads);
  return same ? run_layer(source, layer, options, *same, stream) : same.status();
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
  if (Status status = check_calibration(source, tokens, options); !status.ok()) return status;
  if (options.device.kind == Device::Kind::cuda)
    if (const auto device = cuda::device_info(options.device.index); !device) return device.status();
  const ModelConfig& config = source.config();
  std::vector<KvScales> kv_scales;
  if (options.recipe && options.recipe->fp8_kv_cache) {
    auto scales = search_kv_scales(source, tokens, options.window, options.threads);
    if (!scales) return scales.status();
    kv_scales = std::move(*scales);
  }
  auto dense = load_dense(source, {.scheme = options.recipe ? std::nullopt : std::optional(options.scheme),
                                   .recipe = options.recipe,
                                   .threads = options.threads});
  if (!dense) return dense.status();
  for (std::size_t i = 0; i < kv_scales.size(); ++i) (*dense)->layers[i].kv_scales = kv_scales[i];
  const ModelSchemes& schemes = (*dense)->schemes;
  if (Status status = check_schemes(source, schemes, options); !status.ok()) return status;
  const auto files =
      CalibrationFiles::open(destination, describe_job(source, tokens, schemes, options), options.resume);
  if (!files) return files.status();

  CalibrateReport report;
  report.fewest_samples = static_cast<std::int64_t>(tokens.size());
  std::map<int, LayerFile> layers;
  Replacements replacements(source);
  std::int64_t done = 0, total = 0;
  for (int i = 0; i < config.layers; ++i)
    if (config.is_moe[i] && schemes.experts[i] && !files->has(i)) total += config.moe.experts;
  const auto expert_done = [&] {
    if (options.progress) options.progress(++done, total);
    return !(options.cancelled && options.cancelled());
  };
  TextStream text(**dense, tokens, options.window);
  for (int i = 0; i < config.layers; ++i) {
    if (Status status = text.advance(i); !status.ok()) return status;
    if (!config.is_moe[i]) continue;
    LayerOptions layer_options{options, schemes.other(source.shared_expert_module(i, Projection::gate))};
    layer_options.scheme = schemes.experts[i].value_or(config.moe.scheme);
    if (!schemes.experts[i]) {
      if (Status status = pass_layer(source, i, layer_options, text.stream()); !status.ok()) return status;
      continue;
    }
    const bool resumed = files->has(i);
    const auto layer = resumed ? resume_layer(*files, source, i, layer_options, text.stream())
                               : calibrate_layer(source, i, layer_options, text.stream(), expert_done);
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
  convert_options.recipe = options.recipe;
  convert_options.kv_scales = kv_scales;
  convert_options.shard_bytes = options.shard_bytes;
  convert_options.threads = options.threads;
  convert_options.cancelled = options.cancelled;
  convert_options.static_input = options.method != Method::gptq;
  convert_options.matrix = [&](int layer, int expert, Projection projection) -> Result<QuantizedMatrix> {
    return layers.at(layer).matrix(*schemes.experts[layer], config.moe, expert, projection);
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
