#pragma once
/// \file
/// What this machine can do: plain reading and multiplying, one thread each.

#include <cstdint>

#include "format/isa.h"

namespace gatefold {

struct Probe {
  /// Reads count floats (a multiple of 256); the result keeps the compiler from dropping the loads.
  float (*read)(const float* data, std::int64_t count);
  /// Multiply-adds in registers; returns how many operations (2 per multiply-add) were done.
  double (*multiply)(std::int64_t rounds, float* sink);
};

const Probe& probe(Isa isa);

}  // namespace gatefold
