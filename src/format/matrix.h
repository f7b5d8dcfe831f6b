#pragma once
/// \file
/// Reading and writing the parts of a QuantizedMatrix.

#include <cstring>

#include "gatefold/codec.h"
#include "gatefold/quantize.h"

namespace gatefold {

/// A matrix of the scheme with zeroed parts of the right size.
inline QuantizedMatrix make_matrix(SchemeId id, std::int64_t n, std::int64_t k) {
  QuantizedMatrix matrix;
  matrix.scheme = id;
  matrix.n = n;
  matrix.k = k;
  matrix.scale_format = scheme(id).weight.scale;
  const QuantizedLayout layout = matrix.layout();
  matrix.values.resize(layout.value_bytes);
  matrix.scales.resize(layout.scale_bytes);
  matrix.zero_points.resize(layout.zero_bytes);
  return matrix;
}

/// Row j becomes what was row order[j]. Of schemes with scales of their own for each row.
inline void permute_rows(QuantizedMatrix& matrix, const std::vector<std::int32_t>& order) {
  const auto permute = [&](std::vector<std::byte>& part) {
    if (part.empty()) return;
    const std::size_t row = part.size() / order.size();
    const std::vector<std::byte> from = part;
    for (std::size_t j = 0; j < order.size(); ++j)
      std::memcpy(part.data() + j * row, from.data() + static_cast<std::size_t>(order[j]) * row, row);
  };
  permute(matrix.values);
  permute(matrix.scales);
  permute(matrix.zero_points);
}

inline void store_scales(QuantizedMatrix& matrix, std::int64_t at, const float* scales, std::size_t count) {
  with_format(matrix.scale_format, [&]<Format F>() {
    std::byte* out = matrix.scales.data() + at * (F.bits / 8);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t code = encode<F>(scales[i]);
      std::memcpy(out + i * (F.bits / 8), &code, F.bits / 8);
    }
  });
}

/// The zero points of one row of scales, for schemes that store them. They must be 0 so far.
inline void store_zeros(QuantizedMatrix& matrix, std::int64_t scale_row, const float* zeros,
                        std::size_t count) {
  const std::int64_t row_bytes = matrix.layout().zero_row_bytes;
  for (std::size_t g = 0; row_bytes != 0 && g < count; ++g) {
    const auto code = static_cast<std::byte>(zeros[g]);
    matrix.zero_points[static_cast<std::size_t>(scale_row * row_bytes) + g / 2] |=
        g % 2 == 0 ? code : code << 4;
  }
}

/// Scales `at` .. `at + count` as f32.
inline void load_scales(Format format, const std::byte* scales, std::int64_t at, std::int64_t count,
                        float* out) {
  with_format(format, [&]<Format F>() {
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t code = 0;
      std::memcpy(&code, scales + (at + i) * (F.bits / 8), F.bits / 8);
      out[i] = decode<F>(code);
    }
  });
}

inline std::vector<float> all_scales(const QuantizedMatrix& matrix) {
  const auto count = static_cast<std::int64_t>(matrix.scales.size()) / (matrix.scale_format.bits / 8);
  std::vector<float> scales(static_cast<std::size_t>(count));
  load_scales(matrix.scale_format, matrix.scales.data(), 0, count, scales.data());
  return scales;
}

/// Rounds the scales to another format, in which they are then stored.
inline void convert_scales(QuantizedMatrix& matrix, Format format) {
  const std::vector<float> scales = all_scales(matrix);
  matrix.scale_format = format;
  matrix.scales.resize(scales.size() * static_cast<std::size_t>(format.bits / 8));
  store_scales(matrix, 0, scales.data(), scales.size());
}

/// The scales and zero points of a matrix in the canonical layout.
struct MatrixParts {
  const Operand& operand;
  Format scale_format;
  TensorScale tensor_scale;
  const std::byte* scales;
  const std::byte* zero_points;

  MatrixParts(const Operand& o, Format format, TensorScale tensor, const std::byte* s, const std::byte* z)
      : operand(o), scale_format(format), tensor_scale(tensor), scales(s), zero_points(z) {}
  explicit MatrixParts(const QuantizedMatrix& m)
      : MatrixParts(scheme(m.scheme).weight, m.scale_format, m.tensor_scale, m.scales.data(),
                    m.zero_points.data()) {}
};

/// The real scale (block times matrix) and zero point of every group of row n: scale_cols of each. A plain
/// matrix has one group of scale 1. `zeros` is left alone where the scheme has none.
inline void row_scales(const MatrixParts& parts, const QuantizedLayout& layout, std::int64_t n, float* scales,
                       float* zeros) {
  if (!parts.operand.quantized()) {
    scales[0] = 1.0f;
    return;
  }
  const std::int64_t band = parts.operand.group.n == 0 ? 0 : n / parts.operand.group.n;
  load_scales(parts.scale_format, parts.scales, band * layout.scale_cols, layout.scale_cols, scales);
  if (parts.operand.tensor_scale.stored())
    for (std::int64_t g = 0; g < layout.scale_cols; ++g) scales[g] = parts.tensor_scale.apply(scales[g]);
  for (std::int64_t g = 0; layout.zero_bytes != 0 && g < layout.scale_cols; ++g) {
    const auto pair = static_cast<std::uint8_t>(parts.zero_points[band * layout.zero_row_bytes + g / 2]);
    zeros[g] = static_cast<float>(g % 2 == 0 ? pair & 15 : pair >> 4);
  }
}

}  // namespace gatefold
