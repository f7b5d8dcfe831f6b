#pragma once
/// \file
/// lanes.h on AVX2: two registers are 16 rows.

namespace gatefold::GATEFOLD_ISA {
namespace {

inline constexpr int kRowsRegisters = 2;  // that 16 rows take

struct Rows {
  __m256 v[2];
};
struct Ints {
  __m256i v[2];
};
struct Codes {
  __m256i v[2];
};

/// f(half) of both halves.
template <class R, class F>
R both(F&& f) {
  return {f(0), f(1)};
}

inline Rows rows(float x) {
  return both<Rows>([&](int) { return _mm256_set1_ps(x); });
}
inline Rows load_rows(const void* p) {
  return both<Rows>([&](int h) { return _mm256_loadu_ps(static_cast<const float*>(p) + 8 * h); });
}
inline void store_rows(float* p, Rows a) {
  _mm256_storeu_ps(p, a.v[0]);
  _mm256_storeu_ps(p + 8, a.v[1]);
}
/// Past the caches; p is aligned. Other threads see it after order_streams().
inline void stream_rows(float* p, Rows a) {
  _mm256_stream_ps(p, a.v[0]);
  _mm256_stream_ps(p + 8, a.v[1]);
}
inline void order_streams() {
  _mm_sfence();
}
inline Rows operator+(Rows a, Rows b) {
  return both<Rows>([&](int h) { return _mm256_add_ps(a.v[h], b.v[h]); });
}
inline Rows operator*(Rows a, Rows b) {
  return both<Rows>([&](int h) { return _mm256_mul_ps(a.v[h], b.v[h]); });
}
/// a * b + c
inline Rows multiply_add(Rows a, Rows b, Rows c) {
  return both<Rows>([&](int h) { return _mm256_fmadd_ps(a.v[h], b.v[h], c.v[h]); });
}
/// sum += a * b. Not the intrinsic: GCC lets the product take the place of a factor, and then lacks
/// registers.
inline void add_product(Rows& sum, Rows a, Rows b) {
  for (int h = 0; h < 2; ++h) asm("vfmadd231ps %2, %1, %0" : "+x"(sum.v[h]) : "x"(a.v[h]), "x"(b.v[h]));
}

inline Ints ints(std::int32_t x) {
  return both<Ints>([&](int) { return _mm256_set1_epi32(x); });
}
inline Ints operator+(Ints a, Ints b) {
  return both<Ints>([&](int h) { return _mm256_add_epi32(a.v[h], b.v[h]); });
}
inline Ints max(Ints a, Ints b) {
  return both<Ints>([&](int h) { return _mm256_max_epi32(a.v[h], b.v[h]); });
}
template <int kBits>
Ints shift_left(Ints a) {
  return both<Ints>([&](int h) { return _mm256_slli_epi32(a.v[h], kBits); });
}
inline Rows to_float(Ints a) {
  return both<Rows>([&](int h) { return _mm256_cvtepi32_ps(a.v[h]); });
}
inline Ints as_ints(Rows a) {
  return both<Ints>([&](int h) { return _mm256_castps_si256(a.v[h]); });
}
inline Rows as_float(Ints a) {
  return both<Rows>([&](int h) { return _mm256_castsi256_ps(a.v[h]); });
}

inline Ints load_bytes_16(const std::byte* p) {
  return both<Ints>([&](int h) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * h)));
  });
}
/// 16 bytes, each in all 4 bytes of its lane.
inline Codes load_bytes_16_repeated(const std::byte* p) {
  const __m256i first =
      _mm256_set_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0, 0x0C0C0C0C, 0x08080808, 0x04040404, 0);
  const Ints bytes = load_bytes_16(p);
  return both<Codes>([&](int h) { return _mm256_shuffle_epi8(bytes.v[h], first); });
}
inline Ints load_words_16(const std::byte* p) {
  return both<Ints>([&](int h) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * h)));
  });
}
inline Rows load_f16(const std::byte* p) {
  return both<Rows>(
      [&](int h) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * h))); });
}

/// 16 bytes of ue4m3, divided by kUe4m3Factor: as the upper bits of f16, whose exponent is larger by 8,
/// subnormals included.
inline Rows load_ue4m3(const std::byte* p) {
  return both<Rows>([&](int h) {
    const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * h)));
    return _mm256_cvtph_ps(_mm_slli_epi16(codes, 7));
  });
}

