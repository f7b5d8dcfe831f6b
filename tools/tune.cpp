#include "gatefold/tune.h"

#include <fmt/format.h>

#include "tools/cli.h"
#include "tools/measured.h"

namespace gatefold::cli {
namespace {

Json to_json(const TuneRow& row) {
  return {{"scheme", row.scheme},
          {"tokens", row.tokens},
          {"prefetch", row.best.prefetch},
          {"split", row.best.split},
          {"serial_tokens", row.best.serial_tokens},
          {"us_default", row.us_default},
          {"us_best", row.us_best}};
}

Status run(const TuneOptions& options, Json* json) {
  std::optional<Table> table;
  if (json == nullptr)
    table.emplace(std::vector<Table::Column>{{"scheme", -16},
                                             {"tokens", 6},
                                             {"prefetch", 8},
                                             {"split", 5},
                                             {"serial", 6},
                                             {"us before", 10},
                                             {"us now", 10}});
  const auto rows = tune(options, [&](const TuneRow& row) {
    if (!table) return;
    table->row({std::string(row.scheme), fmt::to_string(row.tokens),
                row.best.prefetch < 0 ? "by CPU" : fmt::to_string(row.best.prefetch),
                fmt::to_string(row.best.split), fmt::to_string(row.best.serial_tokens),
                fmt::format("{:.0f}", row.us_default), fmt::format("{:.0f}", row.us_best)});
  });
  if (!rows) return rows.status();
  if (json != nullptr) {
    *json = {{"model", options.shape.name}, {"rows", Json::array()}};
    for (const TuneRow& row : *rows) (*json)["rows"].push_back(to_json(row));
  }
  return {};
}

}  // namespace

void add_tune(Cli& cli) {
  auto options = std::make_shared<TuneOptions>();
  CLI::App* command = cli.add("tune", "Measure what plans may choose on this CPU, and keep the best for them",
                              [options, &cli](Json* json) {
                                options->threads = cli.threads();
                                return run(*options, json);
                              });
  add_measured(command, options);
  command->add_option("-o,--output", options->file, "Where to keep it, if not where plans look")
      ->type_name("FILE");
}

}  // namespace gatefold::cli
