#include "checkpoint/fused_amax.h"

#include <algorithm>

#include "checkpoint/plain_view.h"

namespace gatefold {

Result<float> fused_amax(const Checkpoint& checkpoint, SchemeId id, int layer, int expert,
                         Projection projection) {
  float amax = 0;
  if (projection == Projection::down || !scheme(id).weight.tensor_scale.stored()) return amax;
  for (const Projection p : {Projection::gate, Projection::up}) {
    const auto matrix = checkpoint.expert(layer, expert, p);
    if (!matrix) return matrix.status();
    if (const auto view = plain_view(*matrix)) amax = std::max(amax, largest_magnitude(*view));
  }
  return amax;
}

}  // namespace gatefold
