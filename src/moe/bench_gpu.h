#pragma once

#include "moe/synthetic.h"

namespace gatefold {

/// Calls of layers in turn, replayed as a graph and launched one by one, beside reads of the weights that
/// they read.
Result<BenchRow> time_row_on_gpu(const SyntheticLayers& layers, int tokens, const BenchOptions& options);

}  // namespace gatefold
