#pragma once
/// \file
/// What gate and up of an expert have in common where they are quantized now.

#include "gatefold/checkpoint.h"

namespace gatefold {

/// QuantizeOptions::tensor_amax of an expert's matrix: of gate and up, the larger one. 0 where a scheme has
/// no tensor scale, for down, and for matrices that are not stored as plain numbers.
Result<float> fused_amax(const Checkpoint& checkpoint, SchemeId scheme, int layer, int expert,
                         Projection projection);

}  // namespace gatefold
