#include <cblas.h>

#include <algorithm>
#include <cmath>

#include "quantize/gptq.h"
#include "quantize/grid.h"

namespace gatefold {
namespace {

/// Codes and scales in turns. `gradient_` is (W - Q) H, kept up to date with every change of Q.
class Refinement {
 public:
  Refinement(Grid& grid, const float* weights, const std::vector<float>& hessian, float* values)
      : grid_(grid), hessian_(hessian), values_(values), n_(grid.n()), k_(grid.k()) {
    std::vector<float> difference(static_cast<std::size_t>(n_ * k_));
    for (std::size_t i = 0; i < difference.size(); ++i) difference[i] = weights[i] - values[i];
    gradient_.resize(difference.size());
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(n_), static_cast<int>(k_),
                static_cast<int>(k_), 1.0f, difference.data(), static_cast<int>(k_), hessian.data(),
                static_cast<int>(k_), 0.0f, gradient_.data(), static_cast<int>(k_));
  }

  /// Each code to the best with all others fixed. How many changed.
  std::int64_t move_codes() {
    std::int64_t changed = 0;
    with_format(grid_.operand().value, [&]<Format F>() {
      for (std::int64_t row = 0; row < n_; ++row) {
        float* gradient = gradient_.data() + row * k_;
        float* values = values_ + row * k_;
        for (std::int64_t j = 0; j < k_; ++j) {
          const std::int64_t group = j / grid_.group_k();
          const float* line = hessian_.data() + j * k_;
          const float value =
              nearest<F>(values[j] + gradient[j] / line[j], grid_.scale(row, group), grid_.zero(row, group));
          const float change = value - values[j];
          if (change == 0) continue;
          values[j] = value;
          cblas_saxpy(static_cast<int>(k_), -change, line, 1, gradient, 1);
          ++changed;
        }
      }
    });
    return changed;
  }

  /// Each scale to the best with the codes and all other scales fixed, rounded to what can be stored; only if
  /// the error falls. Rows do not see each other, so that a group's bands move together.
  void move_scales() {
    for (std::int64_t group = 0; group < grid_.groups(); ++group) {
      const std::int64_t first = group * grid_.group_k(), count = std::min(grid_.group_k(), k_ - first);
      curved_.resize(static_cast<std::size_t>(n_ * count));  // Q[:, group] H[group, group]
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(n_), static_cast<int>(count),
                  static_cast<int>(count), 1.0f, values_ + first, static_cast<int>(k_),
                  hessian_.data() + first * k_ + first, static_cast<int>(k_), 0.0f, curved_.data(),
                  static_cast<int>(count));
      change_.assign(curved_.size(), 0.0f);
      bool moved = false;
      for (std::int64_t band = 0; band < grid_.bands(); ++band)
        moved |= move_scale(band, group, first, count);
      if (moved)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(n_), static_cast<int>(k_),
                    static_cast<int>(count), -1.0f, change_.data(), static_cast<int>(count),
                    hessian_.data() + first * k_, static_cast<int>(k_), 1.0f, gradient_.data(),
                    static_cast<int>(k_));
    }
  }

 private:
  /// Q' = (1 + d) Q in the group: the error changes by -2 d a + d^2 b, a = <gradient, Q>, b = <Q, Q H>.
  bool move_scale(std::int64_t band, std::int64_t group, std::int64_t first, std::int64_t count) {
    const std::int64_t begin = band * grid_.band_rows(), end = std::min(begin + grid_.band_rows(), n_);
    double a = 0, b = 0;
    for (std::int64_t row = begin; row < end; ++row)
      for (std::int64_t j = 0; j < count; ++j) {
        const double value = values_[row * k_ + first + j];
        a += value * gradient_[row * k_ + first + j];
        b += value * curved_[row * count + j];
      }
    if (!(b > 0)) return false;
    const float before = grid_.scale(begin, group);
    if (!grid_.set_scale(band, group, static_cast<float>(before * (1 + a / b)))) return false;
    const float scale = grid_.scale(begin, group);
    const double d = static_cast<double>(scale) / before - 1;
    if (-2 * d * a + d * d * b >= 0) {
      grid_.set_scale(band, group, before);
      return false;
    }
    for (std::int64_t row = begin; row < end; ++row)
      for (std::int64_t j = 0; j < count; ++j) {
        float& value = values_[row * k_ + first + j];
        const float moved = value / before * scale;
        change_[row * count + j] = moved - value;
        value = moved;
      }
    return true;
  }

  Grid& grid_;
  const std::vector<float>& hessian_;
  float* values_;
  const std::int64_t n_, k_;
  std::vector<float> gradient_, curved_, change_;
};

}  // namespace

void refine(Grid& grid, const float* weights, const std::vector<float>& hessian, int turns, float* values) {
  if (turns <= 0) return;
  Refinement refinement(grid, weights, hessian, values);
  for (int turn = 0; turn < turns; ++turn) {
    refinement.move_scales();
    for (int sweep = 0; sweep < 4; ++sweep)
      if (refinement.move_codes() == 0) break;
  }
}

}  // namespace gatefold
