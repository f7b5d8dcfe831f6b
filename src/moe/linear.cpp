#include "gatefold/linear.h"

#include <fmt/format.h>

#include <cstring>

#include "cpu/activation.h"
#include "cpu/gemm.h"
#include "format/code_rows.h"
#include "format/matrix.h"
#include "format/row_kernels.h"

namespace gatefold {
namespace {

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

Status invalid(std::string message) {
  return {Code::invalid_argument, std::move(message)};
}

/// Rows of f32, padded with zeros as Multiply wants them.
class PaddedRows {
 public:
  PaddedRows(std::int64_t rows, std::int64_t k)
      : k_(padded(k)), values_(static_cast<std::size_t>(rows * k_)) {
    for (std::int64_t r = 0; r < rows; ++r) rows_.push_back(values_.data() + r * k_);
  }
  float* row(std::int64_t r) { return values_.data() + r * k_; }
  const float* const* rows(std::int64_t first) const { return rows_.data() + first; }
  std::int64_t k() const { return k_; }

 private:
  std::int64_t k_;
  std::vector<float> values_;
  std::vector<const float*> rows_;
};

/// Memory that rounding one row of activations takes.
class Scratch {
 public:
  explicit Scratch(std::int64_t k)
      : codes_(2 * static_cast<std::size_t>(k)),
        ranges_(static_cast<std::size_t>(k)),
        scales_(ranges_.size()),
        zeros_(ranges_.size()) {}
  RowScratch row() { return {codes_.data(), ranges_.data(), scales_.data(), zeros_.data()}; }

