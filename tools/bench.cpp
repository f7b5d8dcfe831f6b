#include "gatefold/bench.h"

#include <fmt/format.h>

#include "tools/cli.h"
#include "tools/measured.h"

namespace gatefold::cli {
namespace {

const std::map<std::string, BenchFrom> froms = {{"ids", BenchFrom::ids},
                                                {"logits", BenchFrom::logits},
                                                {"hidden", BenchFrom::hidden},
                                                {"codes", BenchFrom::codes}};

Json to_json(const BenchRow& row) {
  return {{"scheme", row.scheme},
          {"kernel", row.kernel},
          {"tokens", row.tokens},
          {"from", name_of(froms, row.from)},
          {"runs", row.runs},
          {"us_median", row.us_median},
          {"us_min", row.us_min},
          {"us_max", row.us_max},
          {"us_launched", row.us_launched},
          {"us_read", row.us_read},
          {"us_multiply", row.us_multiply},
          {"us_floor", row.us_floor},
          {"weight_bytes", row.weight_bytes},
          {"gb_per_s", row.gb_per_s},
          {"read_gb_per_s", row.read_gb_per_s},
          {"read_ratio", row.read_ratio},
          {"gflop_per_s", row.gflop_per_s},
          {"multiply_gflop_per_s", row.multiply_gflop_per_s},
          {"multiply_ratio", row.multiply_ratio},
          {"sm_mhz", row.sm_mhz},
          {"memory_mhz", row.memory_mhz},
          {"unmeasured", row.unmeasured}};
}

struct Column {
  Table::Column head;
  std::string (*cell)(const BenchRow& row);
};

template <auto Field, int kDigits>
std::string number(const BenchRow& row) {
  return fmt::format("{:.{}f}", row.*Field, kDigits);
}

std::vector<Column> columns(bool gpu) {
  const Column scheme = {{"scheme", -16}, [](const BenchRow& row) { return std::string(row.scheme); }};
  const Column tokens = {{"tokens", 6}, [](const BenchRow& row) { return fmt::to_string(row.tokens); }};
  const Column from = {{"from", -6}, [](const BenchRow& row) { return name_of(froms, row.from); }};
  const Column weights = {{"weights", 9}, [](const BenchRow& row) { return human_bytes(row.weight_bytes); }};
  if (!gpu)
    return {scheme,
            tokens,
            from,
            {{"us", 9}, number<&BenchRow::us_median, 0>},
            {{"min", 9}, number<&BenchRow::us_min, 0>},
            {{"max", 9}, number<&BenchRow::us_max, 0>},
            weights,
            {{"GB/s", 7}, number<&BenchRow::gb_per_s, 2>},
            {{"of read", 7}, number<&BenchRow::read_ratio, 3>},
            {{"GFLOP/s", 8}, number<&BenchRow::gflop_per_s, 1>},
            {{"of mul", 6}, number<&BenchRow::multiply_ratio, 3>}};
  return {scheme,
          tokens,
          from,
          {{"us", 9}, number<&BenchRow::us_median, 1>},
          {{"min", 9}, number<&BenchRow::us_min, 1>},
          {{"max", 9}, number<&BenchRow::us_max, 1>},
          {{"launched", 9}, number<&BenchRow::us_launched, 1>},
          weights,
          {{"read", 9}, number<&BenchRow::us_read, 1>},
          {{"multiply", 9}, number<&BenchRow::us_multiply, 1>},
          {{"us/floor", 9},
           [](const BenchRow& row) { return fmt::format("{:.2f}", row.us_median / row.us_floor); }}};
}

void print_ceilings(const BenchRow& row, bool gpu) {
  if (gpu)
    fmt::print(
        "\"us\": in a CUDA graph, from a rest of the GPU; \"launched\": without. \"read\": plain reading of "
        "the same weights ({:.0f} GB/s); \"multiply\": at the rate of cuBLAS ({:.0f} TFLOP/s on a large "
        "dense "
        "multiply); floor: the larger of both. Clocks: SM {} MHz, memory {} MHz\n{}",
        row.read_gb_per_s, row.multiply_gflop_per_s / 1e3, row.sm_mhz, row.memory_mhz,
        row.unmeasured.empty() ? "" : "Not measured (0 above): " + row.unmeasured + "\n");
  else
    fmt::print(
        "\"of read\", \"of mul\": of what this machine reads ({:.1f} GB/s) and multiplies ({:.0f} GFLOP/s) "
        "at best, in the same run\n",
        row.read_gb_per_s, row.multiply_gflop_per_s);
}

Status run(const BenchOptions& options, Json* json) {
  const bool gpu = options.device.kind == Device::Kind::cuda;
  const std::vector<Column> shown = columns(gpu);
  std::optional<Table> table;
  if (json == nullptr) {
    const BenchShape& shape = options.shape;
    fmt::print("{}: hidden {}, width {}, {}{} experts, {} per token, {} routing\n", shape.name, shape.hidden,
               shape.intermediate, shape.ep_size > 1 ? fmt::format("1/{} of ", shape.ep_size) : "",
               shape.experts * shape.ep_size, shape.top_k, name_of(routings, options.routing));
    std::vector<Table::Column> heads;
    heads.reserve(shown.size());
    for (const Column& column : shown) heads.push_back(column.head);
    table.emplace(heads);
  }
  const auto rows = bench(options, [&](const BenchRow& row) {
    std::vector<std::string> cells;
    cells.reserve(shown.size());
    for (const Column& column : shown) cells.push_back(column.cell(row));
    if (table) table->row(cells);
  });
  if (!rows) return rows.status();
  if (json != nullptr) {
    *json = {{"model", options.shape.name},
             {"ep_size", options.shape.ep_size},
             {"routing", name_of(routings, options.routing)},
             {"rows", Json::array()}};
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
  add_batch_invariant(command, options->batch_invariant);
  add_fast_accumulation(command, options->fast_accumulation);
  command->add_flag("--static-scales", options->layers.static_scales,
                    "Experts have static scales of activations, where schemes may (fp8 per tensor, nvfp4)");
  command->add_flag("--shared-expert", options->layers.shared_expert,
                    "Layers have a shared expert, too, of the others' scheme and width");
  command->add_flag("--act-order", options->layers.ordered_inputs,
                    "Each expert takes its inputs in an order of its own (GPTQ with desc_act)");
  command
      ->add_option_function<std::string>(
          "--dtype",
          [options](const std::string& name) {
            options->layers.dtype = name == "f16" ? DType::f16 : DType::bf16;
          },
          "The model's 16-bit type: of activations, and of scales of groups (AWQ and GPTQ: f16)")
      ->check(CLI::IsMember({"bf16", "f16"}))
      ->default_str("bf16");
  command
      ->add_option_function<std::vector<std::string>>(
          "--from",
          [options](const std::vector<std::string>& names) {
            options->from.clear();
            for (const std::string& name : names) options->from.push_back(froms.at(name));
          },
          "What a call is given: experts' ids, logits to route by, hidden states alone (the layer's own "
          "router), or ids and quantized hidden states (cuda); comma-separated")
      ->delimiter(',')
      ->check(CLI::IsMember(froms))
      ->type_name("")
      ->default_str("ids");
}

}  // namespace gatefold::cli
