#include "tools/cli.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "format/isa.h"
#include "gatefold/tune.h"

namespace gatefold::cli {
namespace {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::ok:
      return "ok";
    case Code::invalid_argument:
      return "invalid_argument";
    case Code::bad_file:
      return "bad_file";
    case Code::io_error:
      return "io_error";
    case Code::unsupported:
      return "unsupported";
    case Code::internal:
      return "internal";
  }
  return "internal";
}

std::string isa_names() {
  std::string names;
  for (const Isa isa : all_isas) names += (names.empty() ? "" : ",") + std::string(name(isa));
  return names;
}

/// --cpu must be known before the library asks for it (src/format/options.cpp), and must not be ignored.
std::string choose_cpu(const std::string& wanted) {
  for (const Isa isa : all_isas)
    if (wanted == name(isa)) {
      if (!missing(isa).empty()) return fmt::format("{}: {}", wanted, missing(isa));
      setenv("GATEFOLD_CPU", wanted.c_str(), 1);
      return {};
    }
  return fmt::format("{} is none of {}", wanted, isa_names());
}

}  // namespace

Cli::Cli() : app_("Quantized Mixture-of-Experts layers", "gatefold") {
  app_.set_version_flag("--version", "gatefold " GATEFOLD_VERSION);
  app_.require_subcommand(1);
  app_.fallthrough();
  app_.footer("Exit code: 0, 1 bad input, 2 bad usage.");
  app_.add_flag("--json", json_, "Print one JSON object, everything else to stderr");
  app_.add_option("--threads", threads_, "Threads; 0: as many as OpenMP takes")->check(CLI::Range(0, 4096));
  app_.add_option("--cpu", "Run the kernels of this instruction set")
      ->check(CLI::Validator(choose_cpu, "{" + isa_names() + "}"));
}

CLI::App* Cli::add(const std::string& name, const std::string& description, Action action) {
  CLI::App* command = app_.add_subcommand(name, description);
  command->callback([this, action = std::move(action)] { action_ = action; });
  return command;
}

int Cli::run(int argc, char** argv) {
  try {
    app_.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app_.exit(error) == 0 ? 0 : 2;
  }
  if (threads_ > 0) omp_set_num_threads(threads_);
  Json json;
  const Status status = action_(json_ ? &json : nullptr);
  if (const std::string warning = tuning_warning(); !warning.empty())
    fmt::print(stderr, "gatefold: {}\n", warning);
  if (!status.ok()) {
    fmt::print(stderr, "gatefold: {}\n", status.message());
    json = {{"error", {{"code", code_name(status.code())}, {"message", status.message()}}}};
  }
  // File names and generated text need not be UTF-8.
  if (json_) fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::perror("gatefold: stdout");
    return 1;
  }
  return status.ok() ? 0 : 1;
}

CLI::Option* add_directory(CLI::App* command, std::string& directory) {
  return command->add_option("DIR", directory, "Hugging Face checkpoint directory")
      ->required()
      ->type_name("DIR");
}

CLI::Option* add_scheme(CLI::App* command, std::optional<SchemeId>& scheme, const std::string& description) {
  const auto parse = [&scheme](const std::string& text) {
    scheme = find_scheme(text);
    if (!scheme)
      throw CLI::ValidationError("--scheme", text + " is not a scheme (gatefold schemes lists them)");
  };
  return command->add_option_function<std::string>("--scheme", parse, description)->type_name("SCHEME");
}

CLI::Option* add_recipe(CLI::App* command, std::string& file) {
  return command->add_option("--recipe", file, "Schemes of all parts of a model (docs/recipes.md)")
      ->type_name("FILE");
}

Result<std::optional<Recipe>> read_optional_recipe(const std::string& file) {
  if (file.empty()) return std::optional<Recipe>();
  auto recipe = read_recipe(file);
  if (!recipe) return recipe.status();
  return std::optional(std::move(*recipe));
}

std::string parse_schemes(const std::string& list, std::vector<SchemeId>& schemes) {
  schemes.clear();
  for (const std::string& name : CLI::detail::split(list, ',')) {
    const auto id = find_scheme(name);
    if (!id) return fmt::format("{} is not a scheme (gatefold schemes lists them)", name);
    schemes.push_back(*id);
  }
  return {};
}

void add_quantize_options(CLI::App* command, QuantizeOptions& options) {
  command->add_flag("--scale-search", options.scale_search, "Search the scales with the least squared error");
  command->add_flag("--allow-nonfinite", options.allow_nonfinite, "Go on when weights are NaN or Inf");
}

void add_run_options(CLI::App* command, Precision& precision, bool& weights_only) {
  command
      ->add_option_function<std::string>(
          "--precision",
          [&precision](const std::string& text) {
            precision = text == "f32" ? Precision::f32 : Precision::native;
          },
          "native: as the scheme says; f32: without rounding to 16 bit")
      ->check(CLI::IsMember({"native", "f32"}));
  command->add_flag("--weights-only", weights_only, "Leave activations unquantized");
}

void add_batch_invariant(CLI::App* command, bool& batch_invariant) {
  command->add_flag("--batch-invariant", batch_invariant,
                    "A token's result does not depend on the tokens beside it, on a GPU either");
}

void add_fast_accumulation(CLI::App* command, bool& fast_accumulation) {
  command->add_flag(
      "--fast-accumulation", fast_accumulation,
      "On a GPU, fp8 by fp8, and by int4, is added up with about 14 bits: faster, and off by 1e-3");
}

void add_backend(CLI::App* command, Device& device) {
  command
      ->add_option_function<std::string>(
          "--backend",
          [&device](const std::string& name) { device = name == "cuda" ? Device::cuda() : Device::cpu(); },
          "Where MoE layers run, or are quantized")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->default_str("cpu");
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  std::vector<std::string> titles;
  for (const Column& column : columns_) titles.push_back(column.title);
  row(titles);
}

void Table::row(const std::vector<std::string>& cells) const {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const int width = columns_[i].width;
    line += width < 0 ? fmt::format("{:<{}}  ", cells[i], -width) : fmt::format("{:>{}}  ", cells[i], width);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

std::string human_bytes(std::uint64_t bytes) {
  static constexpr const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 999.95; value /= 1000) ++unit;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

}  // namespace gatefold::cli