 private:
  std::vector<std::byte> codes_;
  std::vector<GroupRange> ranges_;
  std::vector<float> scales_, zeros_;
};

float largest(const MatrixView& x) {
  std::vector<float> row(static_cast<std::size_t>(x.cols));
  float amax = 0;
  for (std::int64_t r = 0; r < x.rows; ++r) {
    row_kernels().widen(x.dtype, x.data, r * x.cols, x.cols, row.data());
    amax = std::max(amax, row_amax(row_kernels(), row.data(), x.cols));
  }
  return amax;
}

/// Rows [first, first + rows) of W as f32, `stride` apart.
void decode_rows(const QuantizedMatrix& w, const QuantizedLayout& layout, std::int64_t first,
                 std::int64_t rows, float* scales, float* zeros, float* out, std::int64_t stride) {
  const Operand& operand = scheme(w.scheme).weight;
  for (std::int64_t r = 0; r < rows; ++r) {
    row_scales(MatrixParts(w), layout, first + r, scales, zeros);
    row_kernels()[operand.value].decode(w.values.data() + (first + r) * layout.row_bytes, w.k,
                                        operand.group.k == 0 ? w.k : operand.group.k, scales, zeros,
                                        out + r * stride);
  }
}

void store(const MutableMatrixView& y, std::int64_t row, std::int64_t col, const float* values,
           std::int64_t count) {
  const Format format = y.dtype == DType::f32   ? formats::f32
                        : y.dtype == DType::f16 ? formats::f16
                                                : formats::bf16;
  const float one = 1.0f, zero = 0.0f;
  auto* out = static_cast<std::byte*>(y.data) + (row * y.cols + col) * (format.bits / 8);
  if (format == formats::f32)
    std::memcpy(out, values, static_cast<std::size_t>(count) * 4);
  else
    row_kernels()[format].encode(values, count, count, &one, &zero, out);
}

/// y's rows [first, last) = x w^T. Weights are decoded a band of rows at a time, by one thread each.
void multiply_rows(const PaddedRows& x, const QuantizedMatrix& w, const MutableMatrixView& y,
                   std::int64_t first, std::int64_t last) {
  constexpr std::int64_t kBand = 32;
  const QuantizedLayout layout = w.layout();
  const std::int64_t tokens = last - first, bands = (w.n + kBand - 1) / kBand;
  const Multiply product = multiply(best_isa());
#pragma omp parallel
  {
    const auto groups = static_cast<std::size_t>(std::max<std::int64_t>(1, layout.scale_cols));
    std::vector<float> scales(groups, 1.0f), zeros(groups, 0.0f);
    std::vector<float> decoded(static_cast<std::size_t>(kBand * x.k())),
        out(static_cast<std::size_t>(tokens * kBand));
#pragma omp for schedule(dynamic)
    for (std::int64_t band = 0; band < bands; ++band) {
      const std::int64_t begin = band * kBand, rows = std::min(kBand, w.n - begin);
      decode_rows(w, layout, begin, rows, scales.data(), zeros.data(), decoded.data(), x.k());
      product(x.rows(first), tokens, decoded.data(), rows, x.k(), out.data(), kBand);
      for (std::int64_t t = 0; t < tokens; ++t) store(y, first + t, begin, out.data() + t * kBand, rows);
    }
  }
}

Status check_weights(const QuantizedMatrix& w, std::int64_t k, const MutableMatrixView& y,
                     std::int64_t rows) {
  const QuantizedLayout layout = w.layout();
  if (w.values.size() != layout.value_bytes || w.scales.size() != layout.scale_bytes ||
      w.zero_points.size() != layout.zero_bytes)
    return invalid(
        fmt::format("weights [{}, {}] have {} + {} + {} bytes of values, scales and zero points, expected "
                    "{} + {} + {}",
                    w.n, w.k, w.values.size(), w.scales.size(), w.zero_points.size(), layout.value_bytes,
                    layout.scale_bytes, layout.zero_bytes));
  if (!w.input_order.empty()) return invalid("weights whose columns have an order are for MoePlan only");
  if (w.k != k) return invalid(fmt::format("x has {} columns, the weights are [{}, {}]", k, w.n, w.k));
  if (y.rows != rows || y.cols != w.n)
    return invalid(fmt::format("y is [{}, {}], expected [{}, {}]", y.rows, y.cols, rows, w.n));
  if (!is_float(y.dtype)) return invalid(fmt::format("y is {}, expected F32, F16 or BF16", name(y.dtype)));
  return {};
}

}  // namespace

Result<ActivationRow> activation_row(SchemeId id, std::int64_t k) {
  const Operand& operand = scheme(id).activation;
  if (!operand.quantized()) return invalid(fmt::format("{} leaves activations in 16 bit", scheme(id).name));
  if (k <= 0 || k >= (1 << 30) || (operand.value.bits == 4 && k % 2 != 0))
    return invalid(fmt::format("k = {} columns of {}", k, name(operand.value)));
  const std::int64_t groups = operand.group.k == 0 ? 1 : (k + operand.group.k - 1) / operand.group.k;
  return ActivationRow{k * operand.value.bits / 8, groups * operand.scale.bits / 8,
                       dtype_of_codes(operand.value), dtype_of_scales(operand.scale)};
}

Result<QuantizedActivation> quantize_activation(SchemeId id, const MatrixView& x) {
  if (!is_float(x.dtype)) return invalid(fmt::format("x is {}, expected F32, F16 or BF16", name(x.dtype)));
  const auto row_bytes = activation_row(id, x.cols);
  if (!row_bytes) return row_bytes.status();
  const Operand& operand = scheme(id).activation;
  QuantizedActivation out{.scheme = id, .rows = x.rows, .k = x.cols};
  out.values.resize(static_cast<std::size_t>(x.rows * row_bytes->value_bytes));
  out.scales.resize(static_cast<std::size_t>(x.rows * row_bytes->scale_bytes));
  if (operand.tensor_scale.stored()) out.token_scales.resize(static_cast<std::size_t>(x.rows));
  const TensorRange range{{}, operand.group == Granularity{0, 0} ? largest(x) : 0};
  const std::int64_t groups = row_bytes->scale_bytes / (operand.scale.bits / 8);
#pragma omp parallel
  {
    Scratch scratch(x.cols);
    const RowScratch s = scratch.row();
    std::vector<float> row(static_cast<std::size_t>(x.cols));
#pragma omp for
    for (std::int64_t r = 0; r < x.rows; ++r) {
      row_kernels().widen(x.dtype, x.data, r * x.cols, x.cols, row.data());
      TensorScale two_level;
      if (operand.tensor_scale.stored()) {
        two_level.value = tensor_scale(operand, row_amax(row_kernels(), row.data(), x.cols));
        out.token_scales[static_cast<std::size_t>(r)] = two_level.value;
      }
      code_activations(row_kernels(), operand, range, s, row.data(), x.cols);
      std::memcpy(out.values.data() + r * row_bytes->value_bytes, s.codes,
                  static_cast<std::size_t>(row_bytes->value_bytes));
      with_format(operand.scale, [&]<Format F>() {
        for (std::int64_t g = 0; g < groups; ++g) {
          const bool block = operand.tensor_scale.stored();  // scratch has it times the token's
          const std::uint32_t code =
              encode<F>(block ? group_scale(operand, s.ranges[g], two_level).scale : s.scales[g]);
          std::memcpy(out.scales.data() + r * row_bytes->scale_bytes + g * (F.bits / 8), &code, F.bits / 8);
        }
      });
    }
  }
  return out;
}

Status scaled_mm(const QuantizedActivation& x, const QuantizedMatrix& w, const MutableMatrixView& y) {
  const auto row_bytes = activation_row(x.scheme, x.k);
  if (!row_bytes) return row_bytes.status();
  if (x.scheme != w.scheme)
    return invalid(
        fmt::format("activations are of {}, weights of {}", scheme(x.scheme).name, scheme(w.scheme).name));
  const Operand& operand = scheme(x.scheme).activation;
  if (static_cast<std::int64_t>(x.values.size()) != x.rows * row_bytes->value_bytes ||
      static_cast<std::int64_t>(x.scales.size()) != x.rows * row_bytes->scale_bytes ||
      (operand.tensor_scale.stored() && static_cast<std::int64_t>(x.token_scales.size()) != x.rows))
    return invalid(
        fmt::format("activations [{}, {}] have {} + {} bytes and {} token scales, expected {} + {}", x.rows,
                    x.k, x.values.size(), x.scales.size(), x.token_scales.size(),
                    x.rows * row_bytes->value_bytes, x.rows * row_bytes->scale_bytes));
  if (Status status = check_weights(w, x.k, y, x.rows); !status.ok()) return status;

  PaddedRows rows(x.rows, x.k);
  const std::int64_t groups = row_bytes->scale_bytes / (operand.scale.bits / 8);
#pragma omp parallel
  {
    std::vector<float> scales(static_cast<std::size_t>(groups)), zeros(scales.size(), 0.0f);
#pragma omp for
    for (std::int64_t r = 0; r < x.rows; ++r) {
      load_scales(operand.scale, x.scales.data(), r * groups, groups, scales.data());
      if (operand.tensor_scale.stored())
        for (float& scale : scales) scale *= x.token_scales[static_cast<std::size_t>(r)];
      row_kernels()[operand.value].decode(x.values.data() + r * row_bytes->value_bytes, x.k,
                                          operand.group.k == 0 ? x.k : operand.group.k, scales.data(),
                                          zeros.data(), rows.row(r));
    }
  }
  multiply_rows(rows, w, y, 0, x.rows);
  return {};
}

Status grouped_gemm(const MatrixView& x, std::span<const std::int64_t> offsets,
                    std::span<const QuantizedMatrix* const> weights, const MutableMatrixView& y) {
  if (!is_float(x.dtype)) return invalid(fmt::format("x is {}, expected F32, F16 or BF16", name(x.dtype)));
  if (offsets.size() != weights.size() + 1 || offsets.front() != 0 || offsets.back() != x.rows)
    return invalid(fmt::format("{} offsets for {} groups, from {} to {}: expected {}, from 0 to {}",
                               offsets.size(), weights.size(), offsets.empty() ? 0 : offsets.front(),
                               offsets.empty() ? 0 : offsets.back(), weights.size() + 1, x.rows));
  for (std::size_t g = 0; g < weights.size(); ++g) {
    if (offsets[g + 1] < offsets[g])
      return invalid(fmt::format("offsets[{}] = {} is less than offsets[{}] = {}", g + 1, offsets[g + 1], g,
                                 offsets[g]));
    if (Status status = check_weights(*weights[g], x.cols, y, x.rows); !status.ok())
      return invalid(fmt::format("group {}: {}", g, status.message()));
  }
  PaddedRows rows(x.rows, x.cols);
  for (std::size_t g = 0; g < weights.size(); ++g) {
    const Operand& operand = scheme(weights[g]->scheme).activation;
    const std::int64_t first = offsets[g], last = offsets[g + 1];
    if (first == last) continue;
    const auto* data = static_cast<const std::byte*>(x.data) + first * x.cols * (bits(x.dtype) / 8);
    TensorRange range{{}, 0};
    if (operand.quantized() && operand.group == Granularity{0, 0})
      range.amax = largest({data, x.dtype, last - first, x.cols});
#pragma omp parallel
    {
      Scratch scratch(x.cols);
#pragma omp for
      for (std::int64_t r = first; r < last; ++r) {
        row_kernels().widen(x.dtype, x.data, r * x.cols, x.cols, rows.row(r));
        if (operand.quantized())
          round_activations(row_kernels(), operand, range, scratch.row(), rows.row(r), x.cols);
      }
    }
    multiply_rows(rows, *weights[g], y, first, last);
  }
  return {};
}

}  // namespace gatefold
