// Routing on the GPU: routing_bench
#include <cstdio>
#include <random>

#include "cuda/routing.h"
#include "graph_time.h"

namespace gatefold {
namespace {

struct Shape {
  const char* name;
  int experts, top_k;
  Routing routing;
};

int run() {
  const auto device = cuda::device_info();
  if (!device) {
    std::printf("%s\n", device.status().message().c_str());
    return 1;
  }
  const Shape shapes[] = {
      {"qwen3: 8 of 128", 128, 8, {}},
      {"dsv3: 8 of 256, 4 of 8 groups",
       256,
       8,
       {.score = Score::sigmoid, .groups = 8, .top_groups = 4, .scaling_factor = 2.5f}},
      {"mixtral: 2 of 8", 8, 2, {}},
      {"8 of 1024", 1024, 8, {}},
  };
  constexpr int most_tokens = 16384, most_experts = 1024, most_k = 8;
  auto logits = cuda::Memory::allocate(std::size_t{4} * most_tokens * most_experts, "logits");
  auto slots = cuda::Memory::allocate(
      std::size_t{4} * (8 * most_tokens * most_k + most_tokens * most_experts / 64), "slots");
  if (!logits || !slots) return 1;
  std::vector<float> numbers(std::size_t{most_tokens} * most_experts);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float& x : numbers) x = normal(random);
  if (!cuda::copy(logits->data(), numbers.data(), logits->bytes()).ok()) return 1;
  auto* words = slots->as<std::int32_t>();
  const auto buffer = [&](int i) { return words + static_cast<std::ptrdiff_t>(i) * most_tokens * most_k; };

  constexpr int tokens[] = {1, 8, 32, 64, 128, 512, 4096, 16384};
  std::printf("%s, routing from logits and sorting slots, us in graphs\n%-32s", device->name.c_str(),
              "tokens");
  for (const int count : tokens) std::printf("%8d", count);
  for (const Shape& shape : shapes) {
    std::printf("\n%-32s", shape.name);
    for (const int count : tokens) {
      const cuda::RouteArgs args{.tokens = count,
                                 .experts = shape.experts,
                                 .top_k = shape.top_k,
                                 .routing = shape.routing,
                                 .logits = logits->as<float>(),
                                 .end_expert = shape.experts,
                                 .out = {.topk_ids = buffer(0),
                                         .topk_weights = slots->as<float>() + most_tokens * most_k,
                                         .expert_offsets = buffer(2),
                                         .slot_position = buffer(3),
                                         .sorted_slots = buffer(4)},
                                 .block_counts = buffer(5)};
      std::printf("%8.2f", graph_us(20, [&](int, cudaStream_t stream) {
                    const Status status = cuda::route(args, stream);
                    if (!status.ok()) std::printf("%s\n", status.message().c_str());
                  }));
    }
  }
  std::printf("\n");
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

}  // namespace
}  // namespace gatefold

int main() {
  return gatefold::run();
}
