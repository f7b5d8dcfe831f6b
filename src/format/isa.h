#pragma once
/// \file
/// Instruction sets. A file `x.lanes.cpp` is compiled once per entry, a file `x.isa.cpp` once per base, with
/// that set's compiler flags and GATEFOLD_ISA set to its name; all it defines is in `namespace
/// gatefold::GATEFOLD_ISA` or unnamed, so that no function compiled for a newer CPU can be picked by the
/// linker for an older one (a test checks that such objects define no weak symbols).

#include <string>
#include <string_view>

namespace gatefold {

/// avxvnni: avx2 and its int8 multiply. avx512vnni: avx512 and its int8 multiply; avx512bf16: that, the bf16
/// multiply, and byte permutations (VBMI). amx: that, and matrix tiles of bytes and bf16.
enum class Isa : unsigned char { portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx };
/// Best first.
inline constexpr Isa all_isas[] = {Isa::amx,     Isa::avx512bf16, Isa::avx512vnni, Isa::avx512,
                                   Isa::avxvnni, Isa::avx2,       Isa::portable};

/// The widest of portable, avx2, avx512 that a set includes.
constexpr Isa base(Isa isa) {
  return isa >= Isa::avx512 ? Isa::avx512 : isa >= Isa::avx2 ? Isa::avx2 : Isa::portable;
}

std::string_view name(Isa isa);

/// As the CPU calls itself: "AMD EPYC 9R14".
const std::string& cpu_name();

/// Empty if this CPU and operating system can run it, else what is missing ("no avx512bw").
std::string_view missing(Isa isa);

/// Why GATEFOLD_CPU cannot be followed, in words; empty if it can, or is not set.
std::string override_problem();

/// The best one that runs here, or the one that GATEFOLD_CPU names if it runs.
Isa best_isa();

}  // namespace gatefold
