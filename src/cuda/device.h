#pragma once
/// \file
/// What every host file of the CUDA backend needs: errors, streams, the current device.

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

/// Makes a device the calling thread's current one, for as long as the guard lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    if (cudaGetDevice(&previous_) == cudaSuccess && previous_ != device_) cudaSetDevice(device_);
  }
  ~DeviceGuard() {
    if (previous_ != device_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int previous_ = 0;
};

}  // namespace gatefold::cuda
