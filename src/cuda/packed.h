#pragma once
/// \file
/// Weights as records of 16 rows x 128 columns, in the order in which a warp multiplies them: the layout that
/// all CUDA kernels read. A record is
///   values  16 or 64 bytes a lane of a warp, in lines of 512 bytes ([lane][16 bytes]);
///           8 bits: 16 rows of 128 bytes, whose 16 bytes i are at i ^ row % 8, as warpgroups multiply them
///           out of shared memory: 32 bytes of each lane of the row, one after the other
///   scales  [8 rows][groups][row, row + 8]; two f32 where a group has 8 rows or more (rows 0-7, rows 8-15)
///           folded: bytes [lanes][64 columns][row, row + 8]; lanes 2 i and 2 i + 1 share groups of 32
///   zeros   [8 rows][groups] bytes: row in the low nibble, row + 8 in the high one
/// in one piece, or the values of all records come first, and then the rest of all (PackedFormat::apart).
/// Lane 4 r + q holds rows r and r + 8, and of each of four blocks of columns 8 that are neighbours in memory
/// (PackedFormat::column): that is an A fragment of two m16n8k16 multiplies whose k indices are permuted, the
/// same for both operands. Where scales are folded, two blocks of a lane are neighbours, so that it has two
/// scales of a row.
///
/// A matrix [n, k] is [16] f32 a unit of 16 rows (a channel's, tensor's or second-level scale, the unit of
/// folded powers of two; NaN for rows that hold a NaN), where the format has such scales, and then its
/// records, [pair of units][column of records][unit of the pair]: a warp multiplies both units by the
/// activations that it has loaded. Two matrices that are multiplied by the same inputs, gate and up, share
/// units: rows 0-7 of one, rows 8-15 of the other. Rows and columns that the matrices lack are 0, and so are
/// groups whose scale is 0 or subnormal.
///
/// Folded ue8m0 scales, s = 2^c, are relative to the largest of their row, 2^top: a byte max(0, 254 + c -
/// top), the exponent of a bf16 factor, and the row's scale is 2^(top - bias), with the bias of the values'
/// format. What is decoded is then value * 2^(bias + c - top), exact in bf16 down to its smallest subnormal:
/// scales 2^-133 (e2m1) or 2^-131 (e4m3) of the row's largest. In f16 it is exact down to 2^-24 and 2^-22;
/// smaller products are rounded to multiples of 2^-24, and what lies 2^-30 below the largest scale or more is
/// 0.
///
/// Scales that a checkpoint has in f16 or f32 instead of bf16, and all of codes of 8 bits, are f32; or f16,
/// of int4 where groups have less than 128 columns: times a power of two, one for each row, by which the
/// largest of its row is within [2^14, 2^15). f16 scales are exact down to 2^-28 of that, f32 scales rounded.

#include <cstddef>
#include <cstdint>

#include "gatefold/codec.h"
#include "gatefold/scheme.h"

namespace gatefold::cuda {

inline constexpr int kPackedVersion = 8;
inline constexpr int kUnitRows = 16;
inline constexpr int kGroupUnits = 2;  ///< units whose records lie side by side
inline constexpr int kRecordColumns = 128;
inline constexpr int kLineBytes = 512;

/// How a weight operand is packed. Structural: a template argument.
struct PackedFormat {
  Format value;
  Format scale;         ///< of the groups in a record; none: one scale a row, or none at all
  int group = 128;      ///< columns of a group in a record
  bool banded = false;  ///< a group has 8 rows or more
  bool zeros = false;
  bool row_scale = false;
  /// Group scales are multiplied into the values, which is exact in 16 bits; else into the sums of groups.
  bool folded = false;
  /// Codes lie so that they become bytes in few instructions, with folded scales (decode_bytes.h).
  bool for_bytes = false;
  /// Codes of 8 bits lie in the order of their columns, so that they can be multiplied by rows of codes as
  /// these lie in memory (keeps_order). Kernels do not know: inputs have the order that fits (InputOrder).
  bool in_order = false;
  friend constexpr bool operator==(const PackedFormat&, const PackedFormat&) = default;

