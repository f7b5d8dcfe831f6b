#include "format/isa.h"

#include "format/options.h"

namespace gatefold {

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "portable";
  }
}

std::string_view missing(Isa isa) {
  // __builtin_cpu_supports also asks XGETBV whether the system saves the registers.
  if (isa >= Isa::avx2) {
    if (!__builtin_cpu_supports("avx2")) return "the CPU has no avx2";
    if (!__builtin_cpu_supports("fma")) return "the CPU has no fma";
  }
  if (isa == Isa::avx512) {
    if (!__builtin_cpu_supports("avx512f")) return "the CPU has no avx512f";
    if (!__builtin_cpu_supports("avx512bw")) return "the CPU has no avx512bw";
    if (!__builtin_cpu_supports("avx512vl")) return "the CPU has no avx512vl";
    if (!__builtin_cpu_supports("avx512dq")) return "the CPU has no avx512dq";
  }
  return {};
}

Isa best_isa() {
  static const Isa best = [] {
    const std::string wanted = cpu_override();
    for (const Isa isa : all_isas)
      if (missing(isa).empty() && wanted == name(isa)) return isa;
    for (const Isa isa : all_isas)
      if (missing(isa).empty()) return isa;
    return Isa::portable;
  }();
  return best;
}

}  // namespace gatefold
