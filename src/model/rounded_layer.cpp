#include <fmt/format.h>

#include "model/calibrate_layer.h"

namespace gatefold {
namespace {

Result<QuantizedMatrix> rounded(const Result<ExpertMatrix>& matrix, SchemeId id,
                                const QuantizeOptions& options) {
  if (!matrix) return matrix.status();
  return quantize(id, std::get<MatrixView>(*matrix), options);
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
      auto matrix = rounded(checkpoint.expert(layer, e, p), scheme, options);
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
