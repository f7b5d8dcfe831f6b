#include "model/smoothing.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "format/scale_rule.h"
#include "moe/reference.h"

namespace gatefold {
namespace {

using Floats = std::vector<float>;

/// Per channel, of [rows, k]: the mean or the largest magnitude. Never 0.
Floats magnitudes(const float* x, std::int64_t rows, std::int64_t k, bool maxima) {
  std::vector<double> sums(static_cast<std::size_t>(k));
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t j = 0; j < k; ++j) {
      const double magnitude = std::fabs(x[row * k + j]);
      sums[j] = maxima ? std::max(sums[j], magnitude) : sums[j] + magnitude;
    }
  Floats out(sums.size());
  for (std::size_t j = 0; j < sums.size(); ++j)
    out[j] = static_cast<float>(std::max(maxima ? sums[j] : sums[j] / static_cast<double>(rows), 1e-6));
  return out;
}

/// y [rows, n] = x W^T
Floats product(const Sample& sample, const Floats& w) {
  const auto n = static_cast<std::int64_t>(w.size()) / sample.k;
  Floats y(static_cast<std::size_t>(sample.rows * n));
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(sample.rows), static_cast<int>(n),
              static_cast<int>(sample.k), 1.0f, sample.x.data(), static_cast<int>(sample.k), w.data(),
              static_cast<int>(sample.k), 0.0f, y.data(), static_cast<int>(n));
  return y;
}

/// [rows, k], each channel times or over its scale.
void scale_channels(Floats& x, const Floats& s, bool divide) {
  for (std::size_t i = 0; i < x.size(); i += s.size())
    for (std::size_t j = 0; j < s.size(); ++j) x[i + j] = divide ? x[i + j] / s[j] : x[i + j] * s[j];
}

/// A scale under which nothing up to `limit` is cut off.
TensorScale scale_up_to(const Operand& operand, float limit) {
  if (operand.tensor_scale.stored()) return {1.0f / tensor_scale(operand, limit), true};
  return {whole_scale(operand, limit), false};
}

/// The one with the least squared error.
TensorScale search_static_scale(const Operand& operand, const Sample& sample) {
  float amax = 0;
  for (const float x : sample.x) amax = std::max(amax, std::fabs(x));
  TensorScale best;
  double least = std::numeric_limits<double>::infinity();
  for (int step = 0; step <= 20; ++step) {
    const TensorScale scale = scale_up_to(operand, amax * (1.0f - 0.03f * static_cast<float>(step)));
    std::vector<double> rounded(sample.x.begin(), sample.x.end());
    reference_round(operand, &scale, sample.k, rounded);
    double error = 0;
    for (std::size_t i = 0; i < rounded.size(); ++i)
      error += (rounded[i] - sample.x[i]) * (rounded[i] - sample.x[i]);
    if (error < least) {
      least = error;
      best = scale;
    }
  }
  return best;
}

/// Of the magnitudes in some rows that are spread evenly.
float percentile(const Floats& x, std::int64_t k) {
  constexpr std::int64_t at_most = 2048;
  constexpr double cut_off = 1e-4;
  const auto rows = static_cast<std::int64_t>(x.size()) / k, taken = std::min(rows, at_most);
  if (taken == 0) return 0;
  Floats magnitudes(static_cast<std::size_t>(taken * k));
  for (std::int64_t i = 0; i < taken; ++i)
    std::transform(x.begin() + i * rows / taken * k, x.begin() + (i * rows / taken + 1) * k,
                   magnitudes.begin() + i * k, [](float v) { return std::fabs(v); });
  const auto above = static_cast<std::ptrdiff_t>(cut_off * static_cast<double>(magnitudes.size()));
  const auto limit = magnitudes.end() - 1 - above;
  std::nth_element(magnitudes.begin(), limit, magnitudes.end());
  return *limit;
}

}  // namespace

void round_activations(const Operand& operand, const TensorScale* static_scale, std::int64_t k, Floats& x) {
  if (!operand.quantized()) return;
  std::vector<double> values(x.begin(), x.end());
  reference_round(operand, static_scale, k, values);
  std::transform(values.begin(), values.end(), x.begin(), [](double v) { return static_cast<float>(v); });
}

std::vector<float> search_smoothing(SchemeId id, bool maxima, bool powers_of_two, const Sample& sample,
                                    std::span<const Floats> matrices) {
  const std::int64_t k = sample.k;
  Floats w(static_cast<std::size_t>(k), 0.0f);
  std::vector<Floats> wanted;
  for (const Floats& matrix : matrices) {
    const Floats of_matrix =
        magnitudes(matrix.data(), static_cast<std::int64_t>(matrix.size()) / k, k, maxima);
    for (std::int64_t j = 0; j < k; ++j)
      w[j] =
          maxima ? std::max(w[j], of_matrix[j]) : w[j] + of_matrix[j] / static_cast<float>(matrices.size());
    wanted.push_back(product(sample, matrix));
  }
  const Floats a = magnitudes(sample.x.data(), sample.rows, k, maxima);

  const auto loss = [&](const Floats& s) {
    Sample rounded = sample;
    scale_channels(rounded.x, s, true);
    round_activations(scheme(id).activation, nullptr, k, rounded.x);
    double sum = 0;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      Floats scaled = matrices[i];
      scale_channels(scaled, s, false);
      const auto n = static_cast<std::int64_t>(scaled.size()) / k;
      const auto quantized = quantize(id, {scaled.data(), DType::f32, n, k});
      if (!quantized) return std::numeric_limits<double>::infinity();
      dequantize(*quantized, scaled.data());
      const Floats y = product(rounded, scaled);
      for (std::int64_t row = 0; row < sample.rows; ++row) {
        double error = 0, whole = 1e-20;
        for (std::int64_t e = row * n; e < (row + 1) * n; ++e) {
          error += std::pow(static_cast<double>(y[e]) - wanted[i][e], 2);
          whole += std::pow(static_cast<double>(wanted[i][e]), 2);
        }
        sum += error / whole;
      }
    }
    return sum;
  };

  return least_smoothing(a, w, maxima, powers_of_two, loss);
}

TensorScale static_scale(ActivationScale rule, const Operand& operand, const Floats& x, std::int64_t k) {
  if (rule == ActivationScale::percentile) return scale_up_to(operand, percentile(x, k));
  return search_static_scale(operand, sample_of(x, k));
}

}  // namespace gatefold
