#include "checkpoint/integer_matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "format/matrix.h"

namespace gatefold {
namespace {

bool is_wide(Format format) {
  return format == formats::f32 || format == formats::bf16 || format == formats::f16;
}

bool holds(const Operand& row, const IntegerFormat& format, std::span<const std::int64_t> sizes) {
  if (row.value.kind != (format.symmetric ? Kind::integer : Kind::unsigned_integer)) return false;
  if (row.value.bits < format.bits || row.group.n != 1 || !is_wide(row.scale)) return false;
  if (row.group.k == 0) return format.group == 0;
  if (format.group % row.group.k != 0) return false;
  return std::all_of(sizes.begin(), sizes.end(), [&](std::int64_t k) { return k % row.group.k == 0; });
}

/// Fewer bits, then larger groups.
bool is_tighter(const Operand& a, const Operand& b) {
  if (a.value.bits != b.value.bits) return a.value.bits < b.value.bits;
  return a.group.k == 0 || (b.group.k != 0 && a.group.k > b.group.k);
}

/// The checkpoint's group of each of the row's.
Result<std::vector<std::int64_t>> source_groups(const QuantizedMatrix& matrix, std::int64_t row_groups,
                                                const IntegerSource& source) {
  std::vector<std::int64_t> groups(static_cast<std::size_t>(row_groups));
  const std::int64_t width = matrix.k / row_groups;
  const auto group_of = [&](std::int64_t column) -> std::int64_t {
    const std::int64_t input =
        matrix.input_order.empty() ? column : matrix.input_order[static_cast<std::size_t>(column)];
    if (!source.group_of.empty()) return source.group_of[static_cast<std::size_t>(input)];
    return source.format.group == 0 ? 0 : input / source.format.group;
  };
  for (std::int64_t g = 0; g < row_groups; ++g) {
    groups[static_cast<std::size_t>(g)] = group_of(g * width);
    for (std::int64_t j = g * width; j < (g + 1) * width; ++j)
      if (group_of(j) != group_of(g * width))
        return Status(Code::unsupported,
                      fmt::format("group {} does not have a multiple of {} columns, as {} needs it",
                                  group_of(g * width), width, scheme(matrix.scheme).name));
  }
  return groups;
}

void pack_row(const Operand& weight, const IntegerFormat& format, const std::uint8_t* codes, std::int64_t k,
              std::byte* out) {
  const auto middle = static_cast<std::uint8_t>(weight.zero_point.stored() ? 0 : format.middle());
  if (weight.value.bits == 8)
    for (std::int64_t i = 0; i < k; ++i) out[i] = static_cast<std::byte>(codes[i] - middle);
  else
    for (std::int64_t i = 0; i < k; ++i)
      out[i / 2] |= static_cast<std::byte>(((codes[i] - middle) & 15) << (i % 2 * 4));
}

}  // namespace

Result<SchemeId> integer_row(const IntegerFormat& format, const Operand& activation,
                             std::span<const std::int64_t> sizes) {
  const Scheme* best = nullptr;
  for (const Scheme& row : all_schemes())
    if (row.activation == activation && holds(row.weight, format, sizes) &&
        (best == nullptr || is_tighter(row.weight, best->weight)))
      best = &row;
  if (best != nullptr) return static_cast<SchemeId>(best - all_schemes().data());
  return Status(Code::unsupported,
                fmt::format("no scheme has {} weights of {} bits in groups of {}, with {} activations",
                            format.symmetric ? "symmetric integer" : "zero-point integer", format.bits,
                            format.group == 0 ? "a row" : std::to_string(format.group),
                            activation.quantized() ? describe(activation, false) : "16-bit"));
}

Result<std::vector<std::int32_t>> column_order(std::span<const std::int32_t> group_of, std::int64_t groups) {
  std::vector<std::int32_t> order(group_of.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (group_of[i] < 0 || group_of[i] >= groups)
      return Status(Code::bad_file,
                    fmt::format("column {} is in group {}, but there are {} groups", i, group_of[i], groups));
    order[i] = static_cast<std::int32_t>(i);
  }
  if (std::is_sorted(group_of.begin(), group_of.end())) return std::vector<std::int32_t>();
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return group_of[static_cast<std::size_t>(a)] < group_of[static_cast<std::size_t>(b)];
  });
  return order;
}

Result<QuantizedMatrix> integer_matrix(SchemeId row, std::int64_t n, std::int64_t k,
                                       const IntegerSource& source) {
  if (Status status = check_shape(row, n, k); !status.ok()) return Status(Code::bad_file, status.message());
  const Operand& weight = scheme(row).weight;
  QuantizedMatrix matrix = make_matrix(row, n, k);
  matrix.scale_format = source.scale_format;
  const QuantizedLayout layout = matrix.layout();
  matrix.scales.resize(layout.scale_bytes);
  const std::int64_t groups = source.format.groups(k);
  if (!source.group_of.empty()) {
    auto order = column_order(source.group_of, groups);
    if (!order) return order.status();
    matrix.input_order = std::move(*order);
  }
  const auto from = source_groups(matrix, layout.scale_cols, source);
  if (!from) return from.status();

  const std::int64_t scale_bytes = source.scale_format.bits / 8;
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t g = 0; g < layout.scale_cols; ++g) {
      const std::int64_t at = r * groups + (*from)[static_cast<std::size_t>(g)];
      std::memcpy(&matrix.scales[static_cast<std::size_t>((r * layout.scale_cols + g) * scale_bytes)],
                  &source.scales[static_cast<std::size_t>(at * scale_bytes)],
                  static_cast<std::size_t>(scale_bytes));
      if (weight.zero_point.stored())
        matrix.zero_points[static_cast<std::size_t>(r * layout.zero_row_bytes + g / 2)] |=
            static_cast<std::byte>(source.zeros[static_cast<std::size_t>(at)] << (g % 2 * 4));
    }

  constexpr std::int64_t kRows = 64;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(std::min(n, kRows) * k));
  std::vector<std::uint8_t> ordered(matrix.input_order.size());
  for (std::int64_t first = 0; first < n; first += kRows) {
    const std::int64_t count = std::min(kRows, n - first);
    source.rows(first, count, codes.data());
    for (std::int64_t r = 0; r < count; ++r) {
      const std::uint8_t* line = codes.data() + r * k;
      for (std::size_t j = 0; j < ordered.size(); ++j) ordered[j] = line[matrix.input_order[j]];
      pack_row(weight, source.format, ordered.empty() ? line : ordered.data(), k,
               matrix.values.data() + (first + r) * layout.row_bytes);
    }
  }
  return matrix;
}

}  // namespace gatefold
