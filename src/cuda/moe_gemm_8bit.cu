#include "cuda/moe_gemm_table.cuh"

namespace gatefold::cuda {

constexpr bool is_8bit(Format value) {
  return value.bits == 8;
}

GemmKernel find_gemm_8bit(SchemeId scheme, InputKind input, int tokens) {
  return find_among<is_8bit>(scheme, input, tokens);
}

}  // namespace gatefold::cuda
