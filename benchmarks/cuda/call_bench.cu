// What the host does for one call of a plan, one token: beside bare launches of as many empty kernels, and
// for a launch of the call recorded as a graph.
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "cuda/launch.h"
#include "cuda/moe_gemm.h"
#include "format/median.h"
#include "gatefold/moe.h"
#include "gatefold/quantize.h"

namespace gatefold {
namespace {

__global__ void nothing(const __grid_constant__ cuda::GemmArgs) {}

/// Microseconds of the host for one of `calls` calls that the device has time to queue: the median of many.
template <class Call>
double host_us(const Call& call) {
  constexpr int kCalls = 50, kRounds = 101;
  std::vector<double> times;
  for (int round = -5; round < kRounds; ++round) {
    cudaDeviceSynchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
    if (round >= 0) times.push_back(spent.count() / kCalls);
  }
  return median(times);
}

Status time(SchemeId id, bool from_logits) {
  MoeSpec spec;
  spec.scheme = id;
  spec.experts = 8;
  spec.top_k = 2;
  spec.hidden = 512;
  spec.intermediate = 256;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<float> w(static_cast<std::size_t>(spec.hidden) * spec.intermediate);
  for (float& x : w) x = normal(random);
  const auto weights = ExpertWeights::pack(spec, Device::cuda(), {}, [&](int, Projection projection) {
    const bool down = projection == Projection::down;
    return quantize(id, {w.data(), DType::f32, down ? spec.hidden : spec.intermediate,
                         down ? spec.intermediate : spec.hidden});
  });
  if (!weights) return weights.status();
  const auto plan = MoePlan::create(spec, {.max_tokens = 64}, Device::cuda());
  if (!plan) return plan.status();
  const auto memory = cuda::Memory::allocate(plan->workspace_bytes() + (1 << 16), "a bench");
  if (!memory) return memory.status();
  if (Status status = cuda::fill(memory->data(), 0, memory->bytes()); !status.ok()) return status;
  std::byte* at = memory->data();
  const auto piece = [&] { return at += 8192; };
  MoeInputs inputs{.hidden = {at, DType::bf16, 1, spec.hidden}};
  if (from_logits) {
    inputs.router_logits = reinterpret_cast<const float*>(piece());
  } else {
    inputs.topk_ids = reinterpret_cast<const std::int32_t*>(piece());
    inputs.topk_weights = reinterpret_cast<const float*>(piece());
  }
  const MoeOutputs outputs{.hidden = {piece(), DType::bf16, 1, spec.hidden}};
  const std::span<std::byte> workspace(memory->data() + (1 << 16), plan->workspace_bytes());
  Status status;
  const auto run = [&](cuda::Stream stream) {
    return plan->run(*weights, inputs, outputs, workspace, stream);
  };
  const double us = host_us([&] {
    if (status.ok()) static_cast<void>(status = run(nullptr));
  });
  if (!status.ok()) return status;
  const auto graph = cuda::Graph::record(run);
  if (!graph) return graph.status();
  const double recorded = host_us([&] {
    if (status.ok()) static_cast<void>(status = graph->launch());
  });
  if (!status.ok()) return status;
  // Gate and up, down, the sum of slots; a kernel before each multiply rounds quantized activations.
  const int launches = scheme(id).quantizes_activations() ? 5 : 3;
  const double bare = host_us([&] {
    for (int i = 0; i < launches; ++i)
      cuda::launch_dependent(nothing, {.blocks = 1, .threads = 32}, cuda::GemmArgs{});
  });
  std::printf("%-20s%8s%9.2f%11d%9.2f%9.2f%10.2f\n", std::string(scheme(id).name).c_str(),
              from_logits ? "logits" : "ids", us, launches, bare, us - bare, recorded);
  return cuda::synchronize();
}

int run() {
  std::printf("%-20s%8s%9s%11s%9s%9s%10s\n", "scheme", "from", "host us", "launches", "bare", "rest",
              "recorded");
  for (const SchemeId id : {SchemeId::int4_g128, SchemeId::bf16, SchemeId::int4_g128_afp8})
    for (const bool from_logits : {false, true})
      if (const Status status = time(id, from_logits); !status.ok()) {
        std::printf("%s\n", status.message().c_str());
        return 1;
      }
  return 0;
}

}  // namespace
}  // namespace gatefold

int main() {
  return gatefold::run();
}
