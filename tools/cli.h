#pragma once
/// \file
/// What the subcommands share: how one is added, what it prints, and how an error becomes an exit code.
///
/// Exit codes: 0; 1 bad input (a Status that is not ok); 2 bad usage. With --json stdout gets exactly one
/// object, also on an error: {"error": {"code": ..., "message": ...}}. All else goes to stderr.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "gatefold/moe.h"
#include "gatefold/quantize.h"
#include "gatefold/scheme.h"
#include "gatefold/status.h"

namespace gatefold::cli {

using Json = nlohmann::ordered_json;

/// The command line: an application whose subcommands run after all of it has been parsed.
class Cli {
 public:
  /// Prints for people, or, if given, fills the object that --json prints.
  using Action = std::function<Status(Json* json)>;

  Cli();
  CLI::App& app() { return app_; }
  int threads() const { return threads_; }  ///< --threads
  CLI::App* add(const std::string& name, const std::string& description, Action action);
  int run(int argc, char** argv);

 private:
  CLI::App app_;
  Action action_;
  bool json_ = false;
  int threads_ = 0;
};

void add_schemes(Cli& cli);
void add_inspect(Cli& cli);
void add_quantize(Cli& cli);
void add_convert(Cli& cli);
void add_recommend(Cli& cli);
void add_run(Cli& cli);
void add_eval(Cli& cli);
void add_generate(Cli& cli);
void add_compare(Cli& cli);
void add_bench(Cli& cli);
void add_tune(Cli& cli);
void add_completion(Cli& cli);

/// Options that several subcommands have.
CLI::Option* add_directory(CLI::App* command, std::string& directory);
CLI::Option* add_scheme(CLI::App* command, std::optional<SchemeId>& scheme, const std::string& description);
/// --recipe FILE
CLI::Option* add_recipe(CLI::App* command, std::string& file);
/// Of --recipe; nothing if it was not given.
Result<std::optional<Recipe>> read_optional_recipe(const std::string& file);

/// "mxfp4,nvfp4"; returns what is wrong, or nothing.
std::string parse_schemes(const std::string& list, std::vector<SchemeId>& schemes);
void add_quantize_options(CLI::App* command, QuantizeOptions& options);
void add_run_options(CLI::App* command, Precision& precision, bool& weights_only);
/// --backend cpu|cuda
void add_backend(CLI::App* command, Device& device);
/// --batch-invariant
void add_batch_invariant(CLI::App* command, bool& batch_invariant);
/// --fast-accumulation
void add_fast_accumulation(CLI::App* command, bool& fast_accumulation);

/// A table on stdout, row by row, so that long jobs show each row when it is done.
class Table {
 public:
  struct Column {
    std::string title;
    int width;  ///< negative: to the left
  };
  explicit Table(std::vector<Column> columns);
  void row(const std::vector<std::string>& cells) const;

 private:
  std::vector<Column> columns_;
};

/// "13.7 MB", powers of 1000 as file sizes are given in the field.
std::string human_bytes(std::uint64_t bytes);

}  // namespace gatefold::cli
