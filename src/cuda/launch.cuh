#pragma once

#include <cuda_runtime.h>

#include "cuda/ptx.cuh"

namespace gatefold::cuda {

/// Launches a kernel that may start while the one before it ends (wait_for_previous_kernel).
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 blocks, dim3 threads,
                             std::size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

/// The same, of `clusters` clusters of `blocks` thread blocks.
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent_clusters(void (*kernel)(Parameters...), unsigned clusters, unsigned blocks,
                                      unsigned threads, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace gatefold::cuda
