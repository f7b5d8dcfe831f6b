#include "model/softmax.h"

namespace gatefold {

namespace portable {
extern const AbsorbScores absorb;
}
namespace avx2 {
extern const AbsorbScores absorb;
}
namespace avx512 {
extern const AbsorbScores absorb;
}

AbsorbScores absorb_scores(Isa isa) {
  switch (base(isa)) {
    case Isa::avx512:
      return avx512::absorb;
    case Isa::avx2:
      return avx2::absorb;
    default:
      return portable::absorb;
  }
}

AbsorbScores absorb_scores() {
  static const AbsorbScores best = absorb_scores(best_isa());
  return best;
}

}  // namespace gatefold
