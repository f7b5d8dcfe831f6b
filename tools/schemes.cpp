#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/compressed_tensors.h"
#include "format/isa.h"
#include "gatefold/quantize.h"
#include "moe/kernel.h"
#include "tools/cli.h"

namespace gatefold::cli {
namespace {

/// One line of the listing; `--markdown` prints what README.md holds between its markers.
struct Line {
  std::string name, weights, activations, bits, stored_as, kernels;
};

std::string stored_as(const Scheme& scheme) {
  if (!scheme.weight.quantized()) return "unquantized";
  const auto config = compressed_tensors::config(scheme, {});
  const auto format = config.at("format").get<std::string>();
  return config.at("quant_method") == "compressed-tensors" ? format : format + " (gatefold)";
}

/// The instruction sets or GPU architectures that have a kernel: "cpu.avx512.int4_g128" says avx512.
std::vector<std::string> kernels(std::span<const KernelInfo> list, SchemeId id) {
  std::vector<std::string> sets;
  for (const KernelInfo& kernel : list) {
    const std::size_t begin = kernel.name.find('.') + 1;
    std::string set = kernel.name.substr(begin, kernel.name.find('.', begin) - begin);
    if (kernel.scheme == id && std::find(sets.begin(), sets.end(), set) == sets.end())
      sets.push_back(std::move(set));
  }
  return sets;
}

std::vector<std::string> kernels(SchemeId id) {
  std::vector<std::string> sets = kernels(cpu_kernels(), id);
  for (std::string& set : kernels(cuda_kernels(), id)) sets.push_back(std::move(set));
  return sets;
}

std::string kernel_list(SchemeId id) {
  const std::vector<std::string> cpu = kernels(cpu_kernels(), id), gpu = kernels(cuda_kernels(), id);
  return fmt::format("{}, {}",
                     cpu.size() == std::size(all_isas) ? "all CPUs" : fmt::format("{}", fmt::join(cpu, ", ")),
                     fmt::join(gpu, ", "));
}

std::vector<Line> lines() {
  std::vector<Line> result;
  for (const Scheme& scheme : all_schemes())
    result.push_back({std::string(scheme.name), describe(scheme.weight, true),
                      describe(scheme.activation, false),
                      fmt::format("{:.4g}", bits_per_weight(scheme, 4096, 4096)), stored_as(scheme),
                      kernel_list(*find_scheme(scheme.name))});
  return result;
}

Json to_json() {
  Json rows = Json::array();
  for (const Scheme& scheme : all_schemes())
    rows.push_back({{"name", scheme.name},
                    {"weights", describe(scheme.weight, true)},
                    {"activations", describe(scheme.activation, false)},
                    {"bits_per_weight", bits_per_weight(scheme, 4096, 4096)},
                    {"stored_as", stored_as(scheme)},
                    {"kernels", kernels(*find_scheme(scheme.name))},
                    {"batch_dependent", scheme.batch_dependent()}});
  return {{"schemes", rows}};
}

Status list(bool markdown, Json* json) {
  if (json != nullptr) {
    *json = to_json();
  } else if (markdown) {
    fmt::print(
        "| scheme | weights | activations | bits per weight | stored as | kernels "
        "|\n|---|---|---|---|---|---|\n");
    for (const Line& line : lines())
      fmt::print("| `{}` | {} | {} | {} | {} | {} |\n", line.name, line.weights, line.activations, line.bits,
                 line.stored_as, line.kernels);
  } else {
    const Table table({{"scheme", -16},
                       {"weights", -35},
                       {"activations", -32},
                       {"bits", 5},
                       {"stored as", -26},
                       {"kernels", -1}});
    for (const Line& line : lines())
      table.row({line.name, line.weights, line.activations, line.bits, line.stored_as, line.kernels});
  }
  return {};
}

}  // namespace

void add_schemes(Cli& cli) {
  auto markdown = std::make_shared<bool>(false);
  CLI::App* command = cli.add("schemes", "All quantization schemes",
                              [markdown](Json* json) { return list(*markdown, json); });
  command->add_flag("--markdown", *markdown, "As a Markdown table");
}

}  // namespace gatefold::cli
