#pragma once
/// \file
/// Launches of kernels that may start while the one before them ends (wait_for_previous_kernel).

#include <cuda_runtime_api.h>

#include <type_traits>

namespace gatefold::cuda {

struct Launch {
  dim3 blocks, threads;
  cudaStream_t stream = nullptr;
  std::size_t shared_bytes = 0;
  dim3 cluster = 1;  ///< neighbouring blocks that are a cluster, in each direction
};

/// `parameters`: a pointer to each.
inline cudaError_t launch_dependent(const void* kernel, const Launch& launch, void** parameters) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {launch.cluster.x, launch.cluster.y, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = launch.blocks;
  config.blockDim = launch.threads;
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = launch.cluster.x * launch.cluster.y == 1 ? 1 : 2;
  return cudaLaunchKernelExC(&config, kernel, parameters);
}

template <class... Parameters>
cudaError_t launch_dependent(void (*kernel)(Parameters...), const Launch& launch,
                             std::type_identity_t<Parameters>... arguments) {
  void* parameters[] = {&arguments...};
  return launch_dependent(reinterpret_cast<const void*>(kernel), launch, parameters);
}

}  // namespace gatefold::cuda
