#pragma once
/// \file
/// Gates and ups to channels at the end of a tile (moe_wgmma_finish.cuh), in few instructions.

#include <limits>

#include "cuda/moe_gemm_finish.cuh"

namespace gatefold::cuda {

/// min and max that are NaN where either is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
/// 2^x, off by 2^-22 of it.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ __forceinline__ bool is_geglu(const Activation& by) {
  return by.kind == Activation::Kind::geglu || by.kind == Activation::Kind::geglu_tanh;
}
/// SwiGLU without limits and beta: the gate's SiLU times up.
__device__ __forceinline__ bool is_plain_swiglu(const Activation& by) {
  return !is_geglu(by) && by.beta == 0 && by.limit == std::numeric_limits<float>::infinity();
}
/// As activate_swiglu, in fewer instructions.
template <bool kPlain>
__device__ __forceinline__ float swiglu(const Activation& by, float gate, float up) {
  constexpr float e = 1.44269504f;
  if constexpr (kPlain) return gate * reciprocal(1.0f + power_of_two(-e * by.alpha * gate)) * up;
  const float g = min_or_nan(gate, by.limit), u = max_or_nan(min_or_nan(up, by.limit), -by.limit);
  return g * reciprocal(1.0f + power_of_two(-e * by.alpha * g)) * (u + by.beta);
}

}  // namespace gatefold::cuda
