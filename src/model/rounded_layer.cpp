#include <fmt/format.h>

#include "checkpoint/fused_amax.h"
#include "checkpoint/plain_view.h"
#include "model/calibrate_layer.h"

namespace gatefold {
namespace {

Result<QuantizedMatrix> rounded(const Checkpoint& checkpoint, int layer, int expert, Projection projection,
                                SchemeId scheme, QuantizeOptions options) {
  const auto matrix = checkpoint.expert(layer, expert, projection);
  if (!matrix) return matrix.status();
  const auto amax = fused_amax(checkpoint, scheme, layer, expert, projection);
  if (!amax) return amax.status();
  options.tensor_amax = *amax;
  return quantize(scheme, *plain_view(*matrix), options);
}

}  // namespace

Result<QuantizedLayer> rounded_layer(const Checkpoint& checkpoint, int layer, SchemeId scheme,
                                     const QuantizeOptions& options, int threads) {
  QuantizedLayer out;
  const int experts = checkpoint.config().moe.experts;
  out.experts.resize(static_cast<std::size_t>(experts));
  Status failure;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int e = 0; e < experts; ++e) {
    QuantizedExpert& expert = out.experts[static_cast<std::size_t>(e)];
    QuantizedMatrix* const parts[] = {&expert.gate, &expert.up, &expert.down};
    for (const Projection p : {Projection::gate, Projection::up, Projection::down}) {
      auto matrix = rounded(checkpoint, layer, e, p, scheme, options);
      if (matrix) {
        *parts[static_cast<int>(p)] = std::move(*matrix);
        continue;
      }
#pragma omp critical
      if (failure.ok())
        failure = {matrix.status().code(),
                   fmt::format("layer {}, expert {}: {}", layer, e, matrix.status().message())};
    }
  }
  if (!failure.ok()) return failure;
  return out;
}

}  // namespace gatefold
