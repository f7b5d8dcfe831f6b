#include "cpu/probe.h"

namespace gatefold {

namespace portable {
extern const Probe probes;
}
namespace avx2 {
extern const Probe probes;
}
namespace avx512 {
extern const Probe probes;
}

const Probe& probe(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return avx512::probes;
    case Isa::avx2:
      return avx2::probes;
    default:
      return portable::probes;
  }
}

}  // namespace gatefold
