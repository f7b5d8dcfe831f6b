#pragma once
/// \file
/// What eval, generate and compare share: a model, and the tokens it reads.

#include <optional>
#include <string>
#include <vector>

#include "gatefold/decoder.h"
#include "tools/cli.h"

namespace gatefold::cli {

struct ModelOptions {
  std::string directory;
  std::string text, tokens, recipe;  ///< files
  DecoderOptions decoder;
};

/// DIR, --precision, --weights-only, the options of quantization on load.
void add_model_options(CLI::App* command, ModelOptions& options);
/// --scheme S | --recipe F
void add_scheme_or_recipe(CLI::App* command, ModelOptions& options);
/// Opens and loads what the options say.
Result<Decoder> load_model(const ModelOptions& options);
/// --text F | --tokens F
void add_token_options(CLI::App* command, ModelOptions& options);
void add_window(CLI::App* command, int& window);

/// The tokens of --text or --tokens.
Result<std::vector<std::int32_t>> read_input(const ModelOptions& options, const Decoder& decoder);

}  // namespace gatefold::cli
