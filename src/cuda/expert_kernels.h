#pragma once
/// \file
/// What calibration does to rows of tokens on a GPU. Launches; errors are left for cudaGetLastError.

#include <cuda_runtime_api.h>

#include "gatefold/cuda_quantize.h"

namespace gatefold::cuda {

/// out = in, as f32.
void widen(DType dtype, const void* in, std::int64_t count, float* out, cudaStream_t stream);

/// out[i] = x[tokens[i]], rows of k
void gather_rows(const float* x, const std::int32_t* tokens, std::int64_t rows, std::int64_t k, float* out,
                 cudaStream_t stream);
/// to[tokens[i]] += x[i]; tokens are all different
void add_rows(const float* x, const std::int32_t* tokens, std::int64_t rows, std::int64_t k, float* to,
              cudaStream_t stream);

/// x[i] *= factors[i], or its square root
void scale_rows(const float* factors, bool root, std::int64_t rows, std::int64_t k, float* x,
                cudaStream_t stream);

/// out[i][j] = x[i][j] * factors[j], or over it; may be in place
void scale_columns(const float* factors, bool divide, std::int64_t rows, std::int64_t k, const float* x,
                   float* out, cudaStream_t stream);
/// out[j]: the mean or the largest of |x[i][j]|
void column_magnitudes(const float* x, std::int64_t rows, std::int64_t k, bool maxima, float* out,
                       cudaStream_t stream);
/// out[i]: the sum of (y[i][j] - wanted[i][j])^2 over that of wanted[i][j]^2
void row_losses(const float* y, const float* wanted, std::int64_t rows, std::int64_t k, double* out,
                cudaStream_t stream);

/// y [rows, k] = silu(gate) * up; [gate, up] are rows of 2 k
void activate(const float* gate_up, std::int64_t rows, std::int64_t k, float* y, cudaStream_t stream);

/// What quantize_activations gave, back in f32.
void decode_activations(SchemeId scheme, const QuantizeOutputs& codes, const ActivationLayout& layout,
                        std::int64_t rows, std::int64_t k, float* x, cudaStream_t stream);

}  // namespace gatefold::cuda
