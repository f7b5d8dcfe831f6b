#pragma once
/// \file
/// Packing: matrices in the canonical layout (gatefold/quantize.h) to records (packed.h). The pieces run on
/// the host and on the device: pack_weights.cu has the kernel.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <span>

#include "cuda/packed.h"
#include "gatefold/quantize.h"

namespace gatefold::cuda {

/// Rows of a matrix: whole groups, unless they are the last.
struct PackRows {
  std::int64_t first = 0, end = 0;
};

/// Rows of a matrix in the canonical layout, in memory that the packing code can read.
struct PackSource {
  const std::byte* values = nullptr;
  const std::byte* scales = nullptr;
  const std::byte* zeros = nullptr;
  Format scale_format;
  Granularity group;
  std::int64_t row_bytes = 0, scale_cols = 0, zero_row_bytes = 0;
  float tensor_scale = 1.0f;

  PackSource() = default;
  /// The parts lie one after the other from `data` on, each at a multiple of 16 bytes.
  PackSource(const QuantizedMatrix& matrix, PackRows rows, const std::byte* data);
  static std::size_t bytes(const QuantizedMatrix& matrix, PackRows rows);
};
/// The parts of these rows, which PackSource expects one after the other: values, scales, zero points.
struct PackParts {
  std::span<const std::byte> parts[3];
  PackParts(const QuantizedMatrix& matrix, PackRows rows);
};
/// Copies the parts of each matrix to where PackSource expects them, with OpenMP's threads if they are large:
/// those of the next matrix begin PackSource::bytes after those of the one before.
void stage(std::span<const QuantizedMatrix> matrices, PackRows rows, std::byte* data);

/// Units [first_unit, end_unit) of a packed matrix, or of two, from the rows that they hold.
struct PackJob {
  PackedShape shape;
  std::int64_t first_unit = 0, end_unit = 0;
  PackSource sources[2];
  std::byte* out = nullptr;  ///< of unit 0

