#include <fmt/format.h>

#include "tools/model_commands.h"
#include "tools/progress.h"

namespace gatefold::cli {
namespace {

struct Options : ModelOptions {
  int window = 512;
};

Status eval(const Options& options, Json* json) {
  const auto decoder = load_model(options);
  if (!decoder) return decoder.status();
  const auto tokens = read_input(options, *decoder);
  if (!tokens) return tokens.status();

  Progress progress("eval", "k tokens", 1e3);
  const auto result = evaluate(
      *decoder, *tokens, {.window = options.window, .progress = [&](std::int64_t done, std::int64_t total) {
                            progress.set(static_cast<std::uint64_t>(done), static_cast<std::uint64_t>(total));
                          }});
  progress.finish();
  if (!result) return result.status();

  if (json != nullptr) {
    *json = {{"scheme", decoder->schemes()},
             {"kernel", decoder->kernel_name()},
             {"bits_per_byte", result->bits_per_byte ? Json(*result->bits_per_byte) : Json(nullptr)},
             {"nats_per_token", result->nats_per_token},
             {"perplexity", result->perplexity},
             {"tokens", result->tokens},
             {"seconds", result->seconds}};
    return {};
  }
  fmt::print("scheme           {}\n", decoder->schemes());
  if (result->bits_per_byte) fmt::print("bits per byte    {:.5f}\n", *result->bits_per_byte);
  fmt::print("nats per token   {:.5f}\nperplexity       {:.4f}\ntokens           {} in {:.1f} s\n",
             result->nats_per_token, result->perplexity, result->tokens, result->seconds);
  return {};
}

}  // namespace

void add_eval(Cli& cli) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      cli.add("eval", "Measure the loss on a text", [options](Json* json) { return eval(*options, json); });
  add_model_options(command, *options);
  add_token_options(command, *options);
  add_scheme_or_recipe(command, *options);
  add_window(command, options->window);
}

}  // namespace gatefold::cli
