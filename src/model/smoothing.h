#pragma once
/// \file
/// Scales of input channels that make a product easier to quantize: W x = (W s) (x / s).

#include <cstdint>
#include <span>
#include <vector>

#include "gatefold/quantize.h"
#include "gatefold/scheme.h"

namespace gatefold {

/// Some inputs [rows, k] of a product.
struct Sample {
  std::vector<float> x;
  std::int64_t rows = 0, k = 0;
};

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

/// The static scale of an activation operand with the least squared error over a sample.
TensorScale search_static_scale(const Operand& operand, const Sample& sample);

}  // namespace gatefold
