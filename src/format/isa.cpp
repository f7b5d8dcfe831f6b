#include "format/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "format/options.h"

namespace gatefold {
namespace {

// The compiler's list of names lacks these two.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
bool has_avxvnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0;
}

bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & bf16) != 0 && (d & tile) != 0 &&
         (d & int8) != 0;
}
/// Tiles are a large state, which Linux gives a process when it asks.
bool may_use_tiles() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return granted;
}

}  // namespace

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::amx:
      return "amx";
    case Isa::avx512bf16:
      return "avx512bf16";
    case Isa::avx512vnni:
      return "avx512vnni";
    case Isa::avx512:
      return "avx512";
    case Isa::avxvnni:
      return "avxvnni";
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
    if (!has_f16c()) return "the CPU has no f16c";
  }
  if (isa == Isa::avxvnni && !has_avxvnni()) return "the CPU has no avx_vnni";
  if (isa >= Isa::avx512) {
    if (!__builtin_cpu_supports("avx512f")) return "the CPU has no avx512f";
    if (!__builtin_cpu_supports("avx512bw")) return "the CPU has no avx512bw";
    if (!__builtin_cpu_supports("avx512vl")) return "the CPU has no avx512vl";
    if (!__builtin_cpu_supports("avx512dq")) return "the CPU has no avx512dq";
  }
  if (isa >= Isa::avx512vnni && !__builtin_cpu_supports("avx512vnni")) return "the CPU has no avx512_vnni";
  if (isa >= Isa::avx512bf16) {
    if (!__builtin_cpu_supports("avx512bf16")) return "the CPU has no avx512_bf16";
    if (!__builtin_cpu_supports("avx512vbmi")) return "the CPU has no avx512_vbmi";
  }
  if (isa == Isa::amx) {
    if (!has_amx()) return "the CPU has no amx_int8 and amx_bf16";
    if (!may_use_tiles()) return "the system does not permit AMX tiles";
  }
  return {};
}

const std::string& cpu_name() {
  static const std::string name = [] {
    unsigned words[12] = {};
    for (unsigned i = 0; i < 3; ++i)
      __get_cpuid(0x80000002 + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]);
    std::string text(reinterpret_cast<const char*>(words), sizeof(words));
    text.resize(text.find_last_not_of(std::string(" \0", 2)) + 1);
    return text;
  }();
  return name;
}

std::string override_problem() {
  const std::string wanted = cpu_override();
  if (wanted.empty()) return {};
  std::string known;
  for (const Isa isa : all_isas) {
    if (wanted != name(isa)) {
      known.append(known.empty() ? "" : ", ").append(name(isa));
      continue;
    }
    const std::string_view why = missing(isa);
    return why.empty() ? std::string() : "GATEFOLD_CPU asks for " + wanted + ", but " + std::string(why);
  }
  return "GATEFOLD_CPU is \"" + wanted + "\", not one of " + known;
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
