#include "quantize/grid.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "format/matrix.h"
#include "format/row_kernels.h"

namespace gatefold {

Grid::Grid(SchemeId id, std::int64_t n, std::int64_t k, const float* weights, const float* importance,
           float tensor_amax)
    : id_(id),
      operand_(scheme(id).weight),
      n_(n),
      k_(k),
      layout_(quantized_layout(operand_, operand_.scale, n, k)),
      group_k_(operand_.group.k == 0 ? k : operand_.group.k),
      band_rows_(operand_.group.n == 0 ? n : operand_.group.n),
      scales_(static_cast<std::size_t>(layout_.scale_rows * layout_.scale_cols)) {
  if (operand_.tensor_scale.stored()) {
    GroupRange all;
    row_kernels().ranges(weights, n * k, n * k, &all);
    const float divisor = 1.0f / gatefold::tensor_scale(operand_, std::max(all.amax(), tensor_amax));
    tensor_scale_ = {std::isfinite(divisor) ? divisor : 1.0f, true};
  }
  for (std::int64_t band = 0; band < bands(); ++band) search(band, weights, importance);
}

void Grid::search(std::int64_t band, const float* weights, const float* importance) {
  const RowKernels& kernels = row_kernels();
  const std::int64_t begin = band * band_rows_, end = std::min(begin + band_rows_, n_);
  const auto count = static_cast<std::size_t>(groups());
  std::vector<GroupRange> ranges(count), tried(count);
  std::vector<GroupScale> candidates(count);
  std::vector<double> best(count, std::numeric_limits<double>::infinity()), errors(count);
  for (std::int64_t row = begin; row < end; ++row)
    kernels.ranges(weights + row * k_, k_, group_k_, ranges.data());
  for (int step = 0; step < search_steps; ++step) {  // the first wins ties
    const float factor = search_factor(step);
    for (std::size_t g = 0; g < count; ++g) tried[g] = {ranges[g].low * factor, ranges[g].high * factor};
    group_scales(operand_, tried.data(), count, tensor_scale_, candidates.data());
    std::fill(errors.begin(), errors.end(), 0.0);
    for (std::int64_t row = begin; row < end; ++row)
      for (std::size_t g = 0; g < count; ++g) {
        const std::int64_t first = static_cast<std::int64_t>(g) * group_k_;
        errors[g] += kernels[operand_.value].error(weights + row * k_ + first, std::min(group_k_, k_ - first),
                                                   real_scale(candidates[g].scale), candidates[g].zero,
                                                   importance + first);
      }
    for (std::size_t g = 0; g < count; ++g)
      if (errors[g] < best[g]) {
        best[g] = errors[g];
        scales_[static_cast<std::size_t>(band) * count + g] = candidates[g];
      }
  }
}

bool Grid::set_scale(std::int64_t band, std::int64_t group, float real) {
  if (!std::isfinite(real) || real <= 0) return false;
  float stored = real;
  if (operand_.tensor_scale.stored())
    stored = tensor_scale_.divides ? real * tensor_scale_.value : real / tensor_scale_.value;
  stored = round_to(operand_.scale, stored);
  GroupScale& scale = scales_[static_cast<std::size_t>(band * groups() + group)];
  if (!std::isfinite(stored) || stored <= 0 || stored == scale.scale) return false;
  scale.scale = stored;
  return true;
}

QuantizedMatrix Grid::encode(const float* values) const {
  QuantizedMatrix out = make_matrix(id_, n_, k_);
  out.tensor_scale = tensor_scale_;
  const auto count = static_cast<std::size_t>(groups());
  std::vector<float> stored(count), real(count), zeros(count);
  for (std::int64_t band = 0; band < bands(); ++band) {
    for (std::size_t g = 0; g < count; ++g) {
      const GroupScale& scale = scales_[static_cast<std::size_t>(band) * count + g];
      stored[g] = scale.scale;
      real[g] = real_scale(scale.scale);
      zeros[g] = scale.zero;
    }
    store_scales(out, band * layout_.scale_cols, stored.data(), count);
    store_zeros(out, band, zeros.data(), count);
    for (std::int64_t row = band * band_rows_; row < std::min((band + 1) * band_rows_, n_); ++row)
      row_kernels()[operand_.value].encode(values + row * k_, k_, group_k_, real.data(), zeros.data(),
                                           out.values.data() + row * layout_.row_bytes);
  }
  return out;
}

}  // namespace gatefold
