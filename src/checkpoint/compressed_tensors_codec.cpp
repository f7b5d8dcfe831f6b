#include "checkpoint/compressed_tensors_codec.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/compressed_tensors.h"

namespace gatefold::compressed_tensors {
namespace {

/// Two's complement to offset binary and back: the sign bit of every code is flipped.
void flip_signs(Format value, std::vector<std::byte>& codes) {
  if (value.kind != Kind::integer) return;
  const std::byte signs = value.bits == 4 ? std::byte{0x88} : std::byte{0x80};
  for (std::byte& code : codes) code ^= signs;
}

/// Rows of `from` bytes to rows of `to` bytes, cut or filled with zeros.
std::vector<std::byte> resize_rows(std::vector<std::byte> data, std::int64_t from, std::int64_t to) {
  if (from == to) return data;
  const std::size_t rows = data.size() / static_cast<std::size_t>(from);
  std::vector<std::byte> out(rows * static_cast<std::size_t>(to));
  for (std::size_t row = 0; row < rows; ++row)
    std::memcpy(&out[row * static_cast<std::size_t>(to)], &data[row * static_cast<std::size_t>(from)],
                static_cast<std::size_t>(std::min(from, to)));
  return out;
}

/// A nibble of a row-major array of 4-bit codes.
std::uint32_t nibble(const std::byte* row, std::int64_t at) {
  return std::to_integer<std::uint32_t>(row[at / 2]) >> (at % 2 * 4) & 15;
}

/// Zero points: our rows of nibbles to words that run down the columns.
std::vector<std::byte> pack_zeros(const QuantizedMatrix& matrix, const QuantizedLayout& layout) {
  std::vector<std::uint32_t> packed(
      static_cast<std::size_t>(words(layout.scale_rows, 4) * layout.scale_cols));
  for (std::int64_t row = 0; row < layout.scale_rows; ++row)
    for (std::int64_t g = 0; g < layout.scale_cols; ++g)
      packed[static_cast<std::size_t>(row / 8 * layout.scale_cols + g)] |=
          nibble(matrix.zero_points.data() + row * layout.zero_row_bytes, g) << (row % 8 * 4);
  std::vector<std::byte> bytes(packed.size() * 4);
  std::memcpy(bytes.data(), packed.data(), bytes.size());
  return bytes;
}

template <class T>
std::vector<std::byte> bytes_of(std::initializer_list<T> values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.begin(), bytes.size());
  return bytes;
}

Status check_direction(const TensorScale& scale, bool divides, std::string_view what) {
  if (scale.divides == divides) return {};
  return {Code::unsupported, fmt::format("a {} that {} cannot be stored: its inverse is not exact", what,
                                         scale.divides ? "divides" : "multiplies")};
}

}  // namespace

Packing packing(const Scheme& scheme) {
  const Operand& weight = scheme.weight;
  if (weight.value.is_integer())
    return weight.value.bits == 8 && scheme.activation.value.is_integer() ? Packing::plain : Packing::words;
  return weight.value.bits == 4 ? Packing::bytes : Packing::plain;
}

std::int64_t words(std::int64_t count, int bits) {
  return (count * bits + 31) / 32;
}

DType dtype(Format format) {
  if (format == formats::bf16) return DType::bf16;
  if (format == formats::f16) return DType::f16;
  if (format == formats::f32) return DType::f32;
  if (format == formats::e5m2) return DType::f8_e5m2;
  if (format == formats::ue8m0) return DType::u8;
  return format.is_integer() ? DType::i8 : DType::f8_e4m3;
}

std::vector<std::int64_t> scale_shape(const QuantizedMatrix& matrix) {
  const QuantizedLayout layout = matrix.layout();
  if (scheme(matrix.scheme).weight.group == operands::per_tensor) return {1};
  return {layout.scale_rows, layout.scale_cols};
}

std::string_view input_suffix(const Operand& activation) {
  return activation.tensor_scale.stored() ? ".input_global_scale" : ".input_scale";
}

