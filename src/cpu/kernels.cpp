#include <fmt/format.h>

#include <vector>

#include "cpu/moe_layer.h"

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
  cpu_moe_layer(I, call);
}

template <Isa I>
void add_kernels(std::vector<KernelInfo>& list) {
  for_each_scheme([&]<class S>() {
    list.push_back({fmt::format("cpu.{}.{}", name(I), S::scheme.name), S::id, Device::Kind::cpu, "rows",
                    refuses<I>, cpu_moe_workspace, launch<I>});
  });
}

}  // namespace

std::span<const KernelInfo> cpu_kernels() {
  static const std::vector<KernelInfo> list = [] {
    std::vector<KernelInfo> kernels;
    add_kernels<Isa::avx512>(kernels);
    add_kernels<Isa::avx2>(kernels);
    add_kernels<Isa::portable>(kernels);
    return kernels;
  }();
  return list;
}

}  // namespace gatefold
