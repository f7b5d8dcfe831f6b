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

#if defined(__AVX512F__)
#include "cpu/lanes_avx512.h"
#elif defined(__AVX2__)
#include "cpu/lanes_avx2.h"
#else
#include "cpu/lanes_portable.h"
#endif
