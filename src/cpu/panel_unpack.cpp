#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/panel_unpack.h"
#include "format/matrix.h"

namespace gatefold {
namespace {

/// A row's 32-bit lane to four bytes of it in the canonical layout.
std::uint32_t unlane(Format format, std::uint32_t codes) {
  if (format == formats::int8) return codes ^ 0x01010101u * static_cast<unsigned>(panel_offset(format));
  if (format.bits != 4) return codes;
  const auto gather = [](std::uint32_t nibbles) {
    nibbles &= 0x0F0F0F0F;
    nibbles = (nibbles | nibbles >> 4) & 0x00FF00FF;
    return (nibbles | nibbles >> 8) & 0xFFFF;
  };
  const std::uint32_t word = gather(codes) | gather(codes >> 4) << 16;
  return format == formats::int4 ? word ^ 0x11111111u * static_cast<unsigned>(panel_offset(format)) : word;
}

/// Unpacks one panel.
class PanelUnpacker {
 public:
  PanelUnpacker(const PanelShape& shape, QuantizedMatrix& matrix)
      : matrix_(matrix),
        shape_(shape),
        w_(scheme(matrix.scheme).weight),
        layout_(matrix.layout()),
        row_(static_cast<std::size_t>(shape.padded_k() * w_.value.bits / 8)),
        scales_(static_cast<std::size_t>(layout_.scale_cols)) {}

  /// The first row that held NaN or Inf; n if there is none.
  std::int64_t unpack(std::int64_t first, const std::byte* panel) {
    const std::int64_t rows = std::min(kPanelRows, shape_.n - first);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t n = first + r;
      unpack_values(n, r, panel);
      if (!w_.quantized()) continue;
      float row_scale = 0;
      std::memcpy(&row_scale, panel + r * static_cast<std::int64_t>(sizeof(float)), sizeof(float));
      if (!std::isfinite(row_scale)) return n;
      const std::int64_t band_rows = w_.group.n == 0 ? shape_.n : w_.group.n;
      if (n % band_rows != 0) continue;
      if (w_.group.k == 0)
        scales_[0] = row_scale;
      else
        load_block_scales(r, panel);
      store_scales(matrix_, n / band_rows * layout_.scale_cols, scales_.data(), scales_.size());
      if (w_.zero_point.stored()) unpack_zero_points(n, r, panel);
    }
    return shape_.n;
  }

 private:
  const std::byte* record_part(const std::byte* panel, std::int64_t block, std::size_t at,
                               std::size_t bytes) const {
    return panel + shape_.record_at(block) + at + static_cast<std::size_t>(block % shape_.record) * bytes;
  }

  void unpack_values(std::int64_t n, std::int64_t r, const std::byte* panel) {
    std::byte* word = row_.data();
    for (std::int64_t b = 0; b < shape_.blocks; ++b) {
      const std::byte* line = record_part(panel, b, shape_.values_at, shape_.value_bytes);
      for (const std::byte* end = line + shape_.value_bytes; line < end; line += 64, word += 4) {
        if (w_.value == formats::f16) {
          std::memcpy(word, line + 2 * r, 2);
          std::memcpy(word + 2, line + 32 + 2 * r, 2);
        } else if (w_.value.bits == 8 && w_.value.kind == Kind::floating) {
          const std::byte* rows = line + r / 4 * 16 + r % 4 * 2;
          std::memcpy(word, rows, 2);
          std::memcpy(word + 2, rows + 8, 2);
        } else {
          std::uint32_t codes = 0;
          std::memcpy(&codes, line + 4 * r, 4);
          codes = unlane(w_.value, codes);
          std::memcpy(word, &codes, 4);
        }
      }
    }
    std::memcpy(matrix_.values.data() + n * layout_.row_bytes, row_.data(),
                static_cast<std::size_t>(layout_.row_bytes));
  }

  void load_block_scales(std::int64_t r, const std::byte* panel) {
    const Format format = w_.group.n > 1 || matrix_.scale_format != w_.scale ? formats::f32 : w_.scale;
    for (std::int64_t b = 0; b < shape_.blocks; ++b)
      load_scales(format, record_part(panel, b, 0, shape_.scale_bytes), r, 1,
                  &scales_[static_cast<std::size_t>(b)]);
  }

  void unpack_zero_points(std::int64_t n, std::int64_t r, const std::byte* panel) {
    zeros_.clear();
    for (std::int64_t b = 0; b < shape_.blocks; ++b)
      zeros_.push_back(static_cast<float>(
          panel_offset(formats::uint4) -
          static_cast<std::int32_t>(record_part(panel, b, shape_.zeros_at, kPanelRows)[r])));
    store_zeros(matrix_, n, zeros_.data(), zeros_.size());
  }

  QuantizedMatrix& matrix_;
  const PanelShape& shape_;
  const Operand& w_;
  const QuantizedLayout layout_;
  std::vector<std::byte> row_;  // padded
  std::vector<float> scales_, zeros_;
};

}  // namespace

Status unpack_panels(const std::byte* panels, const PanelShape& shape, std::size_t stride,
                     QuantizedMatrix& matrix) {
  const QuantizedLayout layout = matrix.layout();
  matrix.values.resize(layout.value_bytes);
  matrix.scales.resize(layout.scale_bytes);
  matrix.zero_points.resize(layout.zero_bytes);
  std::int64_t first_odd = matrix.n;
#pragma omp parallel reduction(min : first_odd)
  {
    PanelUnpacker unpacker(shape, matrix);
#pragma omp for schedule(static)
    for (std::int64_t panel = 0; panel < shape.panels; ++panel)
      first_odd = std::min(
          first_odd, unpacker.unpack(panel * kPanelRows, panels + static_cast<std::size_t>(panel) * stride));
  }
  if (first_odd == matrix.n) return {};
  return {Code::unsupported, fmt::format("row {} held NaN or Inf, and its scale is not kept", first_odd)};
}

}  // namespace gatefold
