#pragma once
/// \file
/// What this machine can do: plain reading and multiplying, one thread each, by the same instructions as the
/// kernels.

#include <cstdint>

#include "format/isa.h"

namespace gatefold {

struct Probe {
  /// Reads count floats (a multiple of 128) in order, with prefetches so many bytes ahead; 0: none.
  void (*read)(const float* data, std::int64_t count, std::int64_t prefetch);
  /// Multiply-adds in registers, `rounds` times some; returns how many operations (2 per multiply-add) were
  /// done. `sink` holds 32 floats, 64-byte aligned. bf16 pairs: nullptr where there is no such instruction.
  using Multiply = double (*)(std::int64_t rounds, float* sink);
  Multiply multiply_f32, multiply_bf16, multiply_int8;
};

const Probe& probe(Isa isa);

}  // namespace gatefold
