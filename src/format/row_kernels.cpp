#include "format/row_kernels.h"

namespace gatefold {

namespace portable {
extern const RowKernels& rows;
}
namespace avx2 {
extern const RowKernels& rows;
}
namespace avx512 {
extern const RowKernels& rows;
}

const RowKernels& row_kernels(Isa isa) {
  switch (base(isa)) {
    case Isa::avx512:
      return avx512::rows;
    case Isa::avx2:
      return avx2::rows;
    default:
      return portable::rows;
  }
}

const RowKernels& row_kernels() {
  static const RowKernels& best = row_kernels(best_isa());
  return best;
}

}  // namespace gatefold
