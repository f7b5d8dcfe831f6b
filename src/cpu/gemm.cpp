#include "cpu/gemm.h"

namespace gatefold {

namespace portable {
extern const Multiply multiply_kernel;
}
namespace avx2 {
extern const Multiply multiply_kernel;
}
namespace avx512 {
extern const Multiply multiply_kernel;
}

Multiply multiply(Isa isa) {
  switch (base(isa)) {
    case Isa::avx512:
      return avx512::multiply_kernel;
    case Isa::avx2:
      return avx2::multiply_kernel;
    default:
      return portable::multiply_kernel;
  }
}

}  // namespace gatefold
