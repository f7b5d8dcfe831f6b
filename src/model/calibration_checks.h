#pragma once
/// \file
/// What calibrate and recommend ask of their arguments.

#include <cstdint>
#include <span>

#include "gatefold/calibrate.h"

namespace gatefold {

/// Whether the method has something to do in a scheme.
Status check_method(const Scheme& scheme, Method method);

/// An unquantized model, its tokens, at least one window of them, and numbers that make sense.
Status check_calibration(const Checkpoint& source, std::span<const std::int32_t> tokens,
                         const CalibrateOptions& options);

}  // namespace gatefold
