#include "cuda/moe_gemm.h"

namespace gatefold::cuda {

// One source file each, so that they are compiled side by side.
GemmKernel find_gemm_16bit(SchemeId scheme, bool wide, InputKind input, int tokens);
GemmKernel find_gemm_8bit(SchemeId scheme, bool wide, InputKind input, int tokens);
GemmKernel find_gemm_int4(SchemeId scheme, bool wide, InputKind input, int tokens);
GemmKernel find_gemm_fp4(SchemeId scheme, bool wide, InputKind input, int tokens);

GemmKernel find_gemm(SchemeId scheme, bool wide, InputKind input, int tokens) {
  for (auto* find : {find_gemm_16bit, find_gemm_8bit, find_gemm_int4, find_gemm_fp4})
    if (const GemmKernel kernel = find(scheme, wide, input, tokens); kernel.function != nullptr)
      return kernel;
  return {};
}

GemmKernel find_warpgroup_gemm_16bit(SchemeId scheme, bool wide, InputKind input, int tokens);
GemmKernel find_warpgroup_gemm_8bit(SchemeId scheme, bool wide, InputKind input, int tokens);
GemmKernel find_warpgroup_gemm_int4(SchemeId scheme, bool wide, InputKind input, int tokens);
GemmKernel find_warpgroup_gemm_fp4(SchemeId scheme, bool wide, InputKind input, int tokens);

GemmKernel find_warpgroup_gemm(SchemeId scheme, bool wide, InputKind input, int tokens) {
  for (auto* find : {find_warpgroup_gemm_16bit, find_warpgroup_gemm_8bit, find_warpgroup_gemm_int4,
                     find_warpgroup_gemm_fp4})
    if (const GemmKernel kernel = find(scheme, wide, input, tokens); kernel.function != nullptr)
      return kernel;
  return {};
}

namespace {

/// One block of a multiprocessor, where it has little to read, leaves room for the next kernel, which then
/// reads its first weights meanwhile.
int blocks_for(const GemmKernel& kernel, const GemmArgs& args, int multiprocessors) {
  const auto most_experts = static_cast<std::int64_t>(args.experts < args.slots ? args.experts : args.slots);
  const std::int64_t bytes = most_experts * args.groups * args.steps * kernel.step_bytes;
  constexpr std::int64_t little = 256 * 1024;
  return multiprocessors * (bytes < multiprocessors * little ? 1 : kernel.per_core);
}

}  // namespace

cudaError_t launch_gemm(const GemmKernel& kernel, const GemmArgs& args, int multiprocessors,
                        cudaStream_t stream) {
  // Once would do; it costs little, and every device needs it.
  if (const auto error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              kernel.shared_bytes);
      error != cudaSuccess)
    return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks_for(kernel, args, multiprocessors)));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  GemmArgs own = args;
  own.tile_tokens = kernel.tokens;
  void* parameters[] = {&own};
  return cudaLaunchKernelExC(&config, kernel.function, parameters);
}

}  // namespace gatefold::cuda
