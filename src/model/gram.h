#pragma once
/// \file
/// What calibration keeps of the inputs of a matrix.

#include <cblas.h>

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace gatefold {

/// The sum of importance * x x^T, [k, k].
class Gram {
 public:
  explicit Gram(std::int64_t k) : k_(k), sum_(static_cast<std::size_t>(k * k)) {}
  /// Overwrites x [rows, k].
  void add(float* x, const float* importance, std::int64_t rows) {
    for (std::int64_t row = 0; row < rows; ++row) {
      const float root = std::sqrt(importance[row]);
      for (std::int64_t j = 0; j < k_; ++j) x[row * k_ + j] *= root;
    }
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, static_cast<int>(k_), static_cast<int>(rows), 1.0f, x,
                static_cast<int>(k_), 1.0f, sum_.data(), static_cast<int>(k_));
  }
  std::vector<float> finish() && {
    for (std::int64_t i = 0; i < k_; ++i)
      for (std::int64_t j = 0; j < i; ++j) sum_[j * k_ + i] = sum_[i * k_ + j];
    return std::move(sum_);
  }

 private:
  std::int64_t k_;
  std::vector<float> sum_;
};

}  // namespace gatefold
