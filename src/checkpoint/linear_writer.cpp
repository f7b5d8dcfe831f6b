#include "checkpoint/linear_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "format/matrix.h"

namespace gatefold {
namespace {

constexpr const LinearWriter* writers[] = {&compressed_tensors_writer, &gptq_writer, &awq_writer,
                                           &modelopt_writer};

/// The scale that gives the same products with `numbers` in the other direction.
std::optional<TensorScale> turned(const TensorScale& scale, const std::vector<float>& numbers) {
  const float inverse = 1.0f / scale.value;
  for (const float candidate : {inverse, std::nextafter(inverse, 0.0f), std::nextafter(inverse, INFINITY)}) {
    const TensorScale other{candidate, !scale.divides};
    const auto same = [&](float x) { return other.apply(x) == scale.apply(x); };
    if (std::isfinite(candidate) && candidate > 0 && std::all_of(numbers.begin(), numbers.end(), same))
      return other;
  }
  return std::nullopt;
}

const char* direction(bool divides) {
  return divides ? "divides" : "multiplies";
}

}  // namespace

const LinearWriter* find_writer(std::string_view name) {
  for (const LinearWriter* writer : writers)
    if (writer->name == name) return writer;
  return nullptr;
}

std::string writer_names() {
  std::string names;
  for (const LinearWriter* writer : writers)
    names += fmt::format("{}{}", names.empty() ? "" : ", ", writer->name);
  return names;
}

Result<IntegerCodes> integer_codes(const QuantizedMatrix& matrix, std::string_view convention) {
  const Scheme& row = scheme(matrix.scheme);
  const Operand& weight = row.weight;
  if (!weight.value.is_integer() || weight.group.n != 1)
    return Status(Code::unsupported,
                  fmt::format("{} weights have no place in {}, which holds integers with a scale "
                              "for each row or group",
                              describe(weight, true), convention));
  if (row.quantizes_activations() || matrix.input_scale)
    return Status(Code::unsupported, fmt::format("{} cannot say that activations are {}", convention,
                                                 describe(row.activation, false)));
  const QuantizedLayout layout = matrix.layout();
  IntegerCodes out{.n = matrix.n, .k = matrix.k, .groups = layout.scale_cols, .bits = weight.value.bits};
  out.codes.resize(static_cast<std::size_t>(matrix.n * matrix.k));
  out.zeros.resize(static_cast<std::size_t>(matrix.n * out.groups));
  out.group_of.resize(static_cast<std::size_t>(matrix.k));
  const bool four = weight.value.bits == 4, symmetric = !weight.zero_point.stored();
  const std::uint8_t middle = symmetric ? 1u << (weight.value.bits - 1) : 0, mask = four ? 15 : 255;
  const auto nibble = [](const std::byte* row_of, std::int64_t i) {
    return std::to_integer<std::uint8_t>(row_of[i / 2]) >> (i % 2 * 4) & 15;
  };
  const std::int64_t group = weight.group.k == 0 ? matrix.k : weight.group.k;
  for (std::int64_t j = 0; j < matrix.k; ++j) {
    const std::int64_t input =
        matrix.input_order.empty() ? j : matrix.input_order[static_cast<std::size_t>(j)];
    out.group_of[static_cast<std::size_t>(input)] = static_cast<std::int32_t>(j / group);
    for (std::int64_t r = 0; r < matrix.n; ++r) {
      const std::byte* values = matrix.values.data() + r * layout.row_bytes;
      const int code = four ? nibble(values, j) : std::to_integer<int>(values[j]);
      out.codes[static_cast<std::size_t>(r * matrix.k + input)] =
          static_cast<std::uint8_t>((code + middle) & mask);
    }
  }
  for (std::int64_t r = 0; r < matrix.n; ++r)
    for (std::int64_t g = 0; g < out.groups; ++g)
      out.zeros[static_cast<std::size_t>(r * out.groups + g)] =
          symmetric
              ? middle
              : static_cast<std::uint8_t>(nibble(matrix.zero_points.data() + r * layout.zero_row_bytes, g));
  return out;
}

Result<std::vector<std::byte>> exact_scales(const QuantizedMatrix& matrix, Format format) {
  if (matrix.scale_format == format) return matrix.scales;
  const std::vector<float> scales = all_scales(matrix);
  QuantizedMatrix out;
  out.scale_format = matrix.scale_format;
  out.scales = matrix.scales;
  convert_scales(out, format);
  const std::vector<float> back = all_scales(out);
  for (std::size_t i = 0; i < scales.size(); ++i)
    if (back[i] != scales[i])
      return Status(Code::unsupported,
                    fmt::format("scale {} ({}) is not a number of {}: it would become {}", scales[i],
                                name(matrix.scale_format), name(format), back[i]));
  return std::move(out.scales);
}

Status turn_tensor_scale(QuantizedMatrix& matrix, bool divides) {
  if (!scheme(matrix.scheme).weight.tensor_scale.stored() || matrix.tensor_scale.divides == divides)
    return {};
  const auto other = turned(matrix.tensor_scale, all_scales(matrix));
  if (!other)
    return {Code::unsupported,
            fmt::format("its scale {} {}, and no number that {} gives the same weights",
                        matrix.tensor_scale.value, direction(!divides), direction(divides))};
  matrix.tensor_scale = *other;
  return {};
}

Status turn_input_scale(QuantizedMatrix& matrix, bool divides) {
  if (!matrix.input_scale || matrix.input_scale->divides == divides) return {};
  int exponent = 0;  // powers of two have exact inverses
  if (std::frexp(matrix.input_scale->value, &exponent) != 0.5f)
    return {Code::unsupported, fmt::format("its input scale {} {}, and its inverse is not exact",
                                           matrix.input_scale->value, direction(!divides))};
  matrix.input_scale = {1.0f / matrix.input_scale->value, divides};
  return {};
}

Status check_uniform(std::span<const WrittenLayer> layers, std::string_view convention) {
  for (const WrittenLayer& layer : layers)
    if (layer.scheme != layers.front().scheme)
      return {Code::unsupported,
              fmt::format("{} is {}, but {} is {}: {} is written with one scheme for all layers",
                          layers.front().module, scheme(layers.front().scheme).name, layer.module,
                          scheme(layer.scheme).name, convention)};
  return {};
}

}  // namespace gatefold
