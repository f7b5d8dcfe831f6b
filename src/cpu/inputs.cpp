#include "cpu/inputs.h"

namespace gatefold {

namespace portable {
extern const InputKernels input_kernels;
}
namespace avx2 {
extern const InputKernels input_kernels;
}
namespace avx512 {
extern const InputKernels input_kernels;
}

const InputKernels& input_kernels(Isa isa) {
  switch (base(isa)) {
    case Isa::avx512:
      return avx512::input_kernels;
    case Isa::avx2:
      return avx2::input_kernels;
    default:
      return portable::input_kernels;
  }
}

}  // namespace gatefold
