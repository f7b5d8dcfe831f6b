#pragma once
/// \file
/// What bench and tune are asked to measure.

#include <fmt/ranges.h>

#include <map>
#include <memory>

#include "gatefold/bench.h"
#include "tools/cli.h"

namespace gatefold::cli {

inline const std::map<std::string, BenchRouting> routings = {
    {"uniform", BenchRouting::uniform}, {"skew", BenchRouting::skew}, {"single", BenchRouting::single}};

template <class Value>
std::string name_of(const std::map<std::string, Value>& names, Value value) {
  for (const auto& [name, named] : names)
    if (named == value) return name;
  return {};
}

/// --model, --shape and --ep-size. `shape` must live as long as the command.
void add_shape(CLI::App* command, BenchShape& shape);

/// Those, --scheme, --tokens, --routing, --seconds, --weight-bytes, of BenchOptions or TuneOptions.
template <class Options>
void add_measured(CLI::App* command, const std::shared_ptr<Options>& options) {
  add_shape(command, options->shape);
  command->add_option("--scheme", "Comma-separated")
      ->required()
      ->check([options](const std::string& list) { return parse_schemes(list, options->schemes); })
      ->type_name("SCHEME,...");
  command->add_option("--tokens", options->tokens, "Tokens per call, comma-separated")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("T,...")
      ->default_str(fmt::format("{}", fmt::join(options->tokens, ",")));
  command
      ->add_option_function<std::string>(
          "--routing", [options](const std::string& name) { options->routing = routings.at(name); },
          "Which experts are chosen")
      ->check(CLI::IsMember(routings))
      ->type_name("")
      ->default_str("uniform");
  command->add_option("--seconds", options->seconds, "At least, for each thing that is measured")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--weight-bytes", options->weight_bytes, "Memory for weights: layers repeat up to this")
      ->transform(CLI::AsSizeValue(true))
      ->default_str(fmt::format("{}GB", options->weight_bytes / 1'000'000'000));
}

}  // namespace gatefold::cli
