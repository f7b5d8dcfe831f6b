#include <fmt/format.h>

#include "gatefold/checkpoint.h"
#include "tools/calibration_options.h"
#include "tools/interrupt.h"
#include "tools/progress.h"

namespace gatefold::cli {
namespace {

struct Options {
  std::string source, destination;
  std::optional<SchemeId> scheme;
  std::string recipe;  ///< file; one of the two is there
  ConvertOptions convert;
  CalibrationOptions calibration;

  std::string_view target() const { return scheme ? gatefold::scheme(*scheme).name : recipe; }
};

Result<ConvertReport> calibrated(const Options& options, const Checkpoint& source,
                                 const std::optional<Recipe>& recipe, Json* json) {
  const auto tokens = read_calibration(options.calibration, source);
  if (!tokens) return tokens.status();
  const Method method = *options.calibration.method;
  CalibrateOptions calibrate_options = calibrate_options_of(options.calibration, tokens->size());
  if (options.scheme) calibrate_options.scheme = *options.scheme;
  calibrate_options.recipe = recipe;
  calibrate_options.method = method;
  calibrate_options.shard_bytes = options.convert.shard_bytes;
  Progress progress(fmt::format("{} to {}", name(method), options.target()), "experts");
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
    *json = {{"method", name(method)},
             {"tokens", tokens->size()},
             {"rare_experts", report->rare_experts},
             {"fewest_samples", report->fewest_samples},
             {"resumed_layers", report->resumed_layers}};
  else if (report->rare_experts > 0 && !options.calibration.all_experts)
    fmt::print(stderr, "{} experts saw less than {} tokens (the least: {})\n", report->rare_experts,
               calibrate_options.min_samples, report->fewest_samples);
  ConvertReport written = report->written;
  written.seconds = report->seconds;
  return written;
}

Result<ConvertReport> rounded(const Options& options, const Checkpoint& source,
                              const std::optional<Recipe>& recipe) {
  ConvertOptions convert_options = options.convert;
  if (options.scheme) convert_options.scheme = *options.scheme;
  convert_options.recipe = recipe;
  if (recipe && recipe->fp8_kv_cache && !options.calibration.file.empty()) {
    const auto tokens = read_calibration(options.calibration, source);
    if (!tokens) return tokens.status();
    auto scales = search_kv_scales(source, *tokens, options.calibration.calibrate.window);
    if (!scales) return scales.status();
    convert_options.kv_scales = std::move(*scales);
  }
  convert_options.cancelled = DeferInterrupts::pending;
  std::uint64_t bytes = 0;
  for (const TensorEntry& tensor : source.tensors()) bytes += tensor.bytes();
  const bool small = bytes < 1'000'000'000;
  Progress progress(fmt::format("quantize to {}", options.target()), small ? "MB" : "GB", small ? 1e6 : 1e9);
  auto report = convert(source, options.destination, convert_options,
                        [&](const ConvertProgress& p) { progress.set(p.done_bytes, p.total_bytes); });
  progress.finish();
  return report;
}

Status quantize(const Options& options, Json* json) {
  const Result<Checkpoint> source = Checkpoint::open(options.source);
  if (!source) return source.status();
  const auto recipe = read_optional_recipe(options.recipe);
  if (!recipe) return recipe.status();
  const bool has_kv_cache = *recipe && (*recipe)->fp8_kv_cache;
  if (Status status = check_calibration_options(options.calibration, has_kv_cache); !status.ok())
    return status;
  const DeferInterrupts defer;
  Json details = Json::object();
  const Result<ConvertReport> report =
      options.calibration.method ? calibrated(options, *source, *recipe, json == nullptr ? nullptr : &details)
                                 : rounded(options, *source, *recipe);
  if (!report) return report.status();

  const double rate = static_cast<double>(report->source_bytes) / 1e9 / std::max(report->seconds, 1e-9);
  if (json != nullptr) {
    *json = {{"destination", options.destination},
             {options.scheme ? "scheme" : "recipe", options.target()},
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
  CLI::App* command = cli.add("quantize", "Quantize a checkpoint into a new directory",
                              [options](Json* json) { return quantize(*options, json); });
  command->add_option("SRC", options->source, "Hugging Face checkpoint directory")
      ->required()
      ->type_name("DIR");
  command->add_option("DST", options->destination, "New directory")->required()->type_name("DIR");
  auto* target = command->add_option_group("target", "One of")->require_option(1);
  add_scheme(target, options->scheme, "Scheme of the experts (gatefold schemes lists them)");
  add_recipe(target, options->recipe);
  add_quantize_options(command, options->convert.quantize);
  add_calibration_options(command, options->calibration);
  CalibrateOptions& calibrate = options->calibration.calibrate;
  add_backend(command, calibrate.device);
  command
      ->add_option_function<std::string>(
          "--activation-scale",
          [&calibrate](const std::string& text) {
            calibrate.activation_scale =
                text == "percentile" ? ActivationScale::percentile : ActivationScale::mse;
          },
          "How static scales of activations are found")
      ->check(CLI::IsMember({"mse", "percentile"}))
      ->default_str("mse");
  command->add_flag("--resume", calibrate.resume, "Go on with an interrupted calibration");
  command->add_option("--shard-size", options->convert.shard_bytes, "Largest file, e.g. 5GB or 900MiB")
      ->transform(CLI::AsSizeValue(true))
      ->default_str("5GB");
}

}  // namespace gatefold::cli
