#include <fmt/format.h>

#include "tools/model_commands.h"

namespace gatefold::cli {
namespace {

struct Options : ModelOptions {
  std::optional<std::string> prompt;
  GenerateOptions generate;
};

std::string to_text(std::span<const std::int32_t> tokens) {
  std::string text;
  for (const std::int32_t token : tokens) text += static_cast<char>(token);
  return text;
}

Status run(const Options& options, Json* json) {
  const auto decoder = load_model(options);
  if (!decoder) return decoder.status();
  const auto prompt = options.prompt ? text_tokens(*decoder, *options.prompt) : read_input(options, *decoder);
  if (!prompt) return prompt.status();

  GenerateOptions generate_options = options.generate;
  if (json == nullptr) {
    if (options.prompt) fmt::print("{}", *options.prompt);
    generate_options.on_token = [&](std::int32_t token) {
      if (decoder->byte_level())
        std::fputc(token, stdout);
      else
        fmt::print("{}\n", token);
      return std::fflush(stdout) == 0;
    };
  }
  const auto result = generate(*decoder, *prompt, generate_options);
  if (!result) return result.status();

  const double count = static_cast<double>(result->tokens.size());
  const double rate = result->seconds > 0 ? (count - 1) / result->seconds : 0;
  if (json != nullptr) {
    *json = {{"scheme", decoder->schemes()}, {"prompt_tokens", prompt->size()}};
    if (decoder->byte_level()) (*json)["text"] = to_text(result->tokens);
    json->update({{"tokens", result->tokens},
                  {"prompt_seconds", result->prompt_seconds},
                  {"seconds", result->seconds},
                  {"tokens_per_second", rate}});
    return {};
  }
  fmt::print("\n");
  std::fflush(stdout);
  fmt::print(stderr, "[{}, {:.0f} tokens per second]\n", decoder->schemes(), rate);
  return {};
}

}  // namespace

void add_generate(Cli& cli) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      cli.add("generate", "Continue a prompt", [options](Json* json) { return run(*options, json); });
  add_model_options(command, *options);
  auto* prompt = command->add_option_group("prompt", "One of")->require_option(1);
  prompt->add_option("--prompt", options->prompt, "Text (byte-level models)");
  prompt->add_option("--tokens", options->tokens, "Token ids: .npy or .safetensors")->type_name("FILE");
  add_scheme_or_recipe(command, *options);
  command->add_option("-n,--count", options->generate.tokens, "Tokens to generate")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--temperature", options->generate.temperature, "0: the most likely token")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--seed", options->generate.seed, "Of the random choice")->capture_default_str();
}

}  // namespace gatefold::cli
