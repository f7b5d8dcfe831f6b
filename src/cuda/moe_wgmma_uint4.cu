#include "cuda/moe_wgmma_table.cuh"

namespace gatefold::cuda {

constexpr bool is_uint4(Format value) {
  return value == formats::uint4;
}

GemmKernel find_warpgroup_gemm_uint4(SchemeId scheme, InputKind input, int tokens) {
  return find_warpgroup_among<is_uint4>(scheme, input, tokens);
}

}  // namespace gatefold::cuda
