#pragma once
/// \file
/// Rows of activations that are quantized already (MoeInputs, cuda::LinearInputs).

#include <string>

#include "gatefold/scheme.h"
#include "gatefold/tensor.h"

namespace gatefold {

/// The type of tensors with codes of an activation operand, and with its scales.
DType dtype_of_codes(Format value);
DType dtype_of_scales(Format scale);

/// Empty if x may be rows of codes of what a plan of this scheme rounds activations to
/// (effective_activation), whose scales a caller gives; else why not, in words.
std::string refuses_codes(const Scheme& scheme, const Operand& activation, const MatrixView& x,
                          const float* token_scales);

}  // namespace gatefold
