#include "cuda/moe_wgmma_table.cuh"

namespace gatefold::cuda {

constexpr bool is_int4(Format value) {
  return value == formats::int4;
}

GemmKernel find_warpgroup_gemm_int4(SchemeId scheme, bool wide, InputKind input, int tokens) {
  return find_warpgroup_among<is_int4>(scheme, wide, input, tokens);
}

}  // namespace gatefold::cuda
