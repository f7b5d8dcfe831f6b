#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "format/matrix.h"
#include "format/row_kernels.h"
#include "format/scale_rule.h"
#include "gatefold/quantize.h"

namespace gatefold {
namespace {

/// Quantizes one matrix, a band of group.n rows (the rows that share scales) at a time.
class RoundToNearest {
 public:
  RoundToNearest(const MatrixView& weights, const QuantizeOptions& options, QuantizedMatrix& out)
      : weights_(weights),
        options_(options),
        out_(out),
        operand_(scheme(out.scheme).weight),
        layout_(out.layout()),
        group_k_(operand_.group.k == 0 ? weights.cols : operand_.group.k),
        row_(static_cast<std::size_t>(weights.cols)),
        ranges_(std::max<std::size_t>(1, layout_.scale_cols)),  // plain formats: one group of scale 1
        groups_(ranges_.size()),
        scales_(ranges_.size(), 1.0f),
        zeros_(ranges_.size(), 0.0f) {}

  Status run() {
    if (!operand_.quantized()) return copy_values();
    if (operand_.tensor_scale.stored())
      if (Status status = set_tensor_scale(); !status.ok()) return status;
    const std::int64_t band = operand_.group.n == 0 ? weights_.rows : operand_.group.n;
    for (std::int64_t begin = 0; begin < weights_.rows; begin += band)
      if (Status status = quantize_band(begin, std::min(begin + band, weights_.rows), begin / band);
          !status.ok())
        return status;
    return {};
  }

 private:
  const float* row(std::int64_t n) {
    kernels_.widen(weights_.dtype, weights_.data, n * weights_.cols, weights_.cols, row_.data());
    return row_.data();
  }

  std::int64_t group_size(std::size_t g) const {
    return std::min(group_k_, weights_.cols - static_cast<std::int64_t>(g) * group_k_);
  }

  Status nonfinite(std::int64_t n) const {
    for (std::int64_t k = 0; k < weights_.cols; ++k)
      if (!std::isfinite(row_[k])) {
        const char* what = std::isnan(row_[k]) ? "NaN" : "Inf";
        return {Code::invalid_argument, fmt::format("{} at [{}, {}]", what, n, k)};
      }
    return {};
  }

  /// Ranges of the groups of one row; widens the ranges of earlier rows of the band.
  Status add_ranges(std::int64_t n) {
    const bool finite = kernels_.ranges(row(n), weights_.cols, group_k_, ranges_.data());
    return finite || options_.allow_nonfinite ? Status() : nonfinite(n);
  }

  Status copy_values() {
    for (std::int64_t n = 0; n < weights_.rows; ++n) {
      if (Status status = add_ranges(n); !status.ok()) return status;
      encode_row(n);
    }
    return {};
  }

  /// The matrix's own f32 scale. It is stored as a divisor, as compressed-tensors does; quantize with the
  /// factor, so that the codes are those of other libraries.
  Status set_tensor_scale() {
    GroupRange all;
    for (std::int64_t n = 0; n < weights_.rows; ++n)
      if (!kernels_.ranges(row(n), weights_.cols, weights_.cols, &all) && !options_.allow_nonfinite)
        return nonfinite(n);
    factor_ = {tensor_scale(operand_, std::max(all.amax(), options_.tensor_amax)), false};
    out_.tensor_scale = {1.0f / factor_.value, true};
    if (!std::isfinite(out_.tensor_scale.value)) {  // subnormal weights
      factor_.value = 1.0f;
      out_.tensor_scale.value = 1.0f;
    }
    return {};
  }

  /// Rows [begin, end) share the scales of scale row `band`.
  Status quantize_band(std::int64_t begin, std::int64_t end, std::int64_t band) {
    ranges_.assign(ranges_.size(), {});
    for (std::int64_t n = begin; n < end; ++n)
      if (Status status = add_ranges(n); !status.ok()) return status;
    group_scales(operand_, ranges_.data(), groups_.size(), factor_, groups_.data());
    if (options_.scale_search) search(begin, end);
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      scales_[g] = real_scale(groups_[g]);
      zeros_[g] = groups_[g].zero;
    }
    for (std::int64_t n = begin; n < end; ++n) {
      if (end - begin > 1) row(n);  // else it is still there
      encode_row(n);
    }
    store_scales(band);
    return {};
  }

  float real_scale(const GroupScale& group) const {
    return operand_.tensor_scale.stored() ? factor_.apply(group.scale) : group.scale;
  }

