#include <fmt/format.h>

#include <vector>

#include "cpu/layer.h"

namespace gatefold {
namespace {

template <Isa I>
std::string refuses(const MoeSpec&, const PlanOptions&, const Device&) {
  if (const std::string_view why = missing(I); !why.empty()) return std::string(why);
  if (std::string problem = override_problem(); !problem.empty()) return problem;
  if (I <= best_isa()) return {};
  return fmt::format("GATEFOLD_CPU asks for {}", name(best_isa()));
}

template <Isa I>
void workspace(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout) {
  panel_workspace(I, spec, options, layout);
}

template <Isa I>
Status launch(const MoeCall& call) {
  panel_layer(I, call);
  return {};
}

template <std::size_t... I>
void add_kernels(std::vector<KernelInfo>& list, std::index_sequence<I...>) {
  const auto add = [&]<Isa isa>() {
    for_each_scheme([&]<class S>() {
      list.push_back({fmt::format("cpu.{}.{}", name(isa), S::scheme.name), S::id, Device::Kind::cpu,
                      &panel_layout, refuses<isa>, workspace<isa>, launch<isa>});
    });
  };
  (add.template operator()<all_isas[I]>(), ...);
}

}  // namespace

std::span<const KernelInfo> cpu_kernels() {
  static const std::vector<KernelInfo> list = [] {
    std::vector<KernelInfo> kernels;
    add_kernels(kernels, std::make_index_sequence<std::size(all_isas)>());
    return kernels;
  }();
  return list;
}

}  // namespace gatefold
