#pragma once
/// \file
/// One vector of f32 per instruction set. For *.isa.cpp files only.

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gatefold::GATEFOLD_ISA {
namespace {

#if defined(__AVX512F__)

struct Vec {
  static constexpr int lanes = 16;
  __m512 v;
};
inline Vec zero() {
  return {_mm512_setzero_ps()};
}
inline Vec load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline Vec multiply_add(Vec a, Vec b, Vec c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline void store(float* p, Vec a) {
  _mm512_storeu_ps(p, a.v);
}

#elif defined(__AVX2__)

struct Vec {
  static constexpr int lanes = 8;
  __m256 v;
};
inline Vec zero() {
  return {_mm256_setzero_ps()};
}
inline Vec load(const float* p) {
  return {_mm256_loadu_ps(p)};
}
inline Vec multiply_add(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.v);
}

#else

struct Vec {
  static constexpr int lanes = 4;
  float v[4];
};
inline Vec zero() {
  return {};
}
inline Vec load(const float* p) {
  return {{p[0], p[1], p[2], p[3]}};
}
inline Vec multiply_add(Vec a, Vec b, Vec c) {
  for (int i = 0; i < 4; ++i) c.v[i] += a.v[i] * b.v[i];
  return c;
}
inline void store(float* p, Vec a) {
  for (int i = 0; i < 4; ++i) p[i] = a.v[i];
}

#endif

/// Sum of the lanes, pairwise.
inline float sum(Vec a) {
  float lane[Vec::lanes];
  store(lane, a);
  for (int half = Vec::lanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
