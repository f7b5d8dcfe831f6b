#pragma once
/// \file
/// 16 rows side by side, one per 32-bit lane, for every instruction set. For *.lanes.cpp files only.
///
/// Rows: 16 f32. Ints: 16 i32. Codes: 64 bytes of weights, 4 per row.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "gatefold/codec.h"

#if defined(__AVX2__)
#if !defined(__clang__)  // GCC 12 warns of its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace gatefold::GATEFOLD_ISA {
namespace {

template <class T>
T load_at(const void* p, std::int64_t i = 0) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(p) + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return value;
}

/// f(0), ..., f(kCount - 1) with constants: in loops that are unrolled late, GCC leaves small arrays in
/// memory.
template <int kCount, class F>
[[gnu::always_inline]] inline void unrolled(F&& f) {
  const auto all = [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>{}), ...);
  };
  all(std::make_integer_sequence<int, kCount>());
}

// Whether dot4 is the same for narrow and wide codes.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
inline constexpr bool kAnyDot4 = true;
#else
inline constexpr bool kAnyDot4 = false;
#endif

// The instruction set that this one adds to, if not a base (format/isa.h).
#if defined(__AMX_TILE__)
#define GATEFOLD_ISA_BELOW avx512bf16
#elif defined(__AVX512BF16__)
#define GATEFOLD_ISA_BELOW avx512vnni
#elif defined(__AVX512VNNI__)
#define GATEFOLD_ISA_BELOW avx512
#elif defined(__AVXVNNI__)
#define GATEFOLD_ISA_BELOW avx2
#endif

#if defined(__AMX_TILE__)
inline constexpr bool kHasTiles = true;
#else
inline constexpr bool kHasTiles = false;
#endif

inline constexpr float kUe4m3Factor = 256.0f;  // see load_ue4m3

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA

#if defined(__AVX512F__)
#include "cpu/lanes_avx512.h"
#elif defined(__AVX2__)
#include "cpu/lanes_avx2.h"
#else
#include "cpu/lanes_portable.h"
#endif

namespace gatefold::GATEFOLD_ISA {
namespace {

/// sum + dot4 of each unit by the next 4 bytes of x.
template <bool kNarrow, int kUnits>
[[gnu::always_inline]] inline Ints dot4s(Ints sum, const Codes (&units)[kUnits], const std::byte* x) {
  if constexpr (kNarrow && !kAnyDot4) return narrow_dot4s(sum, units, x);
  unrolled<kUnits>([&](auto u) __attribute__((always_inline)) {
    sum = dot4<kNarrow>(sum, units[u], load_at<std::int32_t>(x, u));
  });
  return sum;
}

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