  constexpr int groups() const { return kRecordColumns / group; }
  /// Scales are f16, by a row's power of two.
  constexpr bool f16_scales() const { return scale.bits == 16 && scale.exponent_bits == 5; }
  constexpr int value_bytes() const { return kUnitRows * kRecordColumns * value.bits / 8; }
  constexpr int scale_bytes() const {
    return !scale.stored() ? 0 : banded ? 2 * 4 : kUnitRows * groups() * scale.bits / 8;
  }
  /// Scales, then zeros.
  constexpr int extra_bytes() const { return (scale_bytes() + (zeros ? 8 * groups() : 0) + 7) / 8 * 8; }
  /// Whether scales and zeros follow the values of all records: copies in bulk are fast where steps (the
  /// records of a pair of units) are multiples of 128 bytes.
  constexpr bool apart() const { return kGroupUnits * extra_bytes() % 128 != 0; }
  constexpr int record_bytes() const { return value_bytes() + (apart() ? 0 : extra_bytes()); }

  /// The first of the 8 columns that lanes 4 r + q hold of a block (of 4). Folded: of each 64 columns the 16
  /// from 16 q on, in two blocks that change places from q = 2 on.
  constexpr int column(int q, int block) const {
    if (in_order) return 32 * q + 8 * block;
    return folded ? block / 2 * 64 + 16 * q + 8 * (block % 2 ^ q / 2) : 32 * block + 8 * q;
  }
  /// The same, inverted: where column k is.
  constexpr int quarter_of(int k) const {
    return in_order ? k % kRecordColumns / 32 : folded ? k % 64 / 16 : k % 32 / 8;
  }
  constexpr int block_of(int k) const {
    return in_order ? k % 32 / 8 : folded ? k / 64 * 2 + (k % 16 / 8 ^ k % 64 / 32) : k / 32;
  }
  /// Where column k lies in the order of k indices that multiplies of 16 columns take: of a block's two, lane
  /// 4 r + q has pairs q and q + 4.
  constexpr int position(int k) const {
    const int in_block = k % 8 / 4 * 16 + k % 4 / 2 * 8 + quarter_of(k) * 2 + k % 2;
    return k / kRecordColumns * kRecordColumns + block_of(k % kRecordColumns) * 32 + in_block;
  }
};

/// Whether products of codes and scales fit 16 bits: significands of 2 bits by 4, or any by a power of two.
constexpr bool folds(const Operand& w) {
  if (w.group.n != 1 || (w.group.k != 16 && w.group.k != 32)) return false;
  return (w.value == formats::e2m1 && w.scale == formats::ue4m3) ||
         (w.value.is_float() && w.value.bits <= 8 && w.scale == formats::ue8m0);
}

/// Whether the records can hold an operand: groups have 128 columns, or a part or a multiple of that.
constexpr bool can_pack(const Operand& w) {
  if (!w.quantized() || w.group.k == 0) return true;
  const bool group = kRecordColumns % w.group.k == 0 || w.group.k % kRecordColumns == 0;
  return group && (w.group.n == 1 || (w.group.n % 8 == 0 && w.group.k % kRecordColumns == 0)) &&
         (w.group.k >= 32 || (w.group.k == 16 && folds(w)));
}

/// Whether scales are packed in bf16, and beside f16 activations wider, in f16 or f32. (Those of codes of 8
/// bits, of which they are a small part, are f32 in any case.)
constexpr bool may_be_wide(const Operand& w) {
  return w.group.k != 0 && w.group.n == 1 && w.scale.bits == 16 && w.value.bits == 4;
}

/// Whether codes of activations are e4m3 with f32 scales of rows, which can be multiplied as such.
constexpr bool are_e4m3_rows(const Operand& a) {
  return a.value == formats::e4m3 && a.scale == formats::f32 && a.group.k == 0;
}
/// Whether e2m1's codes and folded scales are multiplied in e4m3, by codes of activations.
constexpr bool folds_to_bytes(const Scheme& s) {
  return folds(s.weight) && s.weight.value == formats::e2m1 && s.weight.scale == formats::ue8m0 &&
         are_e4m3_rows(s.activation);
}

/// Whether warpgroups may multiply products of codes and group scales, rounded to 16 bits: what weights are
/// that have been dequantized. To bring the sums of many tokens from each group's scale to the next one's
/// takes layers 1.1 to 1.4 times as long where groups have 32 columns, and up to 1.08 times where they have
/// 128. (Of zero points a product is a multiply more: groups of 128 columns were left as they are.)
constexpr bool multiplies_products(const PackedFormat& p) {
  return p.value.is_integer() && p.value.bits == 4 && (!p.zeros || p.group < kRecordColumns);
}

/// `wide`: as weights lie beside f16 activations.
constexpr PackedFormat packed_format(const Scheme& s, bool wide = false) {
  const Operand& w = s.weight;
  PackedFormat p;
  p.value = w.value;
  if (!w.quantized()) return p;
  // Row scales also carry NaN: no code of a record has to.
  p.row_scale =
      w.group.k == 0 || w.tensor_scale.stored() || w.value == formats::e4m3 || w.value == formats::e5m2;
  if (w.group.k == 0) return p;
  p.group = w.group.k < kRecordColumns ? w.group.k : kRecordColumns;
  p.banded = w.group.n != 1;
  p.zeros = w.zero_point.stored();
  wide &= may_be_wide(w);
  const bool products = wide && multiplies_products(p) && p.group < kRecordColumns;
  const bool always_wide = w.scale.bits == 16 && w.value.bits == 8;
  p.scale = products ? formats::f16 : wide || always_wide || p.banded ? formats::f32 : w.scale;
  p.folded = folds(w);
  p.for_bytes = folds_to_bytes(s);
  p.row_scale |= p.folded || products;
  return p;
}

/// Beside such activations.
constexpr PackedFormat packed_format(const Scheme& s, const Operand& activation) {
  return packed_format(s, activation.value == formats::f16);
}

/// Whether rows of codes can be multiplied as they lie in memory, if the weights' columns keep their order.
constexpr bool keeps_order(const Scheme& s) {
  const auto whole = [](const Operand& o) { return o.group.k == 0 || o.group.k == kRecordColumns; };
  return s.weight.value.bits == 8 && s.weight.value == s.activation.value && whole(s.weight) &&
         s.activation.scale == formats::f32 && whole(s.activation);
}

/// Sizes of `matrices` (1 or 2) [n, k] matrices that share units.
struct PackedShape {
  PackedFormat format;
  int matrices = 1;
  std::int64_t n = 0, k = 0;
  std::int64_t units = 0, records = 0;  ///< units: whole pairs; records of a unit

