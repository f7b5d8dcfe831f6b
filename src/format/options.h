#pragma once
/// \file
/// Every environment variable of the library, in one place.

#include <string>

namespace gatefold {

/// GATEFOLD_CPU=portable|avx2|...: run the kernels of that instruction set, if the CPU has it.
std::string cpu_override();

/// GATEFOLD_TUNING, else gatefold/tuning.json in XDG_CACHE_HOME or ~/.cache; empty if there is no home.
std::string tuning_path();

}  // namespace gatefold
