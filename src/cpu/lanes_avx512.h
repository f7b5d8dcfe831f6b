#pragma once
/// \file
/// lanes.h on AVX-512: one register is 16 rows.

namespace gatefold::GATEFOLD_ISA {
namespace {

inline constexpr int kRowsRegisters = 1;  // that 16 rows take

struct Rows {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Codes {
  __m512i v;
};

inline Rows rows(float x) {
  return {_mm512_set1_ps(x)};
}
inline Rows load_rows(const void* p) {
  return {_mm512_loadu_ps(p)};
}
inline void store_rows(float* p, Rows a) {
  _mm512_storeu_ps(p, a.v);
}
/// Past the caches; p is aligned. Other threads see it after order_streams().
inline void stream_rows(float* p, Rows a) {
  _mm512_stream_ps(p, a.v);
}
inline void order_streams() {
  _mm_sfence();
}
inline Rows operator+(Rows a, Rows b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline Rows operator*(Rows a, Rows b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
/// a * b + c
inline Rows multiply_add(Rows a, Rows b, Rows c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
/// sum += a * b
inline void add_product(Rows& sum, Rows a, Rows b) {
  sum = multiply_add(a, b, sum);
}

inline Ints ints(std::int32_t x) {
  return {_mm512_set1_epi32(x)};
}
inline Ints operator+(Ints a, Ints b) {
  return {_mm512_add_epi32(a.v, b.v)};
}
inline Ints max(Ints a, Ints b) {
  return {_mm512_max_epi32(a.v, b.v)};
}
template <int kBits>
Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
inline Rows to_float(Ints a) {
  return {_mm512_cvtepi32_ps(a.v)};
}
inline Ints as_ints(Rows a) {
  return {_mm512_castps_si512(a.v)};
}
inline Rows as_float(Ints a) {
  return {_mm512_castsi512_ps(a.v)};
}

inline Ints load_bytes_16(const std::byte* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
/// 16 bytes, each in all 4 bytes of its lane.
inline Codes load_bytes_16_repeated(const std::byte* p) {
  const __m512i first =
      _mm512_set_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0, 0x0C0C0C0C, 0x08080808, 0x04040404, 0,
                       0x0C0C0C0C, 0x08080808, 0x04040404, 0, 0x0C0C0C0C, 0x08080808, 0x04040404, 0);
  return {_mm512_shuffle_epi8(load_bytes_16(p).v, first)};
}
inline Ints load_words_16(const std::byte* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Rows load_f16(const std::byte* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

/// 16 bytes of ue4m3, divided by kUe4m3Factor: as the upper bits of f16, whose exponent is larger by 8,
/// subnormals included.
inline Rows load_ue4m3(const std::byte* p) {
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_cvtph_ps(_mm256_slli_epi16(codes, 7))};
}

inline Codes load_codes(const std::byte* p) {
  return {_mm512_load_si512(p)};
}
inline void store_codes(std::byte* p, Codes a) {
  _mm512_store_si512(p, a.v);
}
inline Codes low_nibbles(Codes a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))};
}
inline Codes high_nibbles(Codes a) {
  return {_mm512_and_si512(_mm512_srli_epi32(a.v, 4), _mm512_set1_epi8(15))};
}
inline Codes add_bytes(Codes a, Codes b) {
  return {_mm512_add_epi8(a.v, b.v)};
}
/// table[nibble] of every byte; `at` holds the 16 entries four times.
class NibbleTable {
 public:
  explicit NibbleTable(const std::uint8_t* at) : table_(_mm512_load_si512(at)) {}
#if defined(__AVX512VBMI__)
  // The look-up takes 6 bits; of those above the nibble every value finds the same entry.
  Codes low(Codes a) const {
    return {_mm512_permutexvar_epi8(a.v, table_)};
  }
  Codes high(Codes a) const {
    return {_mm512_permutexvar_epi8(_mm512_srli_epi32(a.v, 4), table_)};
  }
#else
  Codes low(Codes a) const {
    return {_mm512_shuffle_epi8(table_, low_nibbles(a).v)};
  }
  Codes high(Codes a) const {
    return {_mm512_shuffle_epi8(table_, high_nibbles(a).v)};
  }
#endif

 private:
  __m512i table_;
};
/// Byte `kByte` of every lane, 0..255.
template <int kByte>
Ints byte(Codes a) {
  if constexpr (kByte == 3) return {_mm512_srli_epi32(a.v, 24)};
  return {_mm512_and_si512(_mm512_srli_epi32(a.v, 8 * kByte), _mm512_set1_epi32(255))};
}
/// Byte `kByte` of every lane, -128..127, times 2^(24 - kShift); of the low bits only those in `mask` stay.
template <int kByte, int kShift>
Ints top_byte(Codes a, std::uint32_t mask) {
  const __m512i top = kByte == 3 ? a.v : _mm512_slli_epi32(a.v, 24 - 8 * kByte);
  return {_mm512_and_si512(_mm512_srai_epi32(top, kShift), _mm512_set1_epi32(static_cast<int>(mask)))};
}
/// Bytes 2i and 2i + 1 of the lower half (or the upper) of each 16 bytes: to bytes 1 and 3 of lane i.
template <bool kUpper>
Codes unpacked(Codes a) {
  const __m512i zero = _mm512_setzero_si512();
  return {kUpper ? _mm512_unpackhi_epi8(zero, a.v) : _mm512_unpacklo_epi8(zero, a.v)};
}
/// The high or low half of every lane as bf16.
inline Rows high_bf16(Codes a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))))};
}
inline Rows low_bf16(Codes a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))};
}

