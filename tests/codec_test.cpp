#include "gatefold/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace gatefold {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Format find_format(const std::string& wanted) {
  for (const auto& entry : formats::all)
    if (entry.name == wanted) return entry.format;
  return formats::none;
}

// Every code, and every boundary between two codes, as ml_dtypes has them (golden/make_formats.py).
TEST(Codec, AgreesWithMlDtypes) {
  std::ifstream file(GATEFOLD_SOURCE_DIR "/tests/golden/formats.txt");
  std::string what, format_name;
  int lines = 0;
  for (std::uint32_t from = 0, to = 0; file >> what >> format_name >> std::hex >> from >> to; ++lines) {
    const Format format = find_format(format_name);
    ASSERT_TRUE(format.stored()) << format_name;
    with_format(format, [&]<Format F>() {
      if (what == "decode") {
        const float value = decode<F>(from);
        const float expected = std::bit_cast<float>(to);
        if (std::isnan(expected))
          EXPECT_TRUE(std::isnan(value)) << format_name << " code " << from;
        else
          EXPECT_EQ(std::bit_cast<std::uint32_t>(value), to) << format_name << " code " << from;
      } else {
        EXPECT_EQ(encode<F>(std::bit_cast<float>(from)), to)
            << format_name << " of " << std::bit_cast<float>(from);
      }
    });
  }
  EXPECT_GT(lines, 4000);
}

// encode(decode(code)) == code for all codes but NaNs, which become the canonical one.
TEST(Codec, RoundTripsEveryCode) {
  for (const auto& entry : formats::all) {
    const int bits = entry.format.kind == Kind::magnitude ? 7 : entry.format.bits;
    if (bits > 16) continue;
    with_format(entry.format, [&]<Format F>() {
      const std::uint32_t codes = 1u << bits;
      for (std::uint32_t code = 0; code < codes; ++code) {
        const float value = decode<F>(code);
        if (std::isnan(value)) {
          EXPECT_TRUE(std::isnan(decode<F>(encode<F>(value)))) << entry.name << " " << code;
        } else if (std::isinf(value) && F.bits == 8) {
          EXPECT_EQ(encode<F>(value), F.max_code() | (code & 0x80)) << entry.name << " " << code;
        } else {
          EXPECT_EQ(encode<F>(value), code) << entry.name << " " << code;
        }
      }
    });
  }
}

TEST(Codec, Specials) {
  using namespace formats;
  EXPECT_EQ(encode<e4m3>(kNan), 0x7Fu);
  EXPECT_EQ(encode<e4m3>(-kNan), 0x7Fu);
  EXPECT_EQ(encode<e5m2>(kNan), 0x7Fu);
  EXPECT_EQ(encode<e2m1>(kNan), 7u);
  EXPECT_EQ(encode<ue4m3>(kNan), 0x7Fu);
  EXPECT_EQ(encode<ue8m0>(kNan), 0xFFu);
  EXPECT_EQ(encode<int8>(kNan), 0u);
  EXPECT_EQ(encode<uint4>(kNan), 0u);
  EXPECT_EQ(encode<bf16>(kNan), 0x7FFFu);
  EXPECT_EQ(encode<f16>(-kNan), 0x7FFFu);

  EXPECT_EQ(encode<e4m3>(kInf), 0x7Eu);
  EXPECT_EQ(encode<e4m3>(-kInf), 0xFEu);
  EXPECT_EQ(encode<e5m2>(kInf), 0x7Bu);
  EXPECT_EQ(encode<e2m1>(-kInf), 0xFu);
  EXPECT_EQ(encode<ue8m0>(kInf), 0xFEu);
  EXPECT_EQ(encode<int4>(kInf), 7u);
  EXPECT_EQ(encode<int4>(-kInf), 8u);
  EXPECT_EQ(encode<uint4>(-kInf), 0u);
  EXPECT_EQ(encode<bf16>(kInf), 0x7F80u);
  EXPECT_EQ(encode<bf16>(3.4e38f), 0x7F80u);
  EXPECT_EQ(encode<f16>(65519.0f), 0x7BFFu);
  EXPECT_EQ(encode<f16>(65520.0f), 0x7C00u);

  EXPECT_EQ(encode<e4m3>(-0.0f), 0x80u);
  EXPECT_EQ(encode<e2m1>(-0.0f), 8u);
  EXPECT_EQ(encode<int8>(-0.0f), 0u);
  EXPECT_EQ(encode<ue4m3>(-0.0f), 0u);
  EXPECT_EQ(encode<ue4m3>(-3.0f), 0u);
  EXPECT_EQ(encode<ue8m0>(0.0f), 0u);
  EXPECT_EQ(encode<ue8m0>(-0.0f), 0u);
  EXPECT_EQ(encode<ue8m0>(-1.0f), 0xFFu);
  EXPECT_EQ(encode<ue8m0>(std::ldexp(1.0f, -149)), 0u);
  EXPECT_EQ(encode<ue8m0>(std::ldexp(1.5f, -127)), 1u);
  EXPECT_EQ(encode<ue8m0>(std::nextafter(std::ldexp(1.5f, -127), 0.0f)), 0u);
  EXPECT_TRUE(std::isnan(decode<ue8m0>(0xFF)));
  EXPECT_EQ(decode<ue8m0>(0), std::ldexp(1.0f, -127));
}

// int4 -3 and 5 in one byte; e4m3 1.5; the product under scales 1.75 and 0.5, in e4m3.
TEST(Codec, WorkedTrace) {
  using namespace formats;
  static_assert((encode<int4>(-3.0f) | encode<int4>(5.0f) << 4) == 0x5D);
  static_assert(encode<e4m3>(1.5f) == 0x3C && decode<e4m3>(0x3C) == 1.5f);
  constexpr float weight = decode<int4>(0x5D & 15) * 1.75f;
  constexpr float activation = decode<e4m3>(0x3C) * 0.5f;
  static_assert(weight * activation == -3.9375f);
  static_assert(encode<e4m3>(weight * activation) == 0xC8);
}

TEST(Codec, FormatProperties) {
  using namespace formats;
  EXPECT_EQ(e4m3.max(), 448);
  EXPECT_EQ(e5m2.max(), 57344);
  EXPECT_EQ(e2m1.max(), 6);
  EXPECT_EQ(ue4m3.max(), 448);
  EXPECT_EQ(int4.max(), 7);
  EXPECT_EQ(uint4.max(), 15);
  EXPECT_EQ(int8.max(), 127);
  EXPECT_EQ(f16.max(), 65504);
  EXPECT_EQ(e2m1.max_exponent(), 2);
  EXPECT_EQ(e4m3.max_exponent(), 8);
  EXPECT_EQ(e5m2.max_exponent(), 15);
}

TEST(Codec, FloorLog2) {
  for (int power = -149; power <= 127; ++power) {
    const float x = std::ldexp(1.0f, power);
    EXPECT_EQ(floor_log2(x), power);
    if (power > -149) {
      EXPECT_EQ(floor_log2(std::nextafter(x, 0.0f)), power - 1);
    }
  }
}

}  // namespace
}  // namespace gatefold
