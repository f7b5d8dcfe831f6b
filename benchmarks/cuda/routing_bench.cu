// Routing on the GPU, and the logits before it: routing_bench
#include <cstdio>
#include <random>

#include "cuda/routing.h"
#include "gatefold/codec.h"
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

/// Logits by routers that lie in memory, of bf16 numbers or of f32 ones.
int run_routers() {
  struct Router {
    const char* name;
    int experts, hidden;
  };
  constexpr Router routers[] = {{"qwen3: 128 x 2048", 128, 2048},
                                {"qwen3-next: 512 x 2048", 512, 2048},
                                {"gpt-oss: 128 x 2880", 128, 2880},
                                {"dsv3: 256 x 7168", 256, 7168},
                                {"mixtral: 8 x 4096", 8, 4096}};
  constexpr int tokens[] = {1, 8, 32, 64, 128, 512, 4096, 16384};
  constexpr std::size_t most_tokens = 16384, most_hidden = 7168, most_experts = 512,
                        memory = std::size_t{256} << 20;
  auto hidden = cuda::Memory::allocate(2 * most_tokens * most_hidden, "hidden states");
  auto logits = cuda::Memory::allocate(4 * most_tokens * most_experts, "logits");
  auto weights = cuda::Memory::allocate(memory, "routers"),
       weights16 = cuda::Memory::allocate(memory / 2, "routers");
  if (!hidden || !logits || !weights || !weights16) return 1;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> codes(most_tokens * most_hidden);
  std::vector<float> numbers(memory / 4);
  for (std::size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<std::uint16_t>(i < 4099 ? encode<formats::bf16>(normal(random)) : codes[i % 4099]);
  if (!cuda::copy(hidden->data(), codes.data(), hidden->bytes()).ok()) return 1;
  for (const bool exact : {true, false}) {
    std::vector<std::uint16_t> codes16(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = i >= 4099 ? numbers[i % 4099] : normal(random);
      codes16[i] = static_cast<std::uint16_t>(encode<formats::bf16>(numbers[i]));
      if (exact) numbers[i] = decode<formats::bf16>(codes16[i]);
    }
    if (!cuda::copy(weights->data(), numbers.data(), memory).ok()) return 1;
    if (!cuda::copy(weights16->data(), codes16.data(), memory / 2).ok()) return 1;
    std::printf("\nlogits by routers of %s, us in graphs\n%-32s", exact ? "bf16 numbers" : "f32 numbers",
                "tokens");
    for (const int count : tokens) std::printf("%8d", count);
    for (const Router& router : routers) {
      std::printf("\n%-32s", router.name);
      const std::size_t each = static_cast<std::size_t>(router.experts) * router.hidden;
      for (const int count : tokens) {
        const cuda::RouterArgs args{.tokens = count,
                                    .experts = router.experts,
                                    .hidden_size = router.hidden,
                                    .hidden = hidden->data(),
                                    .dtype = DType::bf16,
                                    .logits = logits->as<float>()};
        std::printf("%8.2f", graph_us(20, [&](int call, cudaStream_t stream) {
                      cuda::RouterArgs of_call = args;
                      const std::size_t at = call % (memory / 4 / each) * each;
                      of_call.router = weights->as<float>() + at;
                      if (exact) of_call.router16 = weights16->as<std::uint16_t>() + at;
                      if (cuda::launch_router_logits(of_call, stream) != cudaSuccess)
                        std::printf("cannot launch\n");
                    }));
      }
    }
  }
  std::printf("\n");
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

}  // namespace
}  // namespace gatefold

int main() {
  const int done = gatefold::run();
  return done != 0 ? done : gatefold::run_routers();
}
