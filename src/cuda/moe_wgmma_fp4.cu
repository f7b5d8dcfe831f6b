#include "cuda/moe_wgmma_table.cuh"

namespace gatefold::cuda {

constexpr bool is_fp4(Format value) {
  return value.bits == 4 && value.is_float();
}

GemmKernel find_warpgroup_gemm_fp4(SchemeId scheme, InputKind input, int tokens) {
  return find_warpgroup_among<is_fp4>(scheme, input, tokens);
}

}  // namespace gatefold::cuda
