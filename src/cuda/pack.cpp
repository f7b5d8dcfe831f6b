#include "cuda/pack.h"

#include <cstring>

namespace gatefold::cuda {
namespace {

std::size_t padded(std::size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

}  // namespace

PackSource::PackSource(const QuantizedMatrix& matrix, const std::byte* data)
    : values(data),
      scales(data + padded(matrix.values.size())),
      zeros(scales + padded(matrix.scales.size())),
      scale_format(matrix.scale_format),
      group(scheme(matrix.scheme).weight.group) {
  if (scheme(matrix.scheme).weight.tensor_scale.stored()) tensor_scale = matrix.tensor_scale.apply(1.0f);
  const QuantizedLayout layout = matrix.layout();
  row_bytes = layout.row_bytes;
  scale_cols = layout.scale_cols;
  zero_row_bytes = layout.zero_row_bytes;
}

std::size_t PackSource::bytes(const QuantizedMatrix& matrix) {
  return padded(matrix.values.size()) + padded(matrix.scales.size()) + padded(matrix.zero_points.size());
}

void stage(const QuantizedMatrix& matrix, std::byte* data) {
  for (const auto* part : {&matrix.values, &matrix.scales, &matrix.zero_points}) {
    std::memcpy(data, part->data(), part->size());
    data += padded(part->size());
  }
}

void pack_on_host(const PackJob& job) {
  std::memset(job.out, 0, static_cast<std::size_t>(job.shape.bytes()));
  for (std::int64_t unit = 0; unit < job.shape.units; ++unit) {
    for (int r = 0; job.shape.format.row_scale && r < kUnitRows; ++r) {
      const PackRow at = row_of(job, unit, r);
      const float scale = row_scale(at, at.valid && finite_share(job, at, 0, 1));
      std::memcpy(job.out + (unit * kUnitRows + r) * sizeof(float), &scale, sizeof(float));
    }
    for (std::int64_t record = 0; record < job.shape.records; ++record) pack_record(job, unit, record, 0, 1);
  }
}

}  // namespace gatefold::cuda
