#include <fmt/format.h>

#include "tools/model_commands.h"
#include "tools/progress.h"

namespace gatefold::cli {
namespace {

struct Options : ModelOptions {
  CompareOptions compare;
  std::vector<std::string> recipes, others;
  std::int64_t limit = 0;
};

const std::vector<Table::Column> columns = {{"scheme", -16},  {"bits/weight", 11}, {"experts", 8},
                                            {"bits/byte", 9}, {"KL", 8},           {"top-1", 7},
                                            {"tokens/s", 8}};

void print_row(const Table& table, const CompareRow& row) {
  const std::string& name = row.name;
  if (!row.status.ok()) {
    table.row({name, "-", "-", "-", "-", "-", "-"});
    fmt::print(stderr, "{}: {}\n", name, row.status.message());
    return;
  }
  table.row({name, fmt::format("{:.3f}", row.bits_per_weight), human_bytes(row.expert_bytes),
             row.loss.bits_per_byte ? fmt::format("{:.4f}", *row.loss.bits_per_byte)
                                    : fmt::format("{:.4f}", row.loss.nats_per_token),
             fmt::format("{:.5f}", row.kl), fmt::format("{:.2f} %", 100 * row.top1_agreement),
             fmt::format("{:.0f}", row.tokens_per_second)});
}

Json to_json(const CompareRow& row) {
  Json json = {{"name", row.name}, {"scheme", row.schemes}};
  if (!row.status.ok()) {
    json["error"] = row.status.message();
    return json;
  }
  json.update({{"bits_per_weight", row.bits_per_weight},
               {"expert_bytes", row.expert_bytes},
               {"bits_per_byte", row.loss.bits_per_byte ? Json(*row.loss.bits_per_byte) : Json(nullptr)},
               {"nats_per_token", row.loss.nats_per_token},
               {"perplexity", row.loss.perplexity},
               {"kl", row.kl},
               {"top1_agreement", row.top1_agreement},
               {"tokens", row.loss.tokens},
               {"tokens_per_second", row.tokens_per_second}});
  return json;
}

Status run(const Options& options, Json* json) {
  const auto checkpoint = Checkpoint::open(options.directory);
  if (!checkpoint) return checkpoint.status();
  auto tokens = [&]() -> Result<std::vector<std::int32_t>> {
    const auto decoder = Decoder::load(*checkpoint, options.decoder);
    if (!decoder) return decoder.status();
    return read_input(options, *decoder);
  }();
  if (!tokens) return tokens.status();
  if (options.limit > 0 && tokens->size() > static_cast<std::size_t>(options.limit))
    tokens->resize(static_cast<std::size_t>(options.limit));

  CompareOptions compare_options = options.compare;
  for (const std::string& file : options.recipes) {
    auto recipe = read_recipe(file);
    if (!recipe) return recipe.status();
    compare_options.recipes.push_back(std::move(*recipe));
  }
  for (const std::string& directory : options.others) {
    auto other = Checkpoint::open(directory);
    if (!other) return other.status();
    compare_options.others.push_back(std::move(*other));
  }
  compare_options.decoder = options.decoder;
  std::optional<Table> table;
  if (json == nullptr) {
    auto titles = columns;
    if (checkpoint->config().vocab != 256) titles[3].title = "nats/tok";
    table.emplace(titles);
  }
  std::optional<Progress> progress;
  std::string running;
  compare_options.progress = [&](std::string_view name, std::int64_t done, std::int64_t total) {
    if (running != name) progress.emplace(fmt::format("{:16}", name), "k tokens", 1e3);
    running = name;
    progress->set(static_cast<std::uint64_t>(done), static_cast<std::uint64_t>(total));
  };
  compare_options.on_row = [&](const CompareRow& row) {
    progress.reset();
    running.clear();
    if (table) print_row(*table, row);
  };
  const auto rows = compare(*checkpoint, *tokens, compare_options);
  progress.reset();
  if (!rows) return rows.status();
  if (json != nullptr) {
    *json = {{"rows", Json::array()}};
    for (const CompareRow& row : *rows) (*json)["rows"].push_back(to_json(row));
  }
  return {};
}

}  // namespace

void add_compare(Cli& cli) {
  auto options = std::make_shared<Options>();
  CLI::App* command = cli.add("compare", "Schemes side by side: size, loss, speed",
                              [options](Json* json) { return run(*options, json); });
  add_model_options(command, *options);
  add_token_options(command, *options);
  command->add_option("--schemes", "Comma-separated; default: all")
      ->check([options](const std::string& list) { return parse_schemes(list, options->compare.schemes); })
      ->type_name("SCHEME,...");
  command->add_option("--recipes", options->recipes, "Recipes (docs/recipes.md), as more rows")
      ->delimiter(',')
      ->type_name("FILE,...");
  command->add_option("--with", options->others, "Quantized checkpoints of the same model, as more rows")
      ->delimiter(',')
      ->type_name("DIR,...");
  add_window(command, options->compare.window);
  command->add_option("--limit", options->limit, "Only the first tokens; 0: all")
      ->check(CLI::NonNegativeNumber);
}

}  // namespace gatefold::cli
