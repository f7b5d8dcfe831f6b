#include "cpu/probe.h"

namespace gatefold {

namespace portable {
extern const Probe probes;
}
namespace avx2 {
extern const Probe probes;
}
namespace avxvnni {
extern const Probe probes;
}
namespace avx512 {
extern const Probe probes;
}
namespace avx512vnni {
extern const Probe probes;
}
namespace avx512bf16 {
extern const Probe probes;
}
namespace amx {
extern const Probe probes;
}

const Probe& probe(Isa isa) {
  switch (isa) {
    case Isa::amx:
      return amx::probes;
    case Isa::avx512bf16:
      return avx512bf16::probes;
    case Isa::avx512vnni:
      return avx512vnni::probes;
    case Isa::avx512:
      return avx512::probes;
    case Isa::avxvnni:
      return avxvnni::probes;
    case Isa::avx2:
      return avx2::probes;
    default:
      return portable::probes;
  }
}

}  // namespace gatefold
