#pragma once

#include <map>

#include "moe/synthetic.h"

namespace gatefold {

/// What dense multiplies reach on a GPU, by the numbers that they multiply: measured when first asked for.
class DenseRates {
 public:
  explicit DenseRates(const Device& device) : device_(device) {}
  /// Of the multiply that a scheme's activations ask for. Errors: there is no cuBLAS.
  const Result<double>& gflop_per_s(SchemeId scheme);

 private:
  Device device_;
  std::map<std::string_view, Result<double>> rates_;
};

/// Calls of layers in turn, replayed as a graph, from a rest, and launched one by one, beside reads of the
/// weights that they read.
Result<BenchRow> time_row_on_gpu(const SyntheticLayers& layers, int tokens, BenchFrom from,
                                 const BenchOptions& options, DenseRates& dense);

}  // namespace gatefold
