#include "tools/model_commands.h"

#include "checkpoint/mapped_file.h"

namespace gatefold::cli {

void add_model_options(CLI::App* command, ModelOptions& options) {
  add_directory(command, options.directory);
  add_backend(command, options.decoder.device);
  add_run_options(command, options.decoder.precision, options.decoder.weights_only);
  add_batch_invariant(command, options.decoder.batch_invariant);
  add_fast_accumulation(command, options.decoder.fast_accumulation);
  add_quantize_options(command, options.decoder.quantize);
}

void add_scheme_or_recipe(CLI::App* command, ModelOptions& options) {
  auto* recipe = add_recipe(command, options.recipe);
  add_scheme(command, options.decoder.scheme, "Scheme to quantize to on load; default: as stored")
      ->excludes(recipe);
}

Result<Decoder> load_model(const ModelOptions& options) {
  const auto checkpoint = Checkpoint::open(options.directory);
  if (!checkpoint) return checkpoint.status();
  auto recipe = read_optional_recipe(options.recipe);
  if (!recipe) return recipe.status();
  DecoderOptions decoder_options = options.decoder;
  decoder_options.recipe = std::move(*recipe);
  return Decoder::load(*checkpoint, decoder_options);
}

void add_token_options(CLI::App* command, ModelOptions& options) {
  auto* input = command->add_option_group("input", "One of")->require_option(1);
  input->add_option("--text", options.text, "Text file (byte-level models)")->type_name("FILE");
  input->add_option("--tokens", options.tokens, "Token ids: .npy or .safetensors")->type_name("FILE");
}

void add_window(CLI::App* command, int& window) {
  command->add_option("--window", window, "Tokens per window")
      ->check(CLI::Range(2, 1 << 24))
      ->capture_default_str();
}

Result<std::vector<std::int32_t>> read_input(const ModelOptions& options, const Decoder& decoder) {
  if (!options.tokens.empty()) return read_tokens(options.tokens, decoder.config().vocab);
  const Result<std::string> text = read_text(options.text, 1ull << 32);
  if (!text) return text.status();
  return text_tokens(decoder, *text);
}

}  // namespace gatefold::cli
