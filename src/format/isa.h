#pragma once
/// \file
/// Instruction sets. A file `x.isa.cpp` is compiled once per entry, with that set's compiler flags and
/// GATEFOLD_ISA set to its name; all it defines is in `namespace gatefold::GATEFOLD_ISA` or unnamed, so that
/// no function compiled for a newer CPU can be picked by the linker for an older one (a test checks that such
/// objects define no weak symbols).

#include <string_view>

namespace gatefold {

enum class Isa : unsigned char { portable, avx2, avx512 };
inline constexpr Isa all_isas[] = {Isa::avx512, Isa::avx2, Isa::portable};  // best first

std::string_view name(Isa isa);

/// Empty if this CPU and operating system can run it, else what is missing ("no avx512bw").
std::string_view missing(Isa isa);

/// The best one that runs here, or the one that GATEFOLD_CPU names if it runs.
Isa best_isa();

}  // namespace gatefold
