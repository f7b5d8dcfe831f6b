#include "cuda/moe_gemm_table.cuh"

namespace gatefold::cuda {

constexpr bool is_16bit(Format value) {
  return value.bits == 16;
}

GemmKernel find_gemm_16bit(SchemeId scheme, InputKind input, int tokens) {
  return find_among<is_16bit>(scheme, input, tokens);
}

}  // namespace gatefold::cuda
