#pragma once
/// \file
/// What every host file of the CUDA backend needs: errors and streams.

#include <cuda_runtime_api.h>

#include "gatefold/cuda.h"

namespace gatefold::cuda {

/// Ok, or "cannot <what>: <what CUDA says>". The error is consumed: later calls do not see it again.
Status check(cudaError_t error, std::string_view what);

/// The error of a kernel launch just made.
inline Status check_launch(std::string_view kernel) {
  return check(cudaGetLastError(), kernel);
}

inline cudaStream_t native(Stream stream) {
  return static_cast<cudaStream_t>(stream);
}

/// Whether the kernels run on this GPU.
Status check_architecture(const DeviceInfo& device);

}  // namespace gatefold::cuda