  constexpr PackRows rows() const {
    const std::int64_t each = kUnitRows / shape.matrices;
    return {first_unit * each, std::min(end_unit * each, shape.n)};
  }
};
/// The units that are packed at a time: all, if there is room for `bytes` of the rows of all matrices, else
/// as many whole groups of rows as there is room for (one at least).
std::int64_t units_at_a_time(const PackedShape& shape, const QuantizedMatrix* matrices, std::size_t bytes);

/// Row r of a unit: a source and its row; valid if the matrix has it.
struct PackRow {
  const PackSource& source;
  std::int64_t row;
  bool valid;
};
GATEFOLD_HD PackRow row_of(const PackJob& job, std::int64_t unit, int r) {
  const int rows = kUnitRows / job.shape.matrices;
  const std::int64_t row = unit * rows + r % rows;
  return {job.sources[r / rows], row - job.first_unit * rows, row < job.shape.n};
}

GATEFOLD_HD std::uint32_t load_bytes(const std::byte* from, std::int64_t count) {
  if (count >= 4 && reinterpret_cast<std::uintptr_t>(from) % 4 == 0)
    return *reinterpret_cast<const std::uint32_t*>(from);
  std::uint32_t word = 0;
  for (std::int64_t i = 0; i < 4 && i < count; ++i) word |= static_cast<std::uint32_t>(from[i]) << (8 * i);
  return word;
}

/// The code of the scale of (row, column k).
GATEFOLD_HD std::uint32_t scale_code(const PackSource& s, std::int64_t row, std::int64_t k) {
  const std::int64_t band = s.group.n == 0 ? 0 : row / s.group.n, col = s.group.k == 0 ? 0 : k / s.group.k;
  const int bytes = s.scale_format.bits / 8;
  return load_bytes(s.scales + (band * s.scale_cols + col) * bytes, bytes);
}
/// Of the formats that scales are stored in. (nvcc cannot compile with_format for the device.)
GATEFOLD_HD float scale_value(Format format, std::uint32_t code) {
  if (format.kind == Kind::exponent) return decode<formats::ue8m0>(code);
  if (format.kind == Kind::magnitude) return decode<formats::ue4m3>(code);
  if (format.bits == 32) return std::bit_cast<float>(code);
  return format.exponent_bits == 8 ? decode<formats::bf16>(code) : decode<formats::f16>(code);
}

/// Whether a group's scale counts as 0, and its codes with it: kernels divide by scales that belong to sums.
GATEFOLD_HD bool has_no_scale(const PackedFormat& p, const PackSource& source, std::int64_t row,
                              std::int64_t k) {
  if (!p.scale.stored()) return false;
  const std::uint32_t code = scale_code(source, row, k);
  if (p.folded) return p.scale.kind == Kind::magnitude && (code & 0x7f) == 0;
  const float scale = scale_value(source.scale_format, code);
  return scale < 0x1p-126f && scale > -0x1p-126f;
}

/// How codes lie in words: constants, where speed matters.
constexpr PackedFormat format_of_codes(const PackedFormat& p) {
  return {.value = p.value, .for_bytes = p.for_bytes};
}

/// Word `index` of a record's values: record bytes 4 * index and on. `codes`: format_of_codes.
GATEFOLD_HD std::uint32_t value_word(const PackJob& job, const PackedFormat& codes, std::int64_t unit,
                                     std::int64_t record, int index) {
  PackedFormat p = job.shape.format;
  p.value = codes.value;
  p.for_bytes = codes.for_bytes;
  const WordPlace place = place_of_word(p, index);
  const std::int64_t k = record * kRecordColumns + place.column;
  const PackRow at = row_of(job, unit, place.row);
  if (!at.valid || k >= job.shape.k) return pack_word(p, 0);
  if (has_no_scale(p, at.source, at.row, k)) return pack_word(p, 0);
  const std::int64_t byte = k * codes.value.bits / 8;
  return pack_word(
      p, load_bytes(at.source.values + at.row * at.source.row_bytes + byte, at.source.row_bytes - byte));
}

/// Scale of (row r, group g) of a record; the row's own is there already.
GATEFOLD_HD void pack_group(const PackJob& job, std::int64_t unit, std::int64_t record, int r, int g,
                            std::byte* extra) {
  const PackedFormat& p = job.shape.format;
  const PackRow at = row_of(job, unit, r);
  const std::int64_t k = record * kRecordColumns + g * p.group;
  if (!at.valid || k >= job.shape.k) return;
  std::uint32_t code = scale_code(at.source, at.row, k);
  const float own = p.row_scale ? reinterpret_cast<const float*>(job.out)[unit * kUnitRows + r] : 1;
  if (p.folded && p.scale.kind == Kind::magnitude)
    code = repack_ue4m3(code);
  else if (p.folded)
    code = repack_ue8m0(p.value, code, own);
  else if (p.f16_scales())
    code = has_no_scale(p, at.source, at.row, k) ? 0
                                                 : repack_f16(scale_value(at.source.scale_format, code), own);
  else if (p.scale != at.source.scale_format)
    code = std::bit_cast<std::uint32_t>(scale_value(at.source.scale_format, code));
  for (int i = 0; i < p.scale.bits / 8; ++i)
    extra[scale_at(p, r, g) + i] = static_cast<std::byte>(code >> (8 * i) & 0xff);
}
GATEFOLD_HD std::uint32_t zero_of(const PackJob& job, std::int64_t unit, std::int64_t record, int r, int g) {
  const PackRow at = row_of(job, unit, r);
  const std::int64_t k = record * kRecordColumns + g * job.shape.format.group;
  if (!at.valid || k >= job.shape.k || has_no_scale(job.shape.format, at.source, at.row, k)) return 0;
  const std::int64_t col = k / at.source.group.k;
  const auto pair = static_cast<std::uint32_t>(
      at.source.zeros[at.row / at.source.group.n * at.source.zero_row_bytes + col / 2]);
  return col % 2 == 0 ? pair & 15 : pair >> 4;
}

/// The values, scales and zero points of a record; `worker` of `workers` does its share. `out` is zeroed.
GATEFOLD_HD void pack_record(const PackJob& job, const PackedFormat& codes, std::int64_t unit,
                             std::int64_t record, int worker, int workers) {
  const PackedFormat& p = job.shape.format;
  std::byte* out = job.out + job.shape.record_at(unit, record);
  for (int i = worker; i < p.value_bytes() / 4; i += workers)
    reinterpret_cast<std::uint32_t*>(out)[i] = value_word(job, codes, unit, record, i);
  if (!p.scale.stored()) return;
  std::byte* extra = job.out + job.shape.extra_at(unit, record);
  const int step = p.banded ? 8 : 1;
  for (int i = worker * step; i < kUnitRows * p.groups(); i += workers * step)
    pack_group(job, unit, record, i % kUnitRows, i / kUnitRows, extra);
  for (int i = worker; p.zeros && i < 8 * p.groups(); i += workers) {
    const int r = i % 8, g = i / 8;
    extra[zero_at(p, r, g)] =
        static_cast<std::byte>(zero_of(job, unit, record, r, g) | zero_of(job, unit, record, r + 8, g) << 4);
  }
}

/// What a row's scale depends on.
struct RowRange {
  float largest = 0;   ///< scale of a group, its magnitude
  bool finite = true;  ///< no NaN (or Inf, in e5m2): one of them makes all the row's outputs NaN
};
/// Of a worker's share of a row.
GATEFOLD_HD RowRange range_of_share(const PackJob& job, const PackRow& at, int worker, int workers) {
  const Format value = job.shape.format.value;
  RowRange range;
  if (!at.valid) return range;
  for (std::int64_t col = worker; col < at.source.scale_cols; col += workers) {
    const float scale =
        scale_value(at.source.scale_format, scale_code(at.source, at.row, col * at.source.group.k));
    range.finite &= scale - scale == 0;
    if (scale > range.largest) range.largest = scale;
    if (-scale > range.largest) range.largest = -scale;
  }
  if (value.bits != 8 || !value.is_float()) return range;
  for (std::int64_t k = worker; k < job.shape.k; k += workers)
    range.finite &= (static_cast<std::uint32_t>(at.source.values[at.row * at.source.row_bytes + k]) & 0x7f) <=
                    value.max_code();
  return range;
}
GATEFOLD_HD float row_scale(const PackedFormat& p, const PackRow& at, const RowRange& range) {
  if (!at.valid) return 0;
  if (!range.finite) return std::bit_cast<float>(0x7fc00000u);
  if (p.folded && p.scale.kind == Kind::exponent)
    return range.largest * detail::power_of_two(-p.value.bias());
  if (p.f16_scales()) return unit_of_f16(range.largest);
  if (at.source.group.k != 0) return at.source.tensor_scale;
  return scale_value(at.source.scale_format, scale_code(at.source, at.row, 0));
}

/// `out` is zeroed.
cudaError_t launch_pack(const PackJob& job, cudaStream_t stream);
void pack_on_host(const PackJob& job);

}  // namespace gatefold::cuda
