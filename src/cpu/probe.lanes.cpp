#include "cpu/probe.h"

#include "cpu/lanes.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

void read(const float* data, std::int64_t count, std::int64_t prefetch) {
  Rows sums[8];
  for (Rows& s : sums) s = rows(0);
  for (std::int64_t i = 0; i < count; i += 128)
    for (int s = 0; s < 8; ++s) {
      const float* p = data + i + 16 * s;
      if (prefetch != 0) __builtin_prefetch(reinterpret_cast<const std::byte*>(p) + prefetch);
      sums[s] = sums[s] + load_rows(p);
    }
  asm volatile("" : : "r"(sums) : "memory");  // all of them are wanted
}

/// More than latency times issue width, fewer than the registers.
constexpr int kChains = kRowsRegisters == 1 ? 12 : kRowsRegisters == 2 ? 6 : 2;

template <class Sum, class Step>
double multiply(std::int64_t rounds, int per_step, Sum start, Step&& step) {
  Sum sums[kChains];
  for (Sum& s : sums) s = start;
  for (std::int64_t i = 0; i < rounds; ++i)
    for (Sum& s : sums) s = step(s);
  asm volatile("" : : "r"(sums) : "memory");  // all of them are wanted
  return 2.0 * kChains * per_step * static_cast<double>(rounds);
}

double multiply_f32(std::int64_t rounds, float* sink) {
  const Rows a = load_rows(sink), b = load_rows(sink + 16);
  return multiply(rounds, 16, a, [&](Rows s) { return multiply_add(a, b, s); });
}

#if defined(__AMX_TILE__)

template <class Step>
double multiply_tiles(std::int64_t rounds, int columns, Step&& step) {
  load_tile_config({});
  _tile_zero(6);
  _tile_zero(7);
  for (std::int64_t i = 0; i < rounds / 16; ++i) step();
  _tile_release();
  return 2.0 * 4 * 16 * 16 * columns * static_cast<double>(rounds / 16);
}

double multiply_int8(std::int64_t rounds, float*) {
  return multiply_tiles(rounds, 64, [] {
    _tile_dpbsud(0, 6, 7);
    _tile_dpbsud(1, 6, 7);
    _tile_dpbsud(2, 6, 7);
    _tile_dpbsud(3, 6, 7);
  });
}
double multiply_bf16(std::int64_t rounds, float*) {
  return multiply_tiles(rounds, 32, [] {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
  });
}

#else

double multiply_int8(std::int64_t rounds, float* sink) {
  const Codes a = load_codes(reinterpret_cast<const std::byte*>(sink));
  return multiply(rounds, 64, ints(0), [&](Ints s) { return dot4<true>(s, a, 0x01020304); });
}

#if defined(GATEFOLD_DOT2)
double multiply_bf16(std::int64_t rounds, float* sink) {
  const Codes a = load_codes(reinterpret_cast<const std::byte*>(sink));
  return multiply(rounds, 32, rows(0), [&](Rows s) { return dot2(s, a, 0); });
}
#else
constexpr double (*multiply_bf16)(std::int64_t, float*) = nullptr;
#endif

#endif

}  // namespace

extern const Probe probes;
const Probe probes{read, multiply_f32, multiply_bf16, multiply_int8};

}  // namespace gatefold::GATEFOLD_ISA
