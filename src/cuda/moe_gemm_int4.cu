#include "cuda/moe_gemm_table.cuh"

namespace gatefold::cuda {

constexpr bool is_int4(Format value) {
  return value.bits == 4 && value.is_integer();
}

GemmKernel find_gemm_int4(SchemeId scheme, InputKind input, int tokens) {
  return find_among<is_int4>(scheme, input, tokens);
}

}  // namespace gatefold::cuda
