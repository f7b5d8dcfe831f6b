#include <fmt/format.h>

#include "gatefold/checkpoint.h"
#include "tools/cli.h"
#include "tools/interrupt.h"
#include "tools/progress.h"

namespace gatefold::cli {
namespace {

struct Options {
  std::string source, destination;
  std::optional<SchemeId> scheme;
  ConvertOptions convert;
};

Status quantize(const Options& options, Json* json) {
  const Result<Checkpoint> source = Checkpoint::open(options.source);
  if (!source) return source.status();
  ConvertOptions convert_options = options.convert;
  convert_options.scheme = *options.scheme;
  convert_options.cancelled = DeferInterrupts::pending;

  const DeferInterrupts defer;
  std::uint64_t bytes = 0;
  for (const TensorEntry& tensor : source->tensors()) bytes += tensor.bytes();
  const bool small = bytes < 1'000'000'000;
  Progress progress(fmt::format("quantize to {}", scheme(*options.scheme).name), small ? "MB" : "GB",
                    small ? 1e6 : 1e9);
  const Result<ConvertReport> report =
      convert(*source, options.destination, convert_options,
              [&](const ConvertProgress& p) { progress.set(p.done_bytes, p.total_bytes); });
  progress.finish();
  if (!report) return report.status();

  const double rate = static_cast<double>(report->source_bytes) / 1e9 / std::max(report->seconds, 1e-9);
  if (json != nullptr)
    *json = {{"destination", options.destination},
             {"scheme", scheme(*options.scheme).name},
             {"source_bytes", report->source_bytes},
             {"written_bytes", report->written_bytes},
             {"shards", report->shards},
             {"seconds", report->seconds},
             {"gb_per_s", rate}};
  else
    fmt::print("{}: {} to {} in {} file{}, {:.1f} s, {:.2f} GB/s\n", options.destination,
               human_bytes(report->source_bytes), human_bytes(report->written_bytes), report->shards,
               report->shards == 1 ? "" : "s", report->seconds, rate);
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
  command->add_option("--shard-size", options->convert.shard_bytes, "Largest file, e.g. 5GB or 900MiB")
      ->transform(CLI::AsSizeValue(true))
      ->default_str("5GB");
}

}  // namespace gatefold::cli
