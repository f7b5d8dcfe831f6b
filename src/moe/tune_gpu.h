#pragma once

#include "gatefold/tune.h"
#include "moe/synthetic.h"

namespace gatefold {

/// Times every candidate of a plan on a GPU.
Result<TuneRow> tune_row_on_gpu(const SyntheticLayers& layers, int tokens, const TuneOptions& options);

}  // namespace gatefold
