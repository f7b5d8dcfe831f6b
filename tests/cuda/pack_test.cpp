// Packed weights and the functions that decode them, on the host.

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "cuda/decode_bytes.h"
#include "cuda/pack.h"
#include "format/matrix.h"
#include "moe/kernel.h"

namespace gatefold::cuda {
namespace {

/// Random codes, scales and zero points; no NaN.
QuantizedMatrix random_matrix(SchemeId id, Format scale_format, std::int64_t n, std::int64_t k) {
  static std::mt19937 random(1);
  QuantizedMatrix matrix = make_matrix(id, n, k);
  const Operand& w = scheme(id).weight;
  if (w.quantized()) matrix.scale_format = scale_format;
  matrix.scales.resize(matrix.layout().scale_bytes);
  with_format(w.value, [&]<Format F>() {
    for (std::size_t i = 0; i < matrix.values.size() * 8 / F.bits; ++i) {
      std::uint32_t code = 0;
      do code = static_cast<std::uint32_t>(random()) & (~0u >> (32 - F.bits));
      while (!std::isfinite(decode<F>(code)));
      if constexpr (F.bits == 4)
        matrix.values[i / 2] |= static_cast<std::byte>(code << (4 * (i % 2)));
      else
        std::memcpy(matrix.values.data() + i * (F.bits / 8), &code, F.bits / 8);
    }
  });
  std::vector<float> scales(matrix.scales.size() * 8 / std::max<int>(8, matrix.scale_format.bits));
  for (float& scale : scales)
    scale = std::ldexp(1.0f + static_cast<float>(random() % 8) / 8, -static_cast<int>(random() % 8));
  if (w.quantized()) store_scales(matrix, 0, scales.data(), scales.size());
  if (!matrix.scales.empty() && w.scale == formats::ue4m3) matrix.scales[0] = std::byte{0};
  for (std::byte& zero : matrix.zero_points) zero = static_cast<std::byte>(random());
  matrix.tensor_scale = {3.0f, true};
  return matrix;
}

struct Packed {
  PackedShape shape;
  std::vector<std::byte> bytes;
};
/// Piece by piece, of about so many bytes.
Packed pack(const std::vector<QuantizedMatrix>& matrices, bool wide, std::size_t bytes = 1 << 30,
            bool in_order = false) {
  const QuantizedMatrix& first = matrices[0];
  Packed packed{
      {packed_format(scheme(first.scheme), wide), first.n, first.k, static_cast<int>(matrices.size())}, {}};
  packed.shape.format.in_order = in_order;
  packed.bytes.resize(static_cast<std::size_t>(packed.shape.bytes()));
  PackJob job{.shape = packed.shape, .out = packed.bytes.data()};
  const std::int64_t units = units_at_a_time(packed.shape, matrices.data(), bytes);
  for (; job.first_unit < packed.shape.units; job.first_unit += units) {
    job.end_unit = std::min(job.first_unit + units, packed.shape.units);
    const PackRows rows = job.rows();
    std::size_t at = 0;
    for (const QuantizedMatrix& matrix : matrices) at += PackSource::bytes(matrix, rows);
    std::vector<std::byte> staged(at);
    stage(matrices, rows, staged.data());
    for (std::size_t i = matrices.size(); i-- > 0;) {
      at -= PackSource::bytes(matrices[i], rows);
      job.sources[i] = {matrices[i], rows, staged.data() + at};
    }
    pack_on_host(job);
  }
  return packed;
}

/// The values of 8 neighbours in k as the kernels decode them, scales applied.
template <PackedFormat P, Format M>
void read8(const Packed& packed, std::int64_t unit, int r, std::int64_t k, double* values) {
  const PackedShape& s = packed.shape;
  const std::byte* record = packed.bytes.data() + s.record_at(unit, k / kRecordColumns);
  const std::byte* extra = packed.bytes.data() + s.extra_at(unit, k / kRecordColumns);
  const int column = static_cast<int>(k % kRecordColumns), g = column / P.group;
  std::uint32_t words[4] = {};
  for (int i = 0; i < P.value.bits / 4; ++i)
    std::memcpy(&words[i], record + word_at(P, r, column + i * 32 / P.value.bits), 4);
  double scale = 1;
  Pair term = 0;
  if (P.row_scale) {
    float row = 0;
    std::memcpy(&row, packed.bytes.data() + (unit * kUnitRows + r) * 4, 4);
    scale *= row;
  }
  if (P.scale.stored()) {
    std::uint32_t code = 0;
    std::memcpy(&code, extra + scale_at(P, r, g), P.scale.bits / 8);
    if (P.folded)
      term = folded_term<P, M>(code);
    else
      scale *= scale_value(P.scale, code);
  }
  if (P.zeros)
    term = zero_term<P, M>(static_cast<std::uint32_t>(extra[zero_at(P, r, g)]) >> (r / 8 * 4) & 15);
  Pair pairs[4];
  decode8<P, M>(words, term, pairs);
  for (int i = 0; i < 8; ++i)
    values[i] = std::ldexp(decode<M>(pairs[i / 2] >> (16 * (i % 2)) & 0xffff), decoded_power<P, M>()) * scale;
}

double value_of(const QuantizedMatrix& m, std::int64_t n, std::int64_t k) {
  const Operand& w = scheme(m.scheme).weight;
  const QuantizedLayout layout = m.layout();
  std::uint32_t code = 0;
  if (w.value.bits == 4)
    code = static_cast<std::uint32_t>(m.values[n * layout.row_bytes + k / 2]) >> (k % 2 * 4) & 15;
  else
    std::memcpy(&code, m.values.data() + n * layout.row_bytes + k * w.value.bits / 8, w.value.bits / 8);
  double value = with_format(w.value, [&]<Format F>() { return decode<F>(code); });
  if (!w.quantized()) return value;
  const std::int64_t g = w.group.k == 0 ? 0 : k / w.group.k;
  std::vector<float> scales(layout.scale_cols), zeros(layout.scale_cols);
  MatrixParts parts(m);
  parts.tensor_scale = {};
  row_scales(parts, layout, n, scales.data(), zeros.data());
  if (w.zero_point.stored()) value -= zeros[g];
  value *= scales[g];
  return w.tensor_scale.stored() ? value * m.tensor_scale.apply(1.0f) : value;
}

template <PackedFormat P, Format M>
void expect_equal(const std::vector<QuantizedMatrix>& matrices, bool wide) {
  const Packed packed = pack(matrices, wide);
  const int count = static_cast<int>(matrices.size()), rows = kUnitRows / count;
  for (std::int64_t unit = 0; unit < packed.shape.units; ++unit)
    for (int r = 0; r < kUnitRows; ++r) {
      const QuantizedMatrix& m = matrices[r / rows];
      const std::int64_t n = unit * rows + r % rows;
      for (std::int64_t k = 0; n < m.n && k < m.k; k += 8) {
        double values[8];
        read8<P, M>(packed, unit, r, k, values);
        for (std::int64_t i = 0; i < 8 && k + i < m.k; ++i)
          ASSERT_EQ(values[i], value_of(m, n, k + i)) << n << " " << k + i;
      }
    }
}

template <class S, Format M, bool kWide>
void check_scheme() {
  constexpr PackedFormat p = packed_format(S::scheme, kWide);
  const Granularity group = S::scheme.weight.group;
  const std::int64_t step = group.n == 1 && group.k != 0 ? group.k : 2;
  const Format scale = kWide ? formats::f16 : S::scheme.weight.scale;
  for (const auto& [n, k] :
       {std::pair<std::int64_t, std::int64_t>{48, 256}, {37, 202}, {5, 30}, {150, 384}}) {
    const std::int64_t columns = (k + step - 1) / step * step;
    const auto matrix = [&] { return random_matrix(S::id, scale, n, columns); };
    SCOPED_TRACE(testing::Message() << S::scheme.name << " [" << n << ", " << columns << "]");
    expect_equal<p, M>({matrix()}, kWide);
    expect_equal<p, M>({matrix(), matrix()}, kWide);
  }
}

TEST(Pack, EverySchemeComesBack) {
  for_each_scheme([]<class S>() {
    check_scheme<S, S::scheme.weight.value == formats::f16 ? formats::f16 : formats::bf16, false>();
    check_scheme<S, S::scheme.weight.value == formats::bf16 ? formats::bf16 : formats::f16, false>();
    if constexpr (S::scheme.weight.scale == formats::bf16 && S::scheme.weight.group.k != 0)
      check_scheme<S, formats::bf16, true>();
  });
}

// Codes of 8 bits in the order of their columns: rows of 128 bytes, swizzled, and nothing else changes.
TEST(Pack, InOrder) {
  for (const SchemeId id : {SchemeId::fp8_block_afp8, SchemeId::int8_aint8}) {
    ASSERT_TRUE(keeps_order(scheme(id)));
    const QuantizedMatrix m = random_matrix(id, formats::f32, 37, 202);
    const Packed packed = pack({m}, false, 1 << 30, true), other = pack({m}, false);
    const PackedShape& s = packed.shape;
    ASSERT_EQ(packed.bytes.size(), other.bytes.size());
    EXPECT_TRUE(std::equal(other.bytes.begin(), other.bytes.begin() + s.records_at(), packed.bytes.begin()));
    for (std::int64_t row = 0; row < s.units * kUnitRows; ++row)
      for (std::int64_t k = 0; k < s.records * kRecordColumns; ++k) {
        const std::int64_t r = row % kUnitRows, column = k % kRecordColumns;
        const std::byte* record =
            packed.bytes.data() + s.record_at(row / kUnitRows, k / kRecordColumns) + r * kRecordColumns;
        const bool there = row < m.n && k < m.k;
        ASSERT_EQ(record[(column / 16 ^ r % 8) * 16 + column % 16],
                  there ? m.values[row * m.layout().row_bytes + k] : std::byte{0})
            << scheme(id).name << " " << row << " " << k;
        ASSERT_EQ(
            place_of_word(s.format, word_at(s.format, static_cast<int>(r), static_cast<int>(column)) / 4)
                .column,
            column / 4 * 4);
      }
  }
}

/// How far below the largest scale of a row products are exact: the power of two.
template <PackedFormat P, Format M>
constexpr int exact_depth() {
  if (takes_scales<P, M>()) return 254 - static_cast<int>(kLeastScale);
  const int smallest = 1 - P.value.bias() - P.value.mantissa_bits;  // power of the values' smallest step
  return smallest + P.value.bias() - (1 - M.bias() - M.mantissa_bits);
}
static_assert(exact_depth<packed_format(schemes::mxfp4::scheme), formats::bf16>() == 133);
static_assert(exact_depth<packed_format(schemes::mxfp4::scheme), formats::f16>() == 24);
static_assert(exact_depth<packed_format(schemes::mxfp4_afp8::scheme), formats::f16>() == 26);
static_assert(exact_depth<packed_format(schemes::mxfp8_amxfp8::scheme), formats::bf16>() == 131);
static_assert(exact_depth<packed_format(schemes::mxfp8_amxfp8::scheme), formats::f16>() == 22);

/// Every code beside every zero point or folded scale, with its sign.
template <PackedFormat P, Format M>
void check_codes(const char* name) {
  constexpr std::uint32_t codes = 1u << P.value.bits;
  constexpr bool power = P.folded && P.scale == formats::ue8m0;
  constexpr int least = takes_scales<P, M>() ? exact_depth<P, M>() : 30;
  for (std::uint32_t extra = 0; extra < (power ? 255u : P.folded ? 0x7fu : P.zeros ? 16u : 1u); ++extra) {
    if (P.folded && !power && extra == 0) continue;  // its codes are packed as 0
    Pair term = 0;
    double scale = 1, zero = 0;
    bool exact = true;
    if (power) {  // the row's largest is 2^127, repacked as 254
      const float unit = std::ldexp(1.0f, 127 - P.value.bias());
      ASSERT_EQ(repack_ue8m0(P.value, extra, unit), extra);
      term = folded_term<P, M>(extra);
      scale = std::ldexp(1.0, static_cast<int>(extra) - 254 + P.value.bias());
      exact = 254 - static_cast<int>(extra) <= exact_depth<P, M>();
    } else if (P.folded) {
      term = folded_term<P, M>(repack_ue4m3(extra));
      scale = decode<formats::ue4m3>(extra);
    }
    if (P.zeros) {
      term = zero_term<P, M>(extra);
      zero = extra;
    }
    for (std::uint32_t code = 0; code < codes; ++code)
      for (int at = 0; at < 8; ++at) {
        std::uint32_t canonical[2] = {}, words[2] = {};
        for (int i = 0; i < 8; ++i) {
          const std::uint32_t other = i == at ? code : code * 5 + 3;
          canonical[i * P.value.bits / 32] |= (other & (codes - 1)) << (i * P.value.bits % 32);
        }
        for (int w = 0; w < 2; ++w) words[w] = pack_word(P, canonical[w]);
        Pair pairs[4];
        decode8<P, M>(words, term, pairs);
        const double expected = (static_cast<double>(decode<P.value>(code)) - zero) * scale;
        if (!std::isfinite(expected)) continue;  // its row's scale is NaN
        const double decoded =
            std::ldexp(decode<M>(pairs[at / 2] >> (16 * (at % 2)) & 0xffff), decoded_power<P, M>());
        if constexpr (!rounds_products(P, M)) {
          decode8_small<P, M>(words, term, pairs);
          constexpr double scales = static_cast<double>(input_scale<P, M>()) * sum_scale<P, M>();
          ASSERT_EQ(decode<M>(pairs[at / 2] >> (16 * (at % 2)) & 0xffff) * scales, decoded)
              << name << " code " << code << " extra " << extra << " at " << at;
        }
        if (exact)
          ASSERT_EQ(decoded, expected) << name << " code " << code << " extra " << extra << " at " << at;
        else  // half of the smallest step; f16: or what the least scale makes of a code
          ASSERT_LE(std::abs(decoded - expected),
                    M == formats::bf16 ? 0x1p-134
                                       : std::max(0x1p-25, std::ldexp(P.value.max(), P.value.bias() - least)))
              << name << " code " << code << " extra " << extra;
        ASSERT_EQ(std::signbit(decoded), std::signbit(expected)) << name << " code " << code;
      }
  }
}

TEST(Decode, EveryCode) {
  for_each_scheme([]<class S>() {
    if constexpr (S::scheme.weight.value.bits < 16) {
      check_codes<packed_format(S::scheme), formats::bf16>(S::scheme.name.data());
      check_codes<packed_format(S::scheme), formats::f16>(S::scheme.name.data());
    }
  });
}

/// Every code beside every zero point and scales of any significand, as M has their products.
template <PackedFormat P, Format M>
void check_products(const char* name) {
  constexpr float unit = sum_scale<P, M>();
  constexpr std::uint32_t significands = 1u << M.mantissa_bits;
  constexpr bool bf16 = M == formats::bf16;
  for (std::uint32_t zero = 0; zero < (P.zeros ? 16u : 1u); ++zero)
    for (const int power : bf16 ? std::vector{-90, -7, 0, 20} : std::vector{10, 14})
      for (std::uint32_t significand = 0; significand < 2 * significands; ++significand) {  // and signs
        const std::uint32_t scale = significand / significands << 15 |
                                    static_cast<std::uint32_t>(M.bias() + power) << M.mantissa_bits |
                                    significand % significands;
        for (std::uint32_t code = 0; code < 16; ++code) {
          std::uint32_t canonical = 0;
          for (std::uint32_t i = 0; i < 8; ++i) canonical |= (code + i) % 16 << (4 * i);
          const std::uint32_t word = pack_word(P, canonical);
          Pair pairs[4];
          decode8_products<P, M>(&word, P.zeros ? zero_term<P, M>(zero) : 0, scale * 0x10001u, pairs);
          for (std::uint32_t i = 0; i < 8; ++i) {
            const float difference = decode<P.value>((code + i) % 16) - static_cast<float>(zero);
            constexpr float room = bf16 ? 1 : 0x1p10f;  // f16 does not hold all of it
            const float expected = decode<M>(encode<M>(difference * decode<M>(scale) / room)) * room;
            const std::uint32_t product = pairs[i / 2] >> (16 * (i % 2)) & 0xffff;
            ASSERT_EQ(decode<M>(product) * unit, expected)
                << name << " code " << (code + i) % 16 << " zero " << zero << " scale " << decode<M>(scale);
          }
        }
      }
}

TEST(Decode, ProductsAreRoundedOnce) {
  int in_bf16 = 0, in_f16 = 0;
  for_each_scheme([&]<class S>() {
    constexpr PackedFormat p = packed_format(S::scheme), wide = packed_format(S::scheme, true);
    if constexpr (rounds_products(p, formats::bf16)) {
      check_products<p, formats::bf16>(S::scheme.name.data());
      ++in_bf16;
    }
    if constexpr (rounds_products(wide, formats::f16)) {
      check_products<wide, formats::f16>(S::scheme.name.data());
      ++in_f16;
    }
  });
  EXPECT_GE(in_bf16, 5);
  EXPECT_GE(in_f16, 4);
}

/// Every code at every place, as a byte that is multiplied; beside a folded scale, as packed.
template <PackedFormat P, Format M>
void check_bytes(const char* name, std::uint32_t repacked = 0) {
  constexpr std::uint32_t codes = 1u << P.value.bits;
  const int below = 254 - static_cast<int>(repacked);  // the row's largest scale, powers of two
  const double scale = P.for_bytes ? std::ldexp(1.0, P.value.bias() - below) : 1;
  for (std::uint32_t code = 0; code < codes; ++code)
    for (int at = 0; at < 8; ++at) {
      std::uint32_t own[8], canonical[2] = {}, words[2] = {}, bytes[2] = {};
      for (int i = 0; i < 8; ++i) {
        own[i] = (i == at ? code : code * 5 + 3) & (codes - 1);
        canonical[i * P.value.bits / 32] |= own[i] << (i * P.value.bits % 32);
      }
      for (int w = 0; w < 2; ++w) words[w] = pack_word(P, canonical[w]);
      decode8_bytes<P, M>(words, byte_table(static_cast<int>(repacked)), bytes);
      std::uint32_t seen = 0;
      for (int i = 0; i < 8; ++i) {
        const auto column = byte_order(P) >> (4 * i) & 15;
        seen |= 1u << column;
        const double expected = decode<P.value>(own[column % 8]) * scale;
        const double decoded =
            std::ldexp(static_cast<double>(decode<M>(bytes[i / 4] >> (i % 4 * 8) & 0xff)), byte_power(P, M));
        if (std::isnan(expected))
          ASSERT_TRUE(std::isnan(decoded)) << name << " code " << own[column % 8];
        else if (P.for_bytes && below > 14)  // half of e4m3's smallest
          ASSERT_LE(std::abs(decoded - expected), std::ldexp(0x1p-10, byte_power(P, M))) << name << below;
        else
          ASSERT_EQ(decoded, expected) << name << " code " << own[column % 8] << " at " << column;
        ASSERT_EQ(std::signbit(decoded), std::signbit(expected)) << name << " code " << own[column % 8];
      }
      ASSERT_EQ(seen, 0xffu) << name;
    }
}

TEST(Decode, EveryCodeAsAByte) {
  for_each_scheme([]<class S>() {
    constexpr PackedFormat p = packed_format(S::scheme);
    if constexpr (fits_bytes(p, formats::int8)) check_bytes<p, formats::int8>(S::scheme.name.data());
    if constexpr (fits_bytes(p, formats::e4m3))
      for (std::uint32_t repacked = 0; repacked < (p.for_bytes ? 255u : 1u); ++repacked)
        check_bytes<p, formats::e4m3>(S::scheme.name.data(), repacked);
  });
}

TEST(Decode, HalvesOfF16AreExact) {
  for (std::uint32_t code = 0; code < 0x10000; ++code) {
    const float x = decode<formats::f16>(code);
    Pair high = 0, low = 0;
    split_f16(code | 0x3c000000u, high, low);
    const float sum = decode<formats::bf16>(high & 0xffff) + decode<formats::bf16>(low & 0xffff);
    if (std::isnan(x))
      EXPECT_TRUE(std::isnan(sum));
    else
      ASSERT_EQ(sum, x);
  }
}

template <class S, bool kWide>
void expect_nan_row() {
  constexpr PackedFormat p = packed_format(S::scheme, kWide);
  if (!p.row_scale) return;
  QuantizedMatrix matrix = random_matrix(S::id, kWide ? formats::f16 : S::scheme.weight.scale, 32, 128);
  if (p.value.bits == 8 && !p.value.is_integer())
    matrix.values[5 * 128 + 77] = std::byte{0x7f};
  else if (p.scale == formats::ue4m3)
    matrix.scales[5 * 8 + 3] = std::byte{0x7f};
  else if (p.scale == formats::ue8m0)
    matrix.scales[5 * 4 + 3] = std::byte{0xff};
  else
    store_scales(matrix, 5 * p.groups(), std::vector<float>{NAN}.data(), 1);
  const Packed packed = pack({matrix}, kWide);
  for (int r = 0; r < 32; ++r) {
    float scale = 0;
    std::memcpy(&scale, packed.bytes.data() + r * 4, 4);
    EXPECT_EQ(std::isnan(scale), r == 5) << S::scheme.name << " " << r;
  }
}

TEST(Pack, NanMakesItsRowNan) {
  for_each_scheme([]<class S>() {
    expect_nan_row<S, false>();
    if constexpr (may_be_wide(S::scheme.weight)) expect_nan_row<S, true>();
  });
}

/// Rows with largest scales from 2^-127 to 2^127, and scales as far below them as 16 bits hold.
template <class S, Format M>
void check_depths() {
  constexpr PackedFormat p = packed_format(S::scheme);
  QuantizedMatrix matrix = random_matrix(S::id, formats::ue8m0, 255, 2 * kRecordColumns);
  for (std::size_t i = 0; i < matrix.scales.size(); ++i) {
    const auto row = static_cast<int>(i / 8), below = static_cast<int>(i % 8) * exact_depth<p, M>() / 7;
    matrix.scales[i] = static_cast<std::byte>(std::max(0, row - below));
  }
  SCOPED_TRACE(S::scheme.name);
  expect_equal<p, M>({matrix}, false);
  expect_equal<p, M>({matrix, matrix}, false);
}

/// Rows with largest scales from f16's smallest to f32's largest, scales as far below them as f16 holds, and
/// farther, and both signs.
TEST(Pack, ScalesInF16) {
  QuantizedMatrix matrix = random_matrix(SchemeId::int4_g32, formats::f32, 250, 128);
  std::vector<float> scales;
  for (int row = 0; row < 250; ++row)
    for (const int below : {0, 1, 28, 60})
      scales.push_back(std::ldexp(below == 1 ? -1.5f : 1.25f, row - 124 - below));
  store_scales(matrix, 0, scales.data(), scales.size());
  const Packed packed = pack({matrix}, true);
  constexpr PackedFormat p = packed_format(schemes::int4_g32::scheme, true);
  for (int row = 0; row < 250; ++row)
    for (int g = 0; g < 4; ++g) {
      float unit = 0;
      std::memcpy(&unit, packed.bytes.data() + row * 4, 4);
      std::uint32_t code = 0;
      std::memcpy(
          &code,
          packed.bytes.data() + packed.shape.extra_at(row / kUnitRows, 0) + scale_at(p, row % kUnitRows, g),
          2);
      const float exact = scales[static_cast<std::size_t>(row * 4 + g)],
                  scale = decode<formats::f16>(code) * unit;
      if (std::abs(exact) < 0x1p-126f) continue;  // counts as 0
      EXPECT_NE(code & 0x7fff, 0u) << row << " " << g;
      EXPECT_LE(std::abs(scale - exact), g < 3 ? 0 : std::ldexp(1.25f, row - 124 - 36)) << row << " " << g;
    }
}

TEST(Pack, FoldedPowersOfEveryRow) {
  for_each_scheme([]<class S>() {
    if constexpr (S::scheme.weight.scale == formats::ue8m0) {
      check_depths<S, formats::bf16>();
      check_depths<S, formats::f16>();
    }
  });
}

// What lies beside the packed weights while they are packed.
TEST(Pack, InPiecesOfLimitedSize) {
  for (std::size_t id = 0; id < all_schemes().size(); ++id) {
    const Operand& w = all_schemes()[id].weight;
    const std::int64_t n = 700, k = 256;
    for (int count = 1; count <= 2; ++count) {
      std::vector<QuantizedMatrix> matrices;
      for (int i = 0; i < count; ++i)
        matrices.push_back(random_matrix(static_cast<SchemeId>(id), w.scale, n, k));
      const Packed whole = pack(matrices, false);
      const std::size_t all = PackSource::bytes(matrices[0], {0, n}) * count;
      // Pieces are of whole groups of rows, and of two units.
      const std::int64_t group = std::max<std::int64_t>(w.group.n, 2 * kUnitRows / count);
      const std::size_t least = all * group / n + 64;
      for (const std::size_t bytes : {std::size_t{1}, all / 5, all / 2}) {
        const std::int64_t units = units_at_a_time(whole.shape, matrices.data(), bytes);
        const PackRows rows = PackJob{.shape = whole.shape, .end_unit = units}.rows();
        std::size_t piece = 0;
        for (const QuantizedMatrix& m : matrices) piece += PackSource::bytes(m, rows);
        EXPECT_LE(piece, std::max(bytes, least)) << all_schemes()[id].name;
        EXPECT_LT(units, whole.shape.units);
        EXPECT_EQ(pack(matrices, false, bytes).bytes, whole.bytes) << all_schemes()[id].name << bytes;
      }
    }
  }
}

/// Those of groups of int4: in bf16, or beside f16 in what has more bits.
TEST(Pack, ScalesBesideActivations) {
  for (const KernelInfo& kernel : cuda_kernels()) {
    const Operand& w = scheme(kernel.scheme).weight;
    const bool groups = w.value.is_integer() && w.value.bits == 4 && w.group.k != 0;
    for (const Format stored : {formats::bf16, formats::f16, formats::f32})
      for (const Format type : {formats::bf16, formats::f16, formats::e4m3}) {
        const bool changes = groups && (stored == formats::bf16) == (type == formats::f16);
        const Format wanted = !changes ? stored : type == formats::f16 ? formats::f32 : formats::bf16;
        EXPECT_TRUE(kernel.layout->scale_format(kernel.scheme, stored, {.value = type}) == wanted)
            << kernel.name << ' ' << name(stored) << ' ' << name(type);
      }
  }
}

}  // namespace
}  // namespace gatefold::cuda
