#include <fmt/format.h>

#include "gatefold/quantize.h"

namespace gatefold {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
std::int64_t groups(std::int64_t extent, std::int64_t group) {
  return group == 0 ? 1 : ceil_div(extent, group);
}

/// The first row of the table that differs only in its weight group and takes k.
std::string fitting(const Scheme& wanted, std::int64_t k) {
  for (const Scheme& row : all_schemes()) {
    Operand weight = row.weight;
    weight.group = wanted.weight.group;
    const bool fits = row.weight.group.n != 1 || row.weight.group.k == 0 || k % row.weight.group.k == 0;
    if (weight == wanted.weight && row.activation == wanted.activation && fits)
      return fmt::format("; {} would fit", row.name);
  }
  for (const Scheme& row : all_schemes())
    if (row.weight.value.bits == 8 && row.weight.group.k == 0 && row.activation == wanted.activation)
      return fmt::format("; {} would fit", row.name);
  return {};
}

}  // namespace

QuantizedLayout quantized_layout(const Operand& operand, Format scale_format, std::int64_t n,
                                 std::int64_t k) {
  QuantizedLayout layout;
  layout.row_bytes = ceil_div(k * operand.value.bits, 8);
  layout.value_bytes = static_cast<std::size_t>(n * layout.row_bytes);
  if (!operand.quantized()) return layout;
  layout.scale_rows = groups(n, operand.group.n);
  layout.scale_cols = groups(k, operand.group.k);
  layout.scale_bytes =
      static_cast<std::size_t>(layout.scale_rows * layout.scale_cols * (scale_format.bits / 8));
  if (operand.zero_point.stored()) {
    layout.zero_row_bytes = ceil_div(layout.scale_cols * operand.zero_point.bits, 8);
    layout.zero_bytes = static_cast<std::size_t>(layout.scale_rows * layout.zero_row_bytes);
  }
  return layout;
}

double bits_per_weight(const Scheme& scheme, std::int64_t n, std::int64_t k) {
  const QuantizedLayout layout = quantized_layout(scheme.weight, scheme.weight.scale, n, k);
  return 8.0 * static_cast<double>(layout.total()) / (static_cast<double>(n) * static_cast<double>(k));
}

Status check_shape(SchemeId id, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t limit = std::int64_t{1} << 31;
  const Scheme& row = scheme(id);
  if (n <= 0 || k <= 0 || n >= limit || k >= limit)
    return {Code::invalid_argument, fmt::format("a matrix of {} x {} cannot be stored", n, k)};
  const Granularity group = row.weight.group;
  if (group.n == 1 && group.k != 0 && k % group.k != 0)
    return {Code::invalid_argument, fmt::format("k = {} is not a multiple of group {} of scheme {}{}", k,
                                                group.k, row.name, fitting(row, k))};
  if (row.weight.value.bits == 4 && k % 2 != 0)
    return {Code::invalid_argument,
            fmt::format("k = {} is odd: the 4-bit scheme {} stores pairs{}", k, row.name, fitting(row, k))};
  return {};
}

}  // namespace gatefold
