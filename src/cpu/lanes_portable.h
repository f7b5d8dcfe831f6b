#pragma once
/// \file
/// lanes.h in plain C++.

namespace gatefold::GATEFOLD_ISA {
namespace {

inline constexpr int kRowsRegisters = 4;  // that 16 rows take

struct Rows {
  float v[16];
};
struct Ints {
  std::int32_t v[16];
};
struct Codes {
  std::uint32_t v[16];
};

/// f(row) of every row.
template <class R, class F>
R each(F&& f) {
  R result;
  for (int r = 0; r < 16; ++r) result.v[r] = f(r);
  return result;
}

inline Rows rows(float x) {
  return each<Rows>([&](int) { return x; });
}
inline Rows load_rows(const void* p) {
  return each<Rows>([&](int r) { return load_at<float>(p, r); });
}
inline void store_rows(float* p, Rows a) {
  std::memcpy(p, a.v, sizeof(a.v));
}
inline void stream_rows(float* p, Rows a) {
  store_rows(p, a);
}
inline void order_streams() {}
inline Rows operator+(Rows a, Rows b) {
  return each<Rows>([&](int r) { return a.v[r] + b.v[r]; });
}
inline Rows operator*(Rows a, Rows b) {
  return each<Rows>([&](int r) { return a.v[r] * b.v[r]; });
}
/// a * b + c
inline Rows multiply_add(Rows a, Rows b, Rows c) {
  return each<Rows>([&](int r) { return a.v[r] * b.v[r] + c.v[r]; });
}
/// sum += a * b
inline void add_product(Rows& sum, Rows a, Rows b) {
  sum = multiply_add(a, b, sum);
}

inline Ints ints(std::int32_t x) {
  return each<Ints>([&](int) { return x; });
}
inline Ints operator+(Ints a, Ints b) {
  return each<Ints>([&](int r) { return a.v[r] + b.v[r]; });
}
inline Ints max(Ints a, Ints b) {
  return each<Ints>([&](int r) { return a.v[r] > b.v[r] ? a.v[r] : b.v[r]; });
}
template <int kBits>
Ints shift_left(Ints a) {
  return each<Ints>([&](int r) { return a.v[r] * (1 << kBits); });
}
inline Rows to_float(Ints a) {
  return each<Rows>([&](int r) { return static_cast<float>(a.v[r]); });
}
inline Ints as_ints(Rows a) {
  return each<Ints>([&](int r) { return std::bit_cast<std::int32_t>(a.v[r]); });
}
inline Rows as_float(Ints a) {
  return each<Rows>([&](int r) { return std::bit_cast<float>(a.v[r]); });
}

inline Ints load_bytes_16(const std::byte* p) {
  return each<Ints>([&](int r) { return static_cast<std::int32_t>(p[r]); });
}
/// 16 bytes, each in all 4 bytes of its lane.
inline Codes load_bytes_16_repeated(const std::byte* p) {
  return each<Codes>([&](int r) { return 0x01010101u * static_cast<std::uint32_t>(p[r]); });
}
inline Ints load_words_16(const std::byte* p) {
  return each<Ints>([&](int r) { return std::int32_t{load_at<std::uint16_t>(p, r)}; });
}
inline Rows load_f16(const std::byte* p) {
  return each<Rows>([&](int r) { return decode<formats::f16>(load_at<std::uint16_t>(p, r)); });
}

/// 16 bytes of ue4m3, divided by kUe4m3Factor.
inline Rows load_ue4m3(const std::byte* p) {
  return each<Rows>(
      [&](int r) { return decode<formats::ue4m3>(static_cast<std::uint32_t>(p[r])) * (1 / kUe4m3Factor); });
}

inline Codes load_codes(const std::byte* p) {
  return each<Codes>([&](int r) { return load_at<std::uint32_t>(p, r); });
}
inline void store_codes(std::byte* p, Codes a) {
  std::memcpy(p, a.v, sizeof(a.v));
}
inline Codes low_nibbles(Codes a) {
  return each<Codes>([&](int r) { return a.v[r] & 0x0F0F0F0F; });
}
inline Codes high_nibbles(Codes a) {
  return each<Codes>([&](int r) { return a.v[r] >> 4 & 0x0F0F0F0F; });
}
inline Codes add_bytes(Codes a, Codes b) {  // no sum of two bytes is above 255
  return each<Codes>([&](int r) { return a.v[r] + b.v[r]; });
}
/// table[nibble] of every byte.
class NibbleTable {
 public:
  explicit NibbleTable(const std::uint8_t* at) : at_(at) {}
  Codes low(Codes a) const { return look_up(a); }
  Codes high(Codes a) const { return look_up(high_nibbles(a)); }

 private:
  Codes look_up(Codes a) const {
    return each<Codes>([&](int r) {
      std::uint32_t v = 0;
      for (int i = 0; i < 32; i += 8) v |= std::uint32_t{at_[a.v[r] >> i & 15]} << i;
      return v;
    });
  }
  const std::uint8_t* at_;
};
/// Byte `kByte` of every lane, 0..255.
template <int kByte>
Ints byte(Codes a) {
  return each<Ints>([&](int r) { return static_cast<std::int32_t>(a.v[r] >> (8 * kByte) & 255); });
}
/// Byte `kByte` of every lane, -128..127, times 2^(24 - kShift); of the low bits only those in `mask` stay.
template <int kByte, int kShift>
Ints top_byte(Codes a, std::uint32_t mask) {
  return each<Ints>([&](int r) {
    const auto top = static_cast<std::int32_t>(a.v[r] << (24 - 8 * kByte));
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(top >> kShift) & mask);
  });
}
/// Bytes 2i and 2i + 1 of the lower half (or the upper) of each 16 bytes: to bytes 1 and 3 of lane i.
template <bool kUpper>
Codes unpacked(Codes a) {
  return each<Codes>([&](int r) {
    const std::uint32_t pair = a.v[r / 4 * 4 + 2 * kUpper + r % 4 / 2] >> (r % 2 * 16);
    return (pair & 0xFF) << 8 | (pair & 0xFF00) << 16;
  });
}
/// The high or low half of every lane as bf16.
inline Rows high_bf16(Codes a) {
  return each<Rows>([&](int r) { return std::bit_cast<float>(a.v[r] & 0xFFFF0000); });
}
inline Rows low_bf16(Codes a) {
  return each<Rows>([&](int r) { return std::bit_cast<float>(a.v[r] << 16); });
}

/// sum + the dot product of 4 unsigned codes and 4 signed bytes of x. kNarrow: codes are below 32.
template <bool kNarrow>
Ints dot4(Ints sum, Codes codes, std::int32_t x) {
  return each<Ints>([&](int r) {
    std::int32_t dot = sum.v[r];
    for (int i = 0; i < 4; ++i)
      dot += static_cast<std::int32_t>(codes.v[r] >> (8 * i) & 255) * static_cast<std::int8_t>(x >> (8 * i));
    return dot;
  });
}

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