  constexpr PackedShape(const PackedFormat& f, std::int64_t rows, std::int64_t columns, int count)
      : format(f),
        matrices(count),
        n(rows),
        k(columns),
        units((rows + kGroupUnits * kUnitRows / count - 1) / (kGroupUnits * kUnitRows / count) * kGroupUnits),
        records((columns + kRecordColumns - 1) / kRecordColumns) {}
  constexpr std::int64_t records_at() const {
    return format.row_scale ? units * kUnitRows * static_cast<std::int64_t>(sizeof(float)) : 0;
  }
  /// The place of a record among all.
  constexpr std::int64_t index(std::int64_t unit, std::int64_t record) const {
    return (unit / kGroupUnits * records + record) * kGroupUnits + unit % kGroupUnits;
  }
  constexpr std::int64_t record_at(std::int64_t unit, std::int64_t record) const {
    return records_at() + index(unit, record) * format.record_bytes();
  }
  constexpr std::int64_t extras_at() const { return records_at() + units * records * format.record_bytes(); }
  /// The scales and zeros of a record.
  constexpr std::int64_t extra_at(std::int64_t unit, std::int64_t record) const {
    return format.apart() ? extras_at() + index(unit, record) * format.extra_bytes()
                          : record_at(unit, record) + format.value_bytes();
  }
  constexpr std::int64_t bytes() const {
    const std::int64_t apart = format.apart() ? units * records * format.extra_bytes() : 0;
    return (extras_at() + apart + 127) / 128 * 128;
  }
};

/// Where bit b of code i lies in the 32-bit word that holds codes 0, 1, ... of one row, neighbours in k.
/// Codes 0, 2, ... are in the low half, 1, 3, ... in the high half, so that masks give pairs of 16-bit
/// numbers.
constexpr int code_bit(const PackedFormat& p, int i, int b) {
  const Format value = p.value;
  if (value.bits == 16) return 16 * i + b;
  if (value.bits == 8) return (2 * (i % 2) + i / 2) * 8 + b;
  if (value.is_integer()) return 16 * (i % 2) + 4 * (i / 2) + b;
  // Magnitudes in nibbles, codes 1 and 2 of each 4 in each other's place. Above the odd ones are signs of
  // codes 0 to 3, above the others of 4 to 7.
  if (p.for_bytes) {
    const int at = i / 4 * 4 + i % 2 * 2 + i / 2 % 2;
    return b < 3 ? 4 * at + b : at % 4 * 8 + (at < 4 ? 7 : 3);
  }
  // e2m1: the first pair is where bf16 has sign and fields, the second one 6 bits lower, the third one 6 bits
  // higher, in a word that is rotated: its signs come from the other half. Of the fourth one the lowest bit
  // is 4 bits too high, the others 4 too low.
  constexpr std::uint8_t at[4][4] = {{6, 7, 8, 15}, {0, 1, 2, 9}, {12, 13, 14, 5}, {10, 3, 4, 11}};
  const bool other_half = i / 2 == 2 && b == 3;
  return 16 * (i % 2 ^ (other_half ? 1 : 0)) + at[i / 2][b];
}

/// Which of 8 neighbouring columns is byte i of what a lane takes of them in a multiply of bytes.
/// Weights of 4 bits come from registers: bytes 0 to 3 are k indices 4 q .. of a block's 32, and 4 to 7
/// indices 16 + 4 q .. Those of 8 bits come from shared memory, and are k indices 32 q + 8 block .. of a
/// record.
constexpr int column_of_byte(const PackedFormat& p, int i) {
  if (p.in_order) return i;
  if (p.value.bits == 4 && !p.for_bytes) return i / 4 * 2 + i / 2 % 2 + i % 2 * 4;
  return i / 4 * 4 + i % 2 * 2 + i / 2 % 2;  // codes 0, 2, 1, 3
}
/// The same of all 8, in nibbles, the first one lowest.
constexpr std::uint32_t byte_order(const PackedFormat& p) {
  std::uint32_t order = 0;
  for (int i = 0; i < 8; ++i) order |= static_cast<std::uint32_t>(column_of_byte(p, i)) << (4 * i);
  return order;
}

/// What is added to signed codes of 4 bits, so that they count from 0.
constexpr std::uint32_t code_offset(Format value) {
  return value.kind == Kind::integer && value.bits == 4 ? 8 : 0;
}

/// Four bytes of a row in the canonical layout to a packed word.
GATEFOLD_HD constexpr std::uint32_t pack_word(const PackedFormat& p, std::uint32_t codes) {
  if (p.in_order) return codes;
  const int bits = p.value.bits;
  std::uint32_t word = 0;
  for (int i = 0; i < 32 / bits; ++i) {
    const std::uint32_t code = (codes >> (i * bits)) ^ code_offset(p.value);
    for (int b = 0; b < bits; ++b) word |= (code >> b & 1) << code_bit(p, i, b);
  }
  return word;
}

/// Where the word with codes of row r (of 16) from column k (of 128) on begins in a record. Bytes.
constexpr int word_at(const PackedFormat& p, int r, int k) {
  if (p.value.bits == 8) {
    const int at = p.quarter_of(k) * 32 + p.block_of(k) * 8 + k % 8;
    return r * kRecordColumns + (at / 16 ^ r % 8) * 16 + at % 16;
  }
  const int lane = r % 8 * 4 + p.quarter_of(k);
  const int per_row = p.value.bits / 4;  // words of 8 codes
  const int word = p.block_of(k) * 2 * per_row + r / 8 * per_row + k % 8 * p.value.bits / 32;
  return word / 4 * kLineBytes + lane * 16 + word % 4 * 4;
}

/// The row and the first column of word i of a record: the inverse.
struct WordPlace {
  int row, column;
};
GATEFOLD_HD constexpr WordPlace place_of_word(const PackedFormat& p, int i) {
  if (p.value.bits == 8) {
    const int row = i * 4 / kRecordColumns, at = (i / 4 % 8 ^ row % 8) * 16 + i % 4 * 4;
    return {row, p.column(at / 32, at % 32 / 8) + at % 8};
  }
  const int per_row = p.value.bits / 4;                     // words of 8 codes
  const int lane = i / 4 % 32, word = i / 128 * 4 + i % 4;  // word: of the lane
  return {lane / 4 + word / per_row % 2 * 8,
          p.column(lane % 4, word / (2 * per_row)) + word % per_row * 32 / p.value.bits};
}

/// Where the scale of row r and group g begins among the scales and zeros of a record. Bytes.
constexpr int scale_at(const PackedFormat& p, int r, int g) {
  if (p.banded) return r / 8 * 4;
  if (p.folded) {
    const int k = g * p.group, owner = (r % 8 * 4 + p.quarter_of(k)) / (p.group / 16);
    return (owner * 2 + k / 64) * 2 + r / 8;
  }
  return ((r % 8 * p.groups() + g) * 2 + r / 8) * p.scale.bits / 8;
}

/// The byte with the zero point of row r and group g; it is in the low nibble for rows 0-7.
constexpr int zero_at(const PackedFormat& p, int r, int g) {
  return p.scale_bytes() + r % 8 * p.groups() + g;
}

/// ue4m3 as packed: 5 bits of exponent and 3 of mantissa, without subnormals. 0 stays 0.
GATEFOLD_HD constexpr std::uint32_t repack_ue4m3(std::uint32_t code) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(decode<formats::ue4m3>(code));
  return (code & 0x7f) == 0 ? 0 : ((bits >> 20) - ((127 - 18) << 3)) & 0xff;
}
/// A row's power of two for scales in f16, of which this is the largest.
GATEFOLD_HD constexpr float unit_of_f16(float largest) {
  const int exponent = static_cast<int>(std::bit_cast<std::uint32_t>(largest) >> 23) - 127 - 14;
  return largest == 0 ? 1.0f : detail::power_of_two(exponent < -126 ? -126 : exponent);
}
/// A scale that is not 0 as packed in f16; `unit` is the row's. It is not 0 either: sums are divided by it.
GATEFOLD_HD constexpr std::uint32_t repack_f16(float scale, float unit) {
  const std::uint32_t code = encode<formats::f16>(scale / unit);
  return (code & 0x7fff) == 0 ? code | 1 : code;
}
/// ue8m0 as packed; `unit` is the row's scale.
GATEFOLD_HD constexpr std::uint32_t repack_ue8m0(Format value, std::uint32_t code, float unit) {
  // Every float's power is normal as a double.
  const int power = static_cast<int>(std::bit_cast<std::uint64_t>(static_cast<double>(unit)) >> 52) - 1023;
  const int exponent = static_cast<int>(code) + 127 - value.bias() - power;
  return exponent < 0 ? 0 : static_cast<std::uint32_t>(exponent);
}

}  // namespace gatefold::cuda
