#include "gatefold/recommend.h"

#include <fmt/format.h>

#include "tools/calibration_options.h"
#include "tools/interrupt.h"
#include "tools/progress.h"

namespace gatefold::cli {
namespace {

struct Options {
  std::string directory, output;
  RecommendOptions recommend;
  CalibrationOptions calibration;
};

Json to_json(const Recommendation& found) {
  Json json = {{"bits_per_weight", found.bits_per_weight}, {"kl", found.kl}, {"rows", Json::array()}};
  if (found.whole_kl) json["whole_kl"] = *found.whole_kl;
  for (const Sensitivity& row : found.measured)
    json["rows"].push_back({{"layer", row.layer},
                            {"scheme", scheme(row.scheme).name},
                            {"bytes", row.bytes},
                            {"bits_per_weight", row.bits_per_weight},
                            {"kl", row.kl},
                            {"chosen", row.chosen}});
  return json;
}

/// The chosen ones are marked.
void print(const Recommendation& found) {
  const Table table({{"layer", 5}, {"scheme", -16}, {"bits/weight", 11}, {"KL", 9}, {"", -6}});
  for (const Sensitivity& row : found.measured)
    table.row({fmt::to_string(row.layer), std::string(scheme(row.scheme).name),
               fmt::format("{:.3f}", row.bits_per_weight), fmt::format("{:.6f}", row.kl),
               row.chosen ? "chosen" : ""});
}

Status run(const Options& options, Json* json) {
  if (Status status = check_calibration_options(options.calibration, true); !status.ok()) return status;
  const auto checkpoint = Checkpoint::open(options.directory);
  if (!checkpoint) return checkpoint.status();
  const auto tokens = read_calibration(options.calibration, *checkpoint);
  if (!tokens) return tokens.status();
  const DeferInterrupts defer;
  RecommendOptions recommend_options = options.recommend;
  recommend_options.method = options.calibration.method;
  recommend_options.calibrate = calibrate_options_of(options.calibration, tokens->size());
  Progress progress("recommend", "measurements");
  recommend_options.progress = [&](std::int64_t done, std::int64_t total) {
    progress.set(static_cast<std::uint64_t>(done), static_cast<std::uint64_t>(total));
  };
  const auto found = recommend(*checkpoint, *tokens, recommend_options);
  progress.finish();
  if (!found) return found.status();
  if (Status status = write_recipe(found->recipe, options.output); !status.ok()) return status;
  if (json != nullptr) {
    *json = to_json(*found);
    (*json)["recipe"] = options.output;
    return {};
  }
  print(*found);
  fmt::print("\n{}: {:.4f} bits per expert weight, predicted KL {:.5f}{}\n", options.output,
             found->bits_per_weight, found->kl,
             found->whole_kl ? fmt::format(", measured {:.5f}", *found->whole_kl) : "");
  return {};
}

}  // namespace

void add_recommend(Cli& cli) {
  auto options = std::make_shared<Options>();
  CLI::App* command = cli.add("recommend", "Choose a scheme for each layer's experts within a budget of bits",
                              [options](Json* json) { return run(*options, json); });
  add_directory(command, options->directory);
  command->add_option("--budget", options->recommend.budget, "Bits per expert weight, on average")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--schemes",
                   "Comma-separated, to choose from; default: all that leave activations as they are")
      ->check([options](const std::string& list) { return parse_schemes(list, options->recommend.schemes); })
      ->type_name("SCHEME,...");
  command
      ->add_option("--whole", options->recommend.whole,
                   "At most so many of the best recipes are measured as a whole; 0: none")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  add_calibration_options(command, options->calibration);
  command->get_option("--calibration")->required();
  add_quantize_options(command, options->recommend.quantize);
  command->add_option("-o,--output", options->output, "The recipe; replaced if it is there")
      ->required()
      ->type_name("FILE");
}

}  // namespace gatefold::cli
