#include "gatefold/tune.h"

#include <fmt/format.h>

#include "tools/cli.h"
#include "tools/measured.h"

namespace gatefold::cli {
namespace {

Json to_json(const TuneRow& row) {
  Json json = {{"scheme", row.scheme},
               {"tokens", row.tokens},
               {"us_default", row.us_default},
               {"us_best", row.us_best}};
  if (row.candidates.empty()) {
    json["prefetch"] = row.best.prefetch;
    json["split"] = row.best.split;
    json["serial_tokens"] = row.best.serial_tokens;
    return json;
  }
  json["default"] = describe(row.cuda_default);
  json["best"] = describe(row.cuda_best);
  json["sm_mhz"] = row.sm_mhz;
  for (const CudaMeasured& candidate : row.candidates)
    json["candidates"].push_back({{"tuning", describe(candidate.tuning)},
                                  {"clocks_predicted", candidate.clocks},
                                  {"us", candidate.us}});
  return json;
}

/// Where the model was wrong, the best is another than what it says.
std::vector<std::string> cells(const TuneRow& row, bool gpu) {
  const auto us = [](double time) { return fmt::format("{:.0f}", time); };
  std::vector<std::string> all = {std::string(row.scheme), fmt::to_string(row.tokens)};
  if (gpu) {
    all.insert(all.end(), {describe(row.cuda_default), us(row.us_default), describe(row.cuda_best),
                           us(row.us_best), fmt::format("{:.2f}", row.us_default / row.us_best)});
  } else {
    all.insert(all.end(), {row.best.prefetch < 0 ? "by CPU" : fmt::to_string(row.best.prefetch),
                           fmt::to_string(row.best.split), fmt::to_string(row.best.serial_tokens),
                           us(row.us_default), us(row.us_best)});
  }
  return all;
}

std::vector<Table::Column> columns(bool gpu) {
  if (gpu)
    return {{"scheme", -16}, {"tokens", 6}, {"model", -22}, {"us", 8}, {"best", -22}, {"us", 8}, {"gain", 5}};
  return {{"scheme", -16}, {"tokens", 6},     {"prefetch", 8}, {"split", 5},
          {"serial", 6},   {"us before", 10}, {"us now", 10}};
}

Status run(const TuneOptions& options, Json* json) {
  const bool gpu = options.device.kind == Device::Kind::cuda;
  std::optional<Table> table;
  if (json == nullptr) table.emplace(columns(gpu));
  const auto rows = tune(options, [&](const TuneRow& row) {
    if (table) table->row(cells(row, gpu));
  });
  if (!rows) return rows.status();
  if (json != nullptr) {
    *json = {{"model", options.shape.name},
             {"ep_size", options.shape.ep_size},
             {"routing", name_of(routings, options.routing)},
             {"rows", Json::array()}};
    for (const TuneRow& row : *rows) (*json)["rows"].push_back(to_json(row));
  }
  return {};
}

}  // namespace

void add_tune(Cli& cli) {
  auto options = std::make_shared<TuneOptions>();
  CLI::App* command =
      cli.add("tune", "Measure what plans may choose on this machine, and keep the best for them",
              [options, &cli](Json* json) {
                options->threads = cli.threads();
                return run(*options, json);
              });
  add_measured(command, options);
  add_backend(command, options->device);
  add_fast_accumulation(command, options->fast_accumulation);
  command->add_option("-o,--output", options->file, "Where to keep it, if not where plans look")
      ->type_name("FILE");
}

}  // namespace gatefold::cli
