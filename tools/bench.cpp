#include "gatefold/bench.h"

#include <fmt/format.h>

#include "tools/cli.h"
#include "tools/measured.h"

namespace gatefold::cli {
namespace {

Json to_json(const BenchRow& row) {
  return {{"scheme", row.scheme},
          {"kernel", row.kernel},
          {"tokens", row.tokens},
          {"runs", row.runs},
          {"us_median", row.us_median},
          {"us_min", row.us_min},
          {"us_max", row.us_max},
          {"us_launched", row.us_launched},
          {"weight_bytes", row.weight_bytes},
          {"gb_per_s", row.gb_per_s},
          {"read_gb_per_s", row.read_gb_per_s},
          {"read_ratio", row.read_ratio},
          {"gflop_per_s", row.gflop_per_s},
          {"multiply_gflop_per_s", row.multiply_gflop_per_s},
          {"multiply_ratio", row.multiply_ratio}};
}

/// What a GPU has no figure of (a multiply rate), or a CPU (launches), is left out.
std::vector<Table::Column> columns(bool gpu) {
  std::vector<Table::Column> all = {{"scheme", -16}, {"tokens", 6}, {"us", 9},      {"min", 9},    {"max", 9},
                                    {"weights", 9},  {"GB/s", 7},   {"of read", 7}, {"GFLOP/s", 8}};
  all.push_back(gpu ? Table::Column{"launched", 8} : Table::Column{"of mul", 6});
  return all;
}

void print_row(const Table& table, const BenchRow& row, bool gpu) {
  const int digits = gpu ? 1 : 0;
  table.row({std::string(row.scheme), fmt::to_string(row.tokens),
             fmt::format("{:.{}f}", row.us_median, digits), fmt::format("{:.{}f}", row.us_min, digits),
             fmt::format("{:.{}f}", row.us_max, digits), human_bytes(row.weight_bytes),
             fmt::format("{:.2f}", row.gb_per_s), fmt::format("{:.3f}", row.read_ratio),
             fmt::format("{:.1f}", row.gflop_per_s),
             gpu ? fmt::format("{:.1f}", row.us_launched) : fmt::format("{:.3f}", row.multiply_ratio)});
}

void print_ceilings(const BenchRow& row, bool gpu) {
  if (gpu)
    fmt::print(
        "\"us\": in a CUDA graph; \"launched\": without. \"of read\": of plain reading of the same weights "
        "({:.1f} GB/s)\n",
        row.read_gb_per_s);
  else
    fmt::print(
        "\"of read\", \"of mul\": of what this machine reads ({:.1f} GB/s) and multiplies ({:.0f} GFLOP/s) "
        "at best, in the same run\n",
        row.read_gb_per_s, row.multiply_gflop_per_s);
}

Status run(const BenchOptions& options, Json* json) {
  const bool gpu = options.device.kind == Device::Kind::cuda;
  std::optional<Table> table;
  if (json == nullptr) {
    const BenchShape& shape = options.shape;
    fmt::print("{}: hidden {}, width {}, {} experts, {} per token\n", shape.name, shape.hidden,
               shape.intermediate, shape.experts, shape.top_k);
    table.emplace(columns(gpu));
  }
  const auto rows = bench(options, [&](const BenchRow& row) {
    if (table) print_row(*table, row, gpu);
  });
  if (!rows) return rows.status();
  if (json != nullptr) {
    *json = {{"model", options.shape.name}, {"rows", Json::array()}};
    for (const BenchRow& row : *rows) (*json)["rows"].push_back(to_json(row));
  } else if (!rows->empty()) {
    print_ceilings(rows->back(), gpu);
  }
  return {};
}

}  // namespace

void add_bench(Cli& cli) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      cli.add("bench", "Time whole MoE layers on random weights", [options, &cli](Json* json) {
        options->threads = cli.threads();
        return run(*options, json);
      });
  add_measured(command, options);
  add_backend(command, options->device);
}

}  // namespace gatefold::cli