  void encode_row(std::int64_t n) {
    kernels_[operand_.value].encode(row_.data(), weights_.cols, group_k_, scales_.data(), zeros_.data(),
                                    out_.values.data() + n * layout_.row_bytes);
  }

  /// Replaces groups_ by those with the least squared error among scaled ranges.
  void search(std::int64_t begin, std::int64_t end) {
    std::vector<double> best(groups_.size(), std::numeric_limits<double>::infinity());
    std::vector<GroupScale> winners = groups_;
    for (int step = 0; step < search_steps; ++step) {  // the first wins ties
      const float factor = search_factor(step);
      std::vector<GroupScale> candidates(groups_.size());
      std::vector<double> errors(groups_.size(), 0.0);
      for (std::size_t g = 0; g < groups_.size(); ++g)
        candidates[g] = group_scale(operand_, {ranges_[g].low * factor, ranges_[g].high * factor}, factor_);
      for (std::int64_t n = begin; n < end; ++n) {
        const float* x = end - begin > 1 ? row(n) : row_.data();
        for (std::size_t g = 0; g < groups_.size(); ++g)
          errors[g] +=
              kernels_[operand_.value].error(x + static_cast<std::int64_t>(g) * group_k_, group_size(g),
                                             real_scale(candidates[g]), candidates[g].zero, nullptr);
      }
      for (std::size_t g = 0; g < groups_.size(); ++g)
        if (errors[g] < best[g]) {
          best[g] = errors[g];
          winners[g] = candidates[g];
        }
    }
    groups_ = std::move(winners);
  }

  void store_scales(std::int64_t band) {
    for (std::size_t g = 0; g < groups_.size(); ++g) scales_[g] = groups_[g].scale;
    gatefold::store_scales(out_, band * layout_.scale_cols, scales_.data(), scales_.size());
    store_zeros(out_, band, zeros_.data(), zeros_.size());
  }

  const RowKernels& kernels_ = row_kernels();
  const MatrixView& weights_;
  const QuantizeOptions& options_;
  QuantizedMatrix& out_;
  const Operand& operand_;
  const QuantizedLayout layout_;
  const std::int64_t group_k_;
  TensorScale factor_;
  std::vector<float> row_;
  std::vector<GroupRange> ranges_;
  std::vector<GroupScale> groups_;
  std::vector<float> scales_, zeros_;
};

}  // namespace

Result<QuantizedMatrix> quantize(SchemeId id, const MatrixView& weights, const QuantizeOptions& options) {
  if (weights.dtype != DType::f32 && weights.dtype != DType::f16 && weights.dtype != DType::bf16)
    return Status(Code::invalid_argument, fmt::format("cannot quantize {} weights", name(weights.dtype)));
  if (Status status = check_shape(id, weights.rows, weights.cols); !status.ok()) return status;
  QuantizedMatrix out = make_matrix(id, weights.rows, weights.cols);
  if (Status status = RoundToNearest(weights, options, out).run(); !status.ok()) return status;
  return out;
}

float largest_magnitude(const MatrixView& weights) {
  std::vector<float> row(static_cast<std::size_t>(weights.cols));
  GroupRange all;
  for (std::int64_t n = 0; n < weights.rows; ++n) {
    row_kernels().widen(weights.dtype, weights.data, n * weights.cols, weights.cols, row.data());
    row_kernels().ranges(row.data(), weights.cols, weights.cols, &all);
  }
  return all.amax();
}

void dequantize(const QuantizedMatrix& matrix, float* out) {
  dequantize_rows(matrix, 0, matrix.n, out);
}

void dequantize_rows(const QuantizedMatrix& matrix, std::int64_t first, std::int64_t count, float* out) {
  const Operand& operand = scheme(matrix.scheme).weight;
  const QuantizedLayout layout = matrix.layout();
  const RowKernels& kernels = row_kernels();
  std::vector<float> scales(std::max<std::size_t>(1, layout.scale_cols), 1.0f), zeros(scales.size(), 0.0f);
  for (std::int64_t n = first; n < first + count; ++n, out += matrix.k) {
    row_scales(MatrixParts(matrix), layout, n, scales.data(), zeros.data());
    kernels[operand.value].decode(matrix.values.data() + n * layout.row_bytes, matrix.k,
                                  operand.group.k == 0 ? matrix.k : operand.group.k, scales.data(),
                                  zeros.data(), out);
    if (matrix.input_order.empty()) continue;
    const std::vector<float> ordered(out, out + matrix.k);
    for (std::size_t j = 0; j < ordered.size(); ++j) out[matrix.input_order[j]] = ordered[j];
  }
}

}  // namespace gatefold
