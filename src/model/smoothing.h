#pragma once
/// \file
/// Activations while a layer is calibrated on the CPU: as a scheme rounds them, scales of their channels, and
/// static scales.

#include <cstdint>
#include <span>
#include <vector>

#include "gatefold/calibrate.h"
#include "gatefold/quantize.h"
#include "gatefold/scheme.h"
#include "quantize/smoothing.h"

namespace gatefold {

/// Rounds rows of activations to an operand, in place, as the reference does. Nothing to do for act16.
void round_activations(const Operand& operand, const TensorScale* static_scale, std::int64_t k,
                       std::vector<float>& x);

/// least_smoothing where the products of the rounded sample with the rounded matrices, each [n, k], differ
/// least from the exact ones, relative to each input's.
std::vector<float> search_smoothing(SchemeId id, bool maxima, bool powers_of_two, const Sample& sample,
                                    std::span<const std::vector<float>> matrices);

/// The static scale of an activation operand for inputs x [rows, k].
TensorScale static_scale(ActivationScale rule, const Operand& operand, const std::vector<float>& x,
                         std::int64_t k);

}  // namespace gatefold
