#include <fmt/format.h>

#include "gatefold/checkpoint.h"
#include "tools/cli.h"
#include "tools/interrupt.h"
#include "tools/progress.h"

namespace gatefold::cli {
namespace {

struct Options {
  std::string source, destination;
  RewriteOptions rewrite;
};

Status convert(const Options& options, Json* json) {
  const Result<Checkpoint> source = Checkpoint::open(options.source);
  if (!source) return source.status();
  RewriteOptions rewrite_options = options.rewrite;
  rewrite_options.cancelled = DeferInterrupts::pending;

  const DeferInterrupts defer;
  Progress progress(fmt::format("convert to {}", options.rewrite.to), "MB", 1e6);
  const Result<ConvertReport> report =
      rewrite(*source, options.destination, rewrite_options,
              [&](const ConvertProgress& p) { progress.set(p.done_bytes / 2, p.total_bytes / 2); });
  progress.finish();
  if (!report) return report.status();
  if (json != nullptr)
    *json = {{"destination", options.destination},
             {"convention", options.rewrite.to},
             {"source_bytes", report->source_bytes},
             {"written_bytes", report->written_bytes},
             {"shards", report->shards},
             {"seconds", report->seconds}};
  else
    fmt::print("{}: {}, {} to {} in {} file{}, {:.1f} s\n", options.destination, options.rewrite.to,
               human_bytes(report->source_bytes), human_bytes(report->written_bytes), report->shards,
               report->shards == 1 ? "" : "s", report->seconds);
  return {};
}

}  // namespace

void add_convert(Cli& cli) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      cli.add("convert", "Copy a quantized checkpoint into another convention, without loss or not at all",
              [options](Json* json) { return convert(*options, json); });
  command->add_option("SRC", options->source, "Quantized checkpoint directory")->required()->type_name("DIR");
  command->add_option("DST", options->destination, "New directory")->required()->type_name("DIR");
  command->add_option("--to", options->rewrite.to, "Convention to write")
      ->required()
      ->check(CLI::IsMember({"compressed-tensors", "gptq", "awq", "modelopt"}));
  command->add_option("--shard-size", options->rewrite.shard_bytes, "Largest file, e.g. 5GB or 900MiB")
      ->transform(CLI::AsSizeValue(true))
      ->default_str("5GB");
}

}  // namespace gatefold::cli
