// The extension module: schemes here, the rest beside it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "gatefold/quantize.h"
#include "gatefold/scheme.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {

SchemeId to_scheme(const std::string& name) {
  if (const auto id = find_scheme(name)) return *id;
  std::vector<std::string_view> names;
  for (const Scheme& scheme : all_schemes()) names.push_back(scheme.name);
  invalid(fmt::format("there is no scheme '{}'; there are {}", name, fmt::join(names, ", ")));
}

Device to_device(const std::string& text) {
  if (text == "cpu") return Device::cpu();
  if (text == "cuda") return Device::cuda();
  int index = 0;
  char more = 0;
  if (text.size() < 10 && std::sscanf(text.c_str(), "cuda:%d%c", &index, &more) == 1 && index >= 0)
    return Device::cuda(index);
  invalid(fmt::format("device = '{}', expected 'cpu', 'cuda' or 'cuda:N'", text));
}

Precision to_precision(const std::string& name) {
  if (name == "native") return Precision::native;
  if (name == "f32") return Precision::f32;
  invalid(fmt::format("precision = '{}', expected 'native' or 'f32'", name));
}

void add_schemes(nb::module_& m) {
  nb::class_<Scheme>(m, "Scheme", "A row of the scheme table: what is stored, and what is multiplied.")
      .def_prop_ro("name", [](const Scheme& s) { return std::string(s.name); })
      .def_prop_ro(
          "weights", [](const Scheme& s) { return describe(s.weight, true); },
          "For reading: 'e2m1, ue8m0 per 32'.")
      .def_prop_ro(
          "activations",
          [](const Scheme& s) {
            return s.quantizes_activations() ? describe(s.activation, false) : "16-bit";
          },
          "For reading: '16-bit', or 'e4m3, f32 per token'.")
      .def_prop_ro(
          "quantized", [](const Scheme& s) { return s.weight.quantized(); },
          "Whether weights have scales; else they are plain bf16 or f16.")
      .def_prop_ro("quantizes_activations", &Scheme::quantizes_activations)
      .def_prop_ro("batch_dependent", &Scheme::batch_dependent,
                   "Whether a token's result depends on the other tokens of the call.")
      .def(
          "bits_per_weight",
          [](const Scheme& s, std::int64_t n, std::int64_t k) { return bits_per_weight(s, n, k); },
          "n"_a = 4096, "k"_a = 4096, "Of an [n, k] matrix, scales included.")
      .def("__repr__", [](const Scheme& s) { return fmt::format("Scheme('{}')", s.name); });
  m.def(
      "schemes",
      [] {
        nb::list list;
        for (const Scheme& scheme : all_schemes()) list.append(nb::cast(&scheme, nb::rv_policy::reference));
        return list;
      },
      nb::sig("def schemes() -> list[Scheme]"), "All schemes, in the order of the table.");
}

}  // namespace gatefold::python

NB_MODULE(_core, m) {
  using namespace gatefold::python;
  m.attr("__version__") = GATEFOLD_VERSION;
  m.attr("has_cuda") = GATEFOLD_HAS_CUDA != 0;
  add_errors(m);
  add_schemes(m);
  add_quantize(m);
  add_linear(m);
  add_experts(m);
  add_checkpoints(m);
  add_torch(m);
}
