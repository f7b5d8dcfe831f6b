#pragma once

#include <cstdint>

#include "gatefold/moe_spec.h"

namespace gatefold {

/// `route` for one token. The CUDA backend has the same bits (src/cuda/routing.cu). `scratch` holds 2 *
/// experts floats.
void route_token(const Routing& routing, int experts, int top_k, const float* logits,
                 const float* correction_bias, float* scratch, std::int32_t* ids, float* weights);

}  // namespace gatefold
