#pragma once
/// \file
/// The decode stage: codes and scales of a panel (panel.h) to what is multiplied. For *.lanes.cpp files only.

#include "cpu/lanes.h"
#include "cpu/panel.h"
#include "gatefold/codec.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

/// Scales of a block: none (they are per row), one f32 for all rows, or 16 in a format.
enum class BlockScale { none, one_f32, f32, bf16, ue8m0, ue4m3 };

/// How a format's codes are multiplied. A step is kBytes of a panel, kColumns columns; it becomes units of 4
/// columns in bytes (kOffset + code, or + twice the value: kFactor), units of 2 columns in bf16, or columns
/// in f32. Zero points are added to the bytes (panel.h).
template <Format F>
struct Values;

template <Format F>
requires(F.bits == 4) struct Values<F> {
  static constexpr int kBytes = 64, kColumns = 8, kUnits = 2;
  static constexpr bool kNarrow = true, kDoubled = F.kind == Kind::floating;
  static constexpr int kOffset = panel_offset(F);
  static constexpr float kFactor = kDoubled ? 0.5f : 1.0f;

  struct alignas(64) Table {
    std::uint8_t at[64];  // four times the same, see NibbleTable
  };
  static constexpr Table kTable = [] {
    Table table{};
    for (std::uint32_t i = 0; i < 64; ++i)
      table.at[i] =
          static_cast<std::uint8_t>(2 * decode<formats::e2m1>(i % 16) + panel_offset(formats::e2m1));
    return table;
  }();

  static void to_bytes(const std::byte* p, Codes* units) {
    const Codes load = load_codes(p);
    if constexpr (kDoubled) {
      const NibbleTable table(kTable.at);
      units[0] = table.low(load);
      units[1] = table.high(load);
    } else {
      units[0] = low_nibbles(load);
      units[1] = high_nibbles(load);
    }
  }
  template <int kColumn>
  static Rows column(const std::byte* p) {
    Codes units[kUnits];
    to_bytes(p, units);
    return to_float(byte<kColumn % 4>(units[kColumn / 4]) + ints(-kOffset));
  }
};

template <>
struct Values<formats::int8> {
  static constexpr int kBytes = 128, kColumns = 8, kUnits = 2, kOffset = panel_offset(formats::int8);
  static constexpr bool kNarrow = false;
  static constexpr float kFactor = 1.0f;
  static void to_bytes(const std::byte* p, Codes* units) {
    units[0] = load_codes(p);
    units[1] = load_codes(p + 64);
  }
  template <int kColumn>
  static Rows column(const std::byte* p) {
    return to_float(byte<kColumn % 4>(load_codes(p + kColumn / 4 * 64)) + ints(-kOffset));
  }
};

/// 8-bit floats: unpacked() gives columns 0 and 1, then 2 and 3.
template <Format F>
requires(F.bits == 8 && F.kind == Kind::floating) struct Values<F> {
  static constexpr int kBytes = 64, kColumns = 4;
  static constexpr bool kNarrow = false;
  static constexpr float kFactor = 1.0f;
#if defined(GATEFOLD_DOT2)
  struct alignas(64) Table {
    std::uint8_t at[128];
  };
  static constexpr Table table(int shift) {
    Table table{};
    for (std::uint32_t i = 0; i < 128; ++i)
      table.at[i] = static_cast<std::uint8_t>(encode<formats::bf16>(decode<F>(i)) >> shift);
    return table;
  }
  static constexpr Table kLow = table(0), kHigh = table(8);
  const PairTable pairs{kLow.at, kHigh.at};
  void to_pairs(const std::byte* p, Codes* units) const {
    pairs(load_codes(p), units);
  }
#endif
  /// The code moved to the top of an f32, less the shift of its narrower exponent, is value * 2^-(127 -
  /// bias), subnormals included.
  template <int kColumn>
  static Rows column(const std::byte* p) {
    constexpr bool e4m3 = F == formats::e4m3;
    constexpr int kByte = kColumn % 2 * 2 + 1, kShift = e4m3 ? 4 : 3;
    const Ints bits =
        top_byte<kByte, kShift>(unpacked<kColumn / 2 != 0>(load_codes(p)), e4m3 ? 0x87F00000 : 0x8FE00000);
    return as_float(bits) * rows(e4m3 ? 0x1p120f : 0x1p112f);
  }
};

template <>
struct Values<formats::bf16> {
  static constexpr int kBytes = 128, kColumns = 4;
  static constexpr bool kNarrow = false;
  static constexpr float kFactor = 1.0f;
  static void to_pairs(const std::byte* p, Codes* units) {
    units[0] = load_codes(p);
    units[1] = load_codes(p + 64);
  }
  template <int kColumn>
  static Rows column(const std::byte* p) {
    const Codes pair = load_codes(p + kColumn / 2 * 64);
    return kColumn % 2 == 0 ? low_bf16(pair) : high_bf16(pair);
  }
};

/// One column after the other.
template <>
struct Values<formats::f16> {
  static constexpr int kBytes = 64, kColumns = 2;
  static constexpr bool kNarrow = false;
  static constexpr float kFactor = 1.0f;
  template <int kColumn>
  static Rows column(const std::byte* p) {
    return load_f16(p + 32 * kColumn);
  }
};

/// The 16 scales of a block, but for a factor: scale_factor().
template <BlockScale kScale>
Rows block_scales(const std::byte* p) {
  if constexpr (kScale == BlockScale::one_f32) return rows(load_at<float>(p));
  if constexpr (kScale == BlockScale::bf16) return as_float(shift_left<16>(load_words_16(p)));
  if constexpr (kScale == BlockScale::ue4m3) return load_ue4m3(p);
  if constexpr (kScale == BlockScale::ue8m0)  // 2^-127, code 0, is subnormal in f32
    return as_float(max(shift_left<23>(load_bytes_16(p)), ints(0x00400000)));
  return load_rows(p);
}
constexpr float scale_factor(BlockScale scale) {
  return scale == BlockScale::ue4m3 ? kUe4m3Factor : 1.0f;
}

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
