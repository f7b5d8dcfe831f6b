#pragma once
/// \file
/// The numbers that a quantized matrix can hold: a scale and a zero point for every group of its weights.

#include <cstdint>
#include <vector>

#include "format/scale_rule.h"
#include "gatefold/quantize.h"

namespace gatefold {

/// Of an [n, k] matrix in a scheme that quantizes.
class Grid {
 public:
  /// The scales of round-to-nearest for `weights` [n, k] or, per group, those of smaller and larger ranges if
  /// the sum of importance[k] * error^2 is less. `tensor_amax`: as in QuantizeOptions.
  Grid(SchemeId id, std::int64_t n, std::int64_t k, const float* weights, const float* importance,
       float tensor_amax = 0);

  SchemeId id() const { return id_; }
  const Operand& operand() const { return operand_; }
  std::int64_t n() const { return n_; }
  std::int64_t k() const { return k_; }
  std::int64_t groups() const { return layout_.scale_cols; }  ///< along k
  std::int64_t bands() const { return layout_.scale_rows; }   ///< of rows that share scales
  std::int64_t group_k() const { return group_k_; }
  std::int64_t band_rows() const { return band_rows_; }

  float scale(std::int64_t row, std::int64_t group) const {
    return real_scale(scales_[row / band_rows_ * groups() + group].scale);
  }
  float zero(std::int64_t row, std::int64_t group) const {
    return scales_[row / band_rows_ * groups() + group].zero;
  }
  /// Rounds `real` to what can be stored and makes it the scale of a band's group. False: it stays as it was.
  bool set_scale(std::int64_t band, std::int64_t group, float real);

  /// `values` [n, k] lie on the grid.
  QuantizedMatrix encode(const float* values) const;

 private:
  float real_scale(float stored) const {
    return operand_.tensor_scale.stored() ? tensor_scale_.apply(stored) : stored;
  }
  void search(std::int64_t band, const float* weights, const float* importance);

  SchemeId id_;
  const Operand& operand_;
  std::int64_t n_, k_;
  QuantizedLayout layout_;
  std::int64_t group_k_, band_rows_;
  TensorScale tensor_scale_;
  std::vector<GroupScale> scales_;  // [bands, groups]
};

}  // namespace gatefold
