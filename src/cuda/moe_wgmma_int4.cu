#include "cuda/moe_wgmma_table.cuh"

namespace gatefold::cuda {

constexpr bool is_int4(Format value) {
  return value == formats::int4;
}

GemmKernel find_warpgroup_gemm_int4(SchemeId scheme, InputKind input, int tokens) {
  return find_warpgroup_among<is_int4>(scheme, input, tokens);
}

}  // namespace gatefold::cuda
