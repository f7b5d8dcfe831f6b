#pragma once
/// \file
/// Every environment variable of the library, in one place.

#include <string>

namespace gatefold {

/// GATEFOLD_CPU=portable|avx2|avx512: run the kernels of that instruction set, if the CPU has it.
std::string cpu_override();

}  // namespace gatefold
