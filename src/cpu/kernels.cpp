#include <fmt/format.h>

#include <vector>

#include "cpu/layer.h"
#include "cpu/panel.h"

namespace gatefold {
namespace {

template <Isa I>
std::string refuses(const MoeSpec&, const PlanOptions&) {
  if (const std::string_view why = missing(I); !why.empty()) return std::string(why);
  if (I < best_isa()) return {};
  return I == best_isa() ? std::string() : fmt::format("GATEFOLD_CPU asks for {}", name(best_isa()));
}

template <Isa I>
void launch(const MoeCall& call) {
  rows_layer(I, call);
}

template <Isa I>
void add_kernels(std::vector<KernelInfo>& list) {
  for_each_scheme([&]<class S>() {
    list.push_back({fmt::format("cpu.{}.{}", name(I), S::scheme.name), S::id, Device::Kind::cpu, &rows_layout,
                    refuses<I>, rows_workspace, launch<I>});
  });
}

std::string refuses_panels(SchemeId id, const MoeSpec& spec, const PlanOptions& options) {
  return panels_refuse(scheme(id), effective_activation(id, spec, options));
}

template <class S>
std::string panel_refuses(const MoeSpec& spec, const PlanOptions& options) {
  if (const std::string_view why = panels_missing(); !why.empty()) return std::string(why);
  if (best_isa() != Isa::avx512) return fmt::format("GATEFOLD_CPU asks for {}", name(best_isa()));
  if (std::string why = refuses_panels(S::id, spec, options); !why.empty()) return why;
  if (spec.shared.intermediate == 0) return {};
  const std::string why = refuses_panels(spec.shared.scheme, spec, options);
  return why.empty() ? why : fmt::format("shared expert: {}", why);
}

void add_panel_kernels(std::vector<KernelInfo>& list) {
  for_each_scheme([&]<class S>() {
    if (panels_refuse(S::scheme, operands::plain(formats::bf16)).empty())
      list.push_back({fmt::format("cpu.avx512bf16.{}", S::scheme.name), S::id, Device::Kind::cpu,
                      &panel_layout, panel_refuses<S>, panel_workspace, panel_layer});
  });
}

}  // namespace

std::span<const KernelInfo> cpu_kernels() {
  static const std::vector<KernelInfo> list = [] {
    std::vector<KernelInfo> kernels;
    add_panel_kernels(kernels);
    add_kernels<Isa::avx512>(kernels);
    add_kernels<Isa::avx2>(kernels);
    add_kernels<Isa::portable>(kernels);
    return kernels;
  }();
  return list;
}

}  // namespace gatefold
