#include <fmt/format.h>

#include "checkpoint/mapped_file.h"
#include "gatefold/calibrate.h"
#include "gatefold/checkpoint.h"
#include "gatefold/decoder.h"
#include "tools/cli.h"
#include "tools/interrupt.h"
#include "tools/progress.h"

namespace gatefold::cli {
namespace {

struct Options {
  std::string source, destination;
  std::optional<SchemeId> scheme;
  ConvertOptions convert;
  std::optional<Method> method;  ///< none: round to nearest
  CalibrateOptions calibrate;
  std::string calibration;  ///< file
  std::int64_t limit = 131072;
  bool all_experts = false;
};

/// The text of a byte-level model, or token ids.
Result<std::vector<std::int32_t>> read_calibration(const Options& options, const Checkpoint& source) {
  auto tokens = [&]() -> Result<std::vector<std::int32_t>> {
    if (options.calibration.ends_with(".npy") || options.calibration.ends_with(".safetensors"))
      return read_tokens(options.calibration, source.config().vocab);
    const Result<std::string> text = read_text(options.calibration, 1ull << 32);
    if (!text) return text.status();
    return text_tokens(source, *text);
  }();
  if (tokens && options.limit > 0 && tokens->size() > static_cast<std::size_t>(options.limit))
    tokens->resize(static_cast<std::size_t>(options.limit));
  return tokens;
}

Result<ConvertReport> calibrated(const Options& options, const Checkpoint& source, Json* json) {
  const auto tokens = read_calibration(options, source);
  if (!tokens) return tokens.status();
  CalibrateOptions calibrate_options = options.calibrate;
  calibrate_options.scheme = *options.scheme;
  calibrate_options.method = *options.method;
  calibrate_options.shard_bytes = options.convert.shard_bytes;
  calibrate_options.cancelled = DeferInterrupts::pending;
  if (options.all_experts) calibrate_options.min_samples = static_cast<std::int64_t>(tokens->size());
  Progress progress(fmt::format("{} to {}", name(*options.method), scheme(*options.scheme).name), "experts");
  calibrate_options.progress = [&](std::int64_t done, std::int64_t total) {
    progress.set(static_cast<std::uint64_t>(done), static_cast<std::uint64_t>(total));
  };
  const auto report = calibrate(source, options.destination, *tokens, calibrate_options);
  progress.finish();
  if (!report && DeferInterrupts::pending())
    return Status(report.status().code(),
                  report.status().message() + ": --resume continues after the last layer");
  if (!report) return report.status();
  if (json != nullptr)
    *json = {{"method", name(*options.method)},
             {"tokens", tokens->size()},
             {"rare_experts", report->rare_experts},
             {"fewest_samples", report->fewest_samples},
             {"resumed_layers", report->resumed_layers}};
  else if (report->rare_experts > 0 && !options.all_experts)
    fmt::print(stderr, "{} experts saw less than {} tokens (the least: {})\n", report->rare_experts,
               calibrate_options.min_samples, report->fewest_samples);
  ConvertReport written = report->written;
  written.seconds = report->seconds;
  return written;
}

Result<ConvertReport> rounded(const Options& options, const Checkpoint& source) {
  ConvertOptions convert_options = options.convert;
  convert_options.scheme = *options.scheme;
  convert_options.cancelled = DeferInterrupts::pending;
  std::uint64_t bytes = 0;
  for (const TensorEntry& tensor : source.tensors()) bytes += tensor.bytes();
  const bool small = bytes < 1'000'000'000;
  Progress progress(fmt::format("quantize to {}", scheme(*options.scheme).name), small ? "MB" : "GB",
                    small ? 1e6 : 1e9);
  auto report = convert(source, options.destination, convert_options,
                        [&](const ConvertProgress& p) { progress.set(p.done_bytes, p.total_bytes); });
  progress.finish();
  return report;
}

Status quantize(const Options& options, Json* json) {
  const Result<Checkpoint> source = Checkpoint::open(options.source);
  if (!source) return source.status();
  if (options.method && options.calibration.empty())
    return {Code::invalid_argument,
            fmt::format("--method {} needs --calibration FILE", name(*options.method))};
  const DeferInterrupts defer;
  Json details = Json::object();
  const Result<ConvertReport> report =
      options.method ? calibrated(options, *source, json == nullptr ? nullptr : &details)
                     : rounded(options, *source);
  if (!report) return report.status();

  const double rate = static_cast<double>(report->source_bytes) / 1e9 / std::max(report->seconds, 1e-9);
  if (json != nullptr) {
    *json = {{"destination", options.destination},
             {"scheme", scheme(*options.scheme).name},
             {"source_bytes", report->source_bytes},
             {"written_bytes", report->written_bytes},
             {"shards", report->shards},
             {"seconds", report->seconds},
             {"gb_per_s", rate}};
    json->update(details);
  } else {
    fmt::print("{}: {} to {} in {} file{}, {:.1f} s, {:.2f} GB/s\n", options.destination,
               human_bytes(report->source_bytes), human_bytes(report->written_bytes), report->shards,
               report->shards == 1 ? "" : "s", report->seconds, rate);
  }
  return {};
}

}  // namespace

void add_quantize(Cli& cli) {
  auto options = std::make_shared<Options>();
  CLI::App* command = cli.add("quantize", "Quantize the experts of a checkpoint into a new directory",
                              [options](Json* json) { return quantize(*options, json); });
  command->add_option("SRC", options->source, "Hugging Face checkpoint directory")
      ->required()
      ->type_name("DIR");
  command->add_option("DST", options->destination, "New directory")->required()->type_name("DIR");
  add_scheme(command, options->scheme, "Scheme (gatefold schemes lists them)")->required();
  add_quantize_options(command, options->convert.quantize);
  command
      ->add_option_function<std::string>(
          "--method", [options](const std::string& text) { options->method = find_method(text); },
          "rtn rounds to nearest; the others need --calibration")
      ->check(CLI::IsMember({"rtn", "gptq", "awq", "smoothquant"}))
      ->default_str("rtn");
  command
      ->add_option("--calibration", options->calibration,
                   "Text (byte-level models) or token ids (.npy, .safetensors)")
      ->type_name("FILE");
  command->add_option("--calibration-tokens", options->limit, "Only the first tokens; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--min-samples", options->calibrate.min_samples, "Tokens that every expert sees")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--all-experts", options->all_experts, "Every expert sees every token");
  command
      ->add_option("--damping", options->calibrate.damping, "Of the Hessian, in parts of its mean diagonal")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--window", options->calibrate.window, "Tokens that attend to each other")
      ->check(CLI::Range(2, 65536))
      ->capture_default_str();
  add_backend(command, options->calibrate.device);
  command
      ->add_option_function<std::string>(
          "--activation-scale",
          [options](const std::string& text) {
            options->calibrate.activation_scale =
                text == "percentile" ? ActivationScale::percentile : ActivationScale::mse;
          },
          "How static scales of activations are found")
      ->check(CLI::IsMember({"mse", "percentile"}))
      ->default_str("mse");
  command->add_flag("--resume", options->calibrate.resume, "Go on with an interrupted calibration");
  command->add_option("--shard-size", options->convert.shard_bytes, "Largest file, e.g. 5GB or 900MiB")
      ->transform(CLI::AsSizeValue(true))
      ->default_str("5GB");
}

}  // namespace gatefold::cli