std::vector<StoredTensor> layout(const QuantizedMatrix& matrix) {
  const Scheme& row = scheme(matrix.scheme);
  const Operand& weight = row.weight;
  const std::int64_t n = matrix.n, k = matrix.k;
  const int bits = weight.value.bits;
  std::vector<StoredTensor> tensors;
  switch (packing(row)) {
    case Packing::plain:
      tensors.push_back({".weight", dtype(weight.value), {n, k}});
      break;
    case Packing::bytes:
      tensors.push_back({".weight_packed", DType::u8, {n, k * bits / 8}});
      break;
    case Packing::words:
      tensors.push_back({".weight_packed", DType::i32, {n, words(k, bits)}});
      tensors.push_back({".weight_shape", DType::i64, {2}});
      break;
  }
  if (!weight.quantized()) return tensors;
  const std::vector<std::int64_t> scales = scale_shape(matrix);
  tensors.push_back({".weight_scale", dtype(matrix.scale_format), scales});
  if (weight.zero_point.stored())
    tensors.push_back({".weight_zero_point", DType::i32, {words(scales[0], bits), scales[1]}});
  if (weight.tensor_scale.stored()) tensors.push_back({".weight_global_scale", DType::f32, {1}});
  if (matrix.input_scale) tensors.push_back({input_suffix(row.activation), DType::f32, {1}});
  return tensors;
}

Result<std::vector<std::vector<std::byte>>> store(QuantizedMatrix matrix) {
  const Scheme& row = scheme(matrix.scheme);
  const Operand& weight = row.weight;
  const QuantizedLayout layout = matrix.layout();
  std::vector<std::vector<std::byte>> data;
  if (packing(row) == Packing::words) {
    flip_signs(weight.value, matrix.values);
    data.push_back(
        resize_rows(std::move(matrix.values), layout.row_bytes, words(matrix.k, weight.value.bits) * 4));
    data.push_back(bytes_of({matrix.n, matrix.k}));
  } else {
    data.push_back(std::move(matrix.values));
  }
  if (!weight.quantized()) return data;
  data.push_back(std::move(matrix.scales));
  if (weight.zero_point.stored()) data.push_back(pack_zeros(matrix, layout));
  if (weight.tensor_scale.stored()) {
    if (Status status = check_direction(matrix.tensor_scale, true, "tensor scale"); !status.ok())
      return status;
    data.push_back(bytes_of({matrix.tensor_scale.value}));
  }
  if (matrix.input_scale) {
    const bool divides = row.activation.tensor_scale.stored();
    if (Status status = check_direction(*matrix.input_scale, divides, "input scale"); !status.ok())
      return status;
    data.push_back(bytes_of({matrix.input_scale->value}));
  }
  return data;
}

std::vector<std::byte> unpack_values(const QuantizedMatrix& matrix, Packing packing,
                                     std::span<const std::byte> stored) {
  std::vector<std::byte> values(stored.begin(), stored.end());
  if (packing != Packing::words) return values;
  const Format value = scheme(matrix.scheme).weight.value;
  values = resize_rows(std::move(values), words(matrix.k, value.bits) * 4, matrix.layout().row_bytes);
  flip_signs(value, values);
  return values;
}

std::vector<std::byte> unpack_zeros(const QuantizedMatrix& matrix, std::span<const std::byte> stored) {
  const QuantizedLayout layout = matrix.layout();
  std::vector<std::byte> zeros(layout.zero_bytes);
  for (std::int64_t row = 0; row < layout.scale_rows; ++row)
    for (std::int64_t g = 0; g < layout.scale_cols; ++g) {
      std::uint32_t word = 0;
      std::memcpy(&word, stored.data() + (row / 8 * layout.scale_cols + g) * 4, 4);
      zeros[static_cast<std::size_t>(row * layout.zero_row_bytes + g / 2)] |=
          static_cast<std::byte>((word >> (row % 8 * 4) & 15) << (g % 2 * 4));
    }
  return zeros;
}

}  // namespace gatefold::compressed_tensors
