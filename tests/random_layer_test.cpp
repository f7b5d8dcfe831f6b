// Layers and calls of which everything is drawn, on the CPU.
#include "random_layer.h"

namespace gatefold {
namespace {

class RandomLayers : public testing::TestWithParam<unsigned> {};

TEST_P(RandomLayers, EqualTheOracle) {
  RandomLayer(GetParam(), {}).expect_close([](const MoeSpec&, const PlanOptions&) { return 0.0; });
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomLayers, testing::Range(0u, 100u));

}  // namespace
}  // namespace gatefold