inline Codes load_codes(const std::byte* p) {
  return both<Codes>([&](int h) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32 * h)); });
}
inline void store_codes(std::byte* p, Codes a) {
  for (int h = 0; h < 2; ++h) _mm256_store_si256(reinterpret_cast<__m256i*>(p + 32 * h), a.v[h]);
}
inline Codes low_nibbles(Codes a) {
  return both<Codes>([&](int h) { return _mm256_and_si256(a.v[h], _mm256_set1_epi8(15)); });
}
inline Codes high_nibbles(Codes a) {
  return both<Codes>(
      [&](int h) { return _mm256_and_si256(_mm256_srli_epi32(a.v[h], 4), _mm256_set1_epi8(15)); });
}
inline Codes add_bytes(Codes a, Codes b) {
  return both<Codes>([&](int h) { return _mm256_add_epi8(a.v[h], b.v[h]); });
}
/// table[nibble] of every byte; `at` holds the 16 entries twice or more.
class NibbleTable {
 public:
  explicit NibbleTable(const std::uint8_t* at)
      : table_(_mm256_load_si256(reinterpret_cast<const __m256i*>(at))) {}
  Codes low(Codes a) const { return look_up(low_nibbles(a)); }
  Codes high(Codes a) const { return look_up(high_nibbles(a)); }

 private:
  Codes look_up(Codes a) const {
    return both<Codes>([&](int h) { return _mm256_shuffle_epi8(table_, a.v[h]); });
  }
  __m256i table_;
};
/// Byte `kByte` of every lane, 0..255.
template <int kByte>
Ints byte(Codes a) {
  return both<Ints>([&](int h) {
    const __m256i shifted = _mm256_srli_epi32(a.v[h], 8 * kByte);
    return kByte == 3 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi32(255));
  });
}
/// Byte `kByte` of every lane, -128..127, times 2^(24 - kShift); of the low bits only those in `mask` stay.
template <int kByte, int kShift>
Ints top_byte(Codes a, std::uint32_t mask) {
  return both<Ints>([&](int h) {
    const __m256i top = kByte == 3 ? a.v[h] : _mm256_slli_epi32(a.v[h], 24 - 8 * kByte);
    return _mm256_and_si256(_mm256_srai_epi32(top, kShift), _mm256_set1_epi32(static_cast<int>(mask)));
  });
}
/// Bytes 2i and 2i + 1 of the lower half (or the upper) of each 16 bytes: to bytes 1 and 3 of lane i.
template <bool kUpper>
Codes unpacked(Codes a) {
  const __m256i zero = _mm256_setzero_si256();
  return both<Codes>([&](int h) {
    return kUpper ? _mm256_unpackhi_epi8(zero, a.v[h]) : _mm256_unpacklo_epi8(zero, a.v[h]);
  });
}
/// The high or low half of every lane as bf16.
inline Rows high_bf16(Codes a) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  return both<Rows>([&](int h) { return _mm256_castsi256_ps(_mm256_and_si256(a.v[h], mask)); });
}
inline Rows low_bf16(Codes a) {
  return both<Rows>([&](int h) { return _mm256_castsi256_ps(_mm256_slli_epi32(a.v[h], 16)); });
}

/// sum + the dot product of 4 unsigned codes and 4 signed bytes of x. kNarrow: codes are below 32.
template <bool kNarrow>
Ints dot4(Ints sum, Codes codes, std::int32_t x) {
  const __m256i bytes = _mm256_set1_epi32(x);
#if defined(__AVXVNNI__)
  return both<Ints>([&](int h) { return _mm256_dpbusd_avx_epi32(sum.v[h], codes.v[h], bytes); });
#else
  const __m256i one = _mm256_set1_epi16(1);
  if constexpr (kNarrow) {  // 2 * 31 * 128 fits in 16 bits
    return both<Ints>([&](int h) {
      const __m256i pairs = _mm256_maddubs_epi16(codes.v[h], bytes);
      return _mm256_add_epi32(sum.v[h], _mm256_madd_epi16(pairs, one));
    });
  } else {  // by nibbles
    const Codes low = low_nibbles(codes), high = high_nibbles(codes);
    return both<Ints>([&](int h) {
      const __m256i lows = _mm256_madd_epi16(_mm256_maddubs_epi16(low.v[h], bytes), one);
      const __m256i highs = _mm256_madd_epi16(_mm256_maddubs_epi16(high.v[h], bytes), _mm256_set1_epi16(16));
      return _mm256_add_epi32(sum.v[h], _mm256_add_epi32(lows, highs));
    });
  }
#endif
}

#if !defined(__AVXVNNI__)
/// Narrow codes by the bytes at x: 4 times 2 * 31 * 128 fits in 16 bits.
template <int kUnits>
[[gnu::always_inline]] inline Ints narrow_dot4s(Ints sum, const Codes (&units)[kUnits], const std::byte* x) {
  static_assert(kUnits <= 4);
  for (int h = 0; h < 2; ++h) {
    __m256i pairs = _mm256_maddubs_epi16(units[0].v[h], _mm256_set1_epi32(load_at<std::int32_t>(x)));
    for (int u = 1; u < kUnits; ++u)
      pairs = _mm256_add_epi16(
          pairs, _mm256_maddubs_epi16(units[u].v[h], _mm256_set1_epi32(load_at<std::int32_t>(x, u))));
    sum.v[h] = _mm256_add_epi32(sum.v[h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return sum;
}
#endif

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
