#include "quantize/gptq.h"

#include <cblas.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "quantize/grid.h"
#include "quantize/lapack.h"

namespace gatefold {
namespace {

constexpr std::int64_t block = 64;  // columns whose errors are passed on together

/// Columns in the order of falling importance.
std::vector<std::int64_t> column_order(const std::vector<float>& hessian, std::int64_t k) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(k));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return hessian[a * k + a] > hessian[b * k + b]; });
  return order;
}

/// The upper U with U^T U = H^-1, columns in `order`, row-major. From R R^T = H with an upper R: a Cholesky
/// factor from the last row to the first, and its inverse. False: not positive definite.
bool inverse_factor(const std::vector<float>& hessian, const std::vector<std::int64_t>& order,
                    std::vector<float>& factor) {
  const auto k = static_cast<std::int64_t>(order.size());
  std::vector<float> flipped(hessian.size());
  for (std::int64_t i = 0; i < k; ++i)
    for (std::int64_t j = 0; j <= i; ++j)
      flipped[i * k + j] = hessian[order[k - 1 - i] * k + order[k - 1 - j]];
  const auto size = static_cast<int>(k);
  int info = 0;
  spotrf_("U", &size, flipped.data(), &size, &info);  // LAPACK's upper is our lower
  if (info != 0) return false;
  strtri_("U", "N", &size, flipped.data(), &size, &info);
  if (info != 0) return false;
  factor.resize(hessian.size());
  for (std::int64_t i = 0; i < k; ++i)
    for (std::int64_t j = i; j < k; ++j) factor[i * k + j] = flipped[(k - 1 - i) * k + (k - 1 - j)];
  return true;
}

/// Rounds `weights` column by column, and passes the errors on.
void round_columns(const Grid& grid, const float* weights, const std::vector<std::int64_t>& order,
                   const std::vector<float>& factor, float* values) {
  const std::int64_t n = grid.n(), k = grid.k();
  std::vector<float> columns(
      static_cast<std::size_t>(n * k));  // [k in order, n]: what is still to be rounded
  for (std::int64_t row = 0; row < n; ++row)
    for (std::int64_t i = 0; i < k; ++i) columns[i * n + row] = weights[row * k + order[i]];
  std::vector<float> errors(static_cast<std::size_t>(block * n));
  with_format(grid.operand().value, [&]<Format F>() {
    for (std::int64_t begin = 0; begin < k; begin += block) {
      const std::int64_t end = std::min(begin + block, k);
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t column = order[i], group = column / grid.group_k();
        float* error = errors.data() + (i - begin) * n;
        for (std::int64_t row = 0; row < n; ++row) {
          const float wanted = columns[i * n + row];
          const float value = nearest<F>(wanted, grid.scale(row, group), grid.zero(row, group));
          values[row * k + column] = value;
          error[row] = (wanted - value) / factor[i * k + i];
        }
        if (i + 1 < end)
          cblas_sger(CblasRowMajor, static_cast<int>(end - i - 1), static_cast<int>(n), -1.0f,
                     factor.data() + i * k + i + 1, 1, error, 1, columns.data() + (i + 1) * n,
                     static_cast<int>(n));
      }
      if (end < k)
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, static_cast<int>(k - end), static_cast<int>(n),
                    static_cast<int>(end - begin), -1.0f, factor.data() + begin * k + end,
                    static_cast<int>(k), errors.data(), static_cast<int>(n), 1.0f, columns.data() + end * n,
                    static_cast<int>(n));
    }
  });
}

}  // namespace

Result<QuantizedMatrix> gptq(SchemeId id, std::int64_t n, std::int64_t k, const float* weights,
                             std::vector<float> hessian, const GptqOptions& options) {
  if (Status status = check_shape(id, n, k); !status.ok()) return status;
  if (!scheme(id).weight.quantized())
    return Status(Code::invalid_argument,
                  fmt::format("{} is not quantized: nothing to calibrate", scheme(id).name));
  double mean = 0;
  for (std::int64_t i = 0; i < k; ++i) mean += hessian[i * k + i];
  mean /= static_cast<double>(k);
  if (!(mean > 0)) mean = 1;  // no inputs at all: round to nearest

  const std::vector<std::int64_t> order = column_order(hessian, k);
  std::vector<float> factor;
  double damping = options.damping;
  for (bool done = false; !done; damping = std::max(10 * damping, 1e-6)) {
    for (std::int64_t i = 0; i < k; ++i) hessian[i * k + i] += static_cast<float>(damping * mean);
    done = inverse_factor(hessian, order, factor);
    if (!done && damping > 100)
      return Status(Code::invalid_argument,
                    fmt::format("the Hessian of {} inputs is not positive definite", k));
  }
  // What an error in a column costs when those after it are free to make up for it.
  std::vector<float> importance(static_cast<std::size_t>(k));
  for (std::int64_t i = 0; i < k; ++i)
    importance[static_cast<std::size_t>(order[i])] = 1.0f / (factor[i * k + i] * factor[i * k + i]);
  Grid grid(id, n, k, weights, importance.data(), options.tensor_amax);
  std::vector<float> values(static_cast<std::size_t>(n * k));
  round_columns(grid, weights, order, factor, values.data());
  refine(grid, weights, hessian, options.refinements, values.data());
  return grid.encode(values.data());
}

}  // namespace gatefold
