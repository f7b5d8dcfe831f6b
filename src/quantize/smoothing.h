#pragma once
/// \file
/// Scales of input channels that make a product easier to quantize: W x = (W s) (x / s).

#include <cstdint>
#include <functional>
#include <vector>

namespace gatefold {

inline constexpr std::int64_t sample_rows = 512;

/// Some inputs [rows, k] of a product.
struct Sample {
  std::vector<float> x;
  std::int64_t rows = 0, k = 0;
};

/// About sample_rows of x [rows, k]: spread evenly, and those with the largest numbers, which a scale must
/// not cut off.
Sample sample_of(const std::vector<float>& x, std::int64_t k);

/// The scale s [k] that loses least among powers of the ratio of activations to weights, per channel
///   s = a^p / w^q,  p and q in [0, 1],
/// (awq: a and w are means of magnitudes; smoothquant: maxima, p + q = 1), with the geometric mean 1; all 1
/// wins ties. `powers_of_two`: s is rounded to these. a and w are positive.
std::vector<float> least_smoothing(const std::vector<float>& a, const std::vector<float>& w, bool maxima,
                                   bool powers_of_two,
                                   const std::function<double(const std::vector<float>& s)>& loss);

}  // namespace gatefold
