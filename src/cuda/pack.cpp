#include "cuda/pack.h"

#include <cstring>
#include <numeric>
#include <vector>

namespace gatefold::cuda {
namespace {

std::size_t padded(std::size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

}  // namespace

PackParts::PackParts(const QuantizedMatrix& matrix, PackRows rows) {
  const QuantizedLayout layout = matrix.layout();
  const std::int64_t n = scheme(matrix.scheme).weight.group.n;
  const std::int64_t first_band = n == 0 ? 0 : rows.first / n, end_band = n == 0 ? 1 : (rows.end + n - 1) / n;
  const auto part = [](const std::vector<std::byte>& all, std::int64_t first, std::int64_t end,
                       std::int64_t row_bytes) {
    return all.empty() ? std::span<const std::byte>()
                       : std::span(all).subspan(static_cast<std::size_t>(first * row_bytes),
                                                static_cast<std::size_t>((end - first) * row_bytes));
  };
  parts[0] = part(matrix.values, rows.first, rows.end, layout.row_bytes);
  parts[1] = part(matrix.scales, first_band, end_band, layout.scale_cols * (matrix.scale_format.bits / 8));
  parts[2] = part(matrix.zero_points, first_band, end_band, layout.zero_row_bytes);
}

PackSource::PackSource(const QuantizedMatrix& matrix, PackRows rows, const std::byte* data)
    : values(data), scale_format(matrix.scale_format), group(scheme(matrix.scheme).weight.group) {
  const PackParts parts(matrix, rows);
  scales = values + padded(parts.parts[0].size());
  zeros = scales + padded(parts.parts[1].size());
  if (scheme(matrix.scheme).weight.tensor_scale.stored()) tensor_scale = matrix.tensor_scale.apply(1.0f);
  const QuantizedLayout layout = matrix.layout();
  row_bytes = layout.row_bytes;
  scale_cols = layout.scale_cols;
  zero_row_bytes = layout.zero_row_bytes;
}

std::size_t PackSource::bytes(const QuantizedMatrix& matrix, PackRows rows) {
  std::size_t bytes = 0;
  for (const auto& part : PackParts(matrix, rows).parts) bytes += padded(part.size());
  return bytes;
}

void stage(std::span<const QuantizedMatrix> matrices, PackRows rows, std::byte* data) {
  struct Piece {
    std::byte* to;
    std::span<const std::byte> from;
  };
  constexpr std::size_t most = 1 << 17;  // one core does not copy as fast as the bus
  std::vector<Piece> pieces;
  for (const QuantizedMatrix& matrix : matrices)
    for (const auto& part : PackParts(matrix, rows).parts) {
      for (std::size_t at = 0; at < part.size(); at += most)
        pieces.push_back({data + at, part.subspan(at, std::min(most, part.size() - at))});
      data += padded(part.size());
    }
#pragma omp parallel for schedule(dynamic) if (pieces.size() > 4)
  for (const Piece& piece : pieces) std::memcpy(piece.to, piece.from.data(), piece.from.size());
}

std::int64_t units_at_a_time(const PackedShape& shape, const QuantizedMatrix* matrices, std::size_t bytes) {
  std::size_t all = 0;
  std::int64_t band = 1;
  for (int i = 0; i < shape.matrices; ++i) {
    all += PackSource::bytes(matrices[i], {0, shape.n});
    band = std::max<std::int64_t>(band, scheme(matrices[i].scheme).weight.group.n);
  }
  const std::int64_t rows = kUnitRows / shape.matrices;  // of a unit
  const std::int64_t least = std::lcm(band, kGroupUnits * rows) / rows;
  const double share = static_cast<double>(bytes) / static_cast<double>(all);
  const auto fitting = static_cast<std::int64_t>(share * static_cast<double>(shape.n)) / rows;
  return bytes >= all ? shape.units : std::max(least, fitting / least * least);
}

void pack_on_host(const PackJob& job) {
  for (std::int64_t unit = job.first_unit; unit < job.end_unit; ++unit) {
    for (int r = 0; job.shape.format.row_scale && r < kUnitRows; ++r) {
      const PackRow at = row_of(job, unit, r);
      const float scale = row_scale(job.shape.format, at, range_of_share(job, at, 0, 1));
      std::memcpy(job.out + (unit * kUnitRows + r) * sizeof(float), &scale, sizeof(float));
    }
    for (std::int64_t record = 0; record < job.shape.records; ++record)
      pack_record(job, format_of_codes(job.shape.format), unit, record, 0, 1);
  }
}

}  // namespace gatefold::cuda
