#pragma once

#include "gatefold/checkpoint.h"
#include "gatefold/status.h"

namespace gatefold {

/// Error: a part of the model is quantized already, experts, other layers or the KV cache. What quantizes the
/// rest writes a quantization_config of its own, which would say nothing of that part.
Status check_unquantized(const Checkpoint& checkpoint);

}  // namespace gatefold
