// Layers and calls of which everything is drawn, on the GPU, by any of its candidates.
#include "../random_layer.h"
#include "gpu.h"

namespace gatefold {
namespace {

class RandomLayers : public GpuTest, public testing::WithParamInterface<unsigned> {};

TEST_P(RandomLayers, EqualTheOracle) {
  RandomLayer(GetParam(), Device::cuda()).expect_close([](const MoeSpec& spec, const PlanOptions& options) {
    return error_of_sums(scheme(spec.scheme), effective_activation(spec.scheme, spec, options),
                         std::max(spec.hidden, spec.intermediate), options.fast_accumulation);
  });
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomLayers, testing::Range(0u, 200u));

}  // namespace
}  // namespace gatefold
