#include "tools/measured.h"

#include <fmt/format.h>

namespace gatefold::cli {
namespace {

std::string preset_names() {
  std::string names;
  for (const BenchShape& preset : bench_presets()) names += (names.empty() ? "" : ",") + preset.name;
  return names;
}

/// Whatever was said of `ep_size` stays.
void set_sizes(BenchShape& shape, BenchShape sizes) {
  sizes.ep_size = shape.ep_size;
  shape = std::move(sizes);
}

std::string choose_preset(const std::string& name, BenchShape& shape) {
  for (const BenchShape& preset : bench_presets())
    if (preset.name == name) {
      set_sizes(shape, preset);
      return {};
    }
  return fmt::format("{} is none of {}", name, preset_names());
}

}  // namespace

void add_shape(CLI::App* command, BenchShape& shape_of_layers) {
  BenchShape* chosen = &shape_of_layers;
  auto* shape = command->add_option_group("shape", "One of")->require_option(1);
  shape->add_option("--model", "The layers of a published model")
      ->check(CLI::Validator([chosen](const std::string& name) { return choose_preset(name, *chosen); },
                             "{" + preset_names() + "}"))
      ->type_name("");
  shape
      ->add_option_function<std::vector<int>>(
          "--shape",
          [chosen](const std::vector<int>& sizes) {
            set_sizes(*chosen, {"custom", sizes[0], sizes[1], sizes[2], sizes[3]});
          },
          "Hidden size, expert width, experts, experts per token")
      ->delimiter(',')
      ->expected(4)
      ->check(CLI::PositiveNumber)
      ->type_name("H,I,E,K");
  command
      ->add_option("--ep-size", shape_of_layers.ep_size,
                   "Layers have one of so many parts of the experts, and tokens choose of all")
      ->check(CLI::Range(1, 1 << 12))
      ->type_name("N")
      ->default_str("1");
}

}  // namespace gatefold::cli
