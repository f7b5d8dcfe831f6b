#pragma once
/// \file
/// Scales of input channels that make a product easier to quantize: W x = (W s) (x / s).

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "gatefold/calibrate.h"
#include "gatefold/quantize.h"
#include "gatefold/scheme.h"

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

/// Rounds rows of activations to an operand, in place, as the reference does. Nothing to do for act16.
void round_activations(const Operand& operand, const TensorScale* static_scale, std::int64_t k,
                       std::vector<float>& x);

/// The scale s [k] among powers of the ratio of activations to weights, per channel
///   s = a^p / w^q,  p and q in [0, 1],
/// (awq: a and w are means of magnitudes; smoothquant: maxima, p + q = 1) under which the products of the
/// rounded sample with the rounded matrices, each [n, k], differ least from the exact ones, relative to each
/// input's; all 1 wins ties. `powers_of_two`: s is rounded to these.
std::vector<float> search_smoothing(SchemeId id, bool maxima, bool powers_of_two, const Sample& sample,
                                    std::span<const std::vector<float>> matrices);

/// The same, given a [k] and w [k], for anything that tells what a scale loses.
std::vector<float> least_smoothing(const std::vector<float>& a, const std::vector<float>& w, bool maxima,
                                   bool powers_of_two,
                                   const std::function<double(const std::vector<float>& s)>& loss);

/// The static scale of an activation operand for inputs x [rows, k].
TensorScale static_scale(ActivationScale rule, const Operand& operand, const std::vector<float>& x,
                         std::int64_t k);

}  // namespace gatefold
