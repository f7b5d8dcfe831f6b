#pragma once
/// \file
/// The kernels behind gatefold/cuda_quantize.h.

#include <cuda_runtime_api.h>

#include "gatefold/cuda_quantize.h"

namespace gatefold::cuda {

/// Most partial results of the first pass over a tensor.
inline constexpr int kPartials = 512;

struct QuantizeArgs {
  const std::byte* x;
  std::int64_t rows, row_bytes, scale_cols;
  int k;
  int chunks;  ///< of a row: how often a block reads (quantize.cu)
  const std::int32_t* gather;
  std::int32_t gather_divisor;
  const std::int32_t* row_count;
  bool wide;  ///< rows of x and of the result can be accessed 16 bytes at a time
  const TensorScale* static_scales;
  const std::int32_t* static_index;
  std::byte* values;
  std::byte* scales;
  float* token_scales;
  float* partials;  ///< [kPartials] largest magnitudes; one scale per tensor only
};

/// rows > 0, k > 0. What CUDA says of the launch.
cudaError_t launch_quantize(const Operand& operand, Format input, const QuantizeArgs& args,
                            cudaStream_t stream);

}  // namespace gatefold::cuda
