#pragma once
/// \file
/// 16 rows side by side, one per 32-bit lane, for every instruction set. For *.lanes.cpp files only.
///
/// Rows: 16 f32. Ints: 16 i32. Codes: 64 bytes of weights, 4 per row. Dots: the accumulators of dot4.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

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

// Whether dot4 is the same for narrow and wide codes.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
inline constexpr bool kAnyDot4 = true;
#else
inline constexpr bool kAnyDot4 = false;
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
