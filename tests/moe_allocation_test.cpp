// A program of its own: it replaces operator new.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "gatefold/moe.h"
#include "moe_layer.h"

std::atomic<int> allocations{0};

// Counts every allocation of this program.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}

namespace gatefold {
namespace {

TEST(Moe, RunAllocatesNothing) {
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    SCOPED_TRACE(all_schemes()[i].name);
    Layer layer(small_spec(static_cast<SchemeId>(i)));
    const std::vector<float> x = layer.numbers(4 * 256, 1.0f);
    std::vector<float> y(x.size());
    const auto plan = MoePlan::create(layer.spec(), {.max_tokens = 4, .threads = 2, .debug_workspace = true});
    const ExpertWeights weights = layer.weights({});
    std::vector<std::byte> workspace(plan->workspace_bytes());
    int during = -1;
    for (int warm = 0; warm < 2; ++warm) {  // the first call starts the threads
      const int before = allocations;
      const Status status = plan->run(weights, {.hidden = {x.data(), DType::f32, 4, 256}},
                                      {.hidden = {y.data(), DType::f32, 4, 256}}, workspace);
      during = allocations - before;
      ASSERT_TRUE(status.ok()) << status.message();
    }
    EXPECT_EQ(during, 0);
  }
}

}  // namespace
}  // namespace gatefold