/// sum + the dot product of 4 unsigned codes and 4 signed bytes of x. kNarrow: codes are below 32.
template <bool kNarrow>
Ints dot4(Ints sum, Codes codes, std::int32_t x) {
  const __m512i bytes = _mm512_set1_epi32(x);
#if defined(__AVX512VNNI__)
  // Not the intrinsic: GCC copies every sum of a loop to another register and back.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(codes.v), "v"(bytes));
  return sum;
#else
  const __m512i one = _mm512_set1_epi16(1);
  if constexpr (kNarrow) {  // 2 * 31 * 128 fits in 16 bits
    const __m512i pairs = _mm512_maddubs_epi16(codes.v, bytes);
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, one))};
  } else {  // by nibbles
    const __m512i low = _mm512_maddubs_epi16(low_nibbles(codes).v, bytes);
    const __m512i high = _mm512_maddubs_epi16(high_nibbles(codes).v, bytes);
    const __m512i both =
        _mm512_add_epi32(_mm512_madd_epi16(low, one), _mm512_madd_epi16(high, _mm512_set1_epi16(16)));
    return {_mm512_add_epi32(sum.v, both)};
  }
#endif
}

#if !defined(__AVX512VNNI__)
/// Narrow codes by the bytes at x: 4 times 2 * 31 * 128 fits in 16 bits.
template <int kUnits>
[[gnu::always_inline]] inline Ints narrow_dot4s(Ints sum, const Codes (&units)[kUnits], const std::byte* x) {
  static_assert(kUnits <= 4);
  __m512i pairs = _mm512_maddubs_epi16(units[0].v, _mm512_set1_epi32(load_at<std::int32_t>(x)));
  for (int u = 1; u < kUnits; ++u)
    pairs = _mm512_add_epi16(
        pairs, _mm512_maddubs_epi16(units[u].v, _mm512_set1_epi32(load_at<std::int32_t>(x, u))));
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#endif

#if defined(__AVX512BF16__)
#define GATEFOLD_DOT2
/// sum + the dot product of 2 bf16 and 2 bf16 of x.
inline Rows dot2(Rows sum, Codes pair, std::uint32_t x) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(pair.v), "v"(_mm512_set1_epi32(static_cast<int>(x))));
  return sum;
}

/// 8-bit floats to bf16: two look-ups of 128 entries, for the high and the low byte; the sign is put in
/// after. Pairs lie as in unpacked().
struct PairTable {
  __m512i low0, low1, high0, high1;
  explicit PairTable(const std::uint8_t* low, const std::uint8_t* high)
      : low0(_mm512_load_si512(low)),
        low1(_mm512_load_si512(low + 64)),
        high0(_mm512_load_si512(high)),
        high1(_mm512_load_si512(high + 64)) {}
  void operator()(Codes codes, Codes* pairs) const {
    asm("" : "+v"(codes.v));  // else GCC loads them once for every use
    const __m512i low = _mm512_permutex2var_epi8(low0, codes.v, low1);
    // look-up | (codes & 0x80)
    const __m512i high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high0, codes.v, high1), codes.v,
                                                   _mm512_set1_epi8(static_cast<char>(0x80)), 0xF8);
    pairs[0].v = _mm512_unpacklo_epi8(low, high);
    pairs[1].v = _mm512_unpackhi_epi8(low, high);
  }
};
#endif

#if defined(__AMX_TILE__)
/// 16 rows of 64 bytes in every tile, unless told otherwise.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
/// Not the intrinsic: GCC's tells it that 8 bytes are read, and the others are optimized away.
inline void load_tile_config(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}
#endif

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
