// Activation quantization on the GPU against a bare copy of as many bytes: quantize_bench [ROWS K]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "gatefold/codec.h"
#include "gatefold/cuda_quantize.h"
#include "graph_time.h"

namespace gatefold {
namespace {

/// What `reads` and `writes` cost with nothing in between: 16 bytes at a time, grid stride.
__global__ void move_bytes(const uint4* from, std::size_t reads, uint4* to, std::size_t writes) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  uint4 sum{};
#pragma unroll 4
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < reads;
       i += stride) {
    const uint4 x = __ldcs(from + i);
    sum.x ^= x.x, sum.y ^= x.y, sum.z ^= x.z, sum.w ^= x.w;
    if (i < writes) to[i] = x;
  }
  if (reads >= writes && sum.x == 0x12345678 && sum.y == 0x9abcdef0) to[0] = sum;
}

int run(std::int64_t rows, std::int64_t k) {
  const auto device = cuda::device_info();
  if (!device) {
    std::printf("%s\n", device.status().message().c_str());
    return 1;
  }
  const std::size_t input_bytes = static_cast<std::size_t>(rows * k) * 2;
  const int copies = static_cast<int>(4 * device->l2_bytes / input_bytes) + 2;
  auto inputs = cuda::Memory::allocate(input_bytes * copies, "inputs");
  auto outputs = cuda::Memory::allocate(input_bytes * copies, "outputs");
  auto scales = cuda::Memory::allocate(input_bytes, "scales");
  auto workspace = cuda::Memory::allocate(1 << 20, "a workspace");
  for (const auto* memory : {&inputs, &outputs, &scales, &workspace})
    if (!memory->ok()) {
      std::printf("%s\n", memory->status().message().c_str());
      return 1;
    }
  std::vector<std::uint16_t> numbers(static_cast<std::size_t>(rows * k));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::uint16_t& x : numbers) x = static_cast<std::uint16_t>(encode<formats::bf16>(normal(random)));
  for (int copy = 0; copy < copies; ++copy)
    if (!cuda::copy(inputs->data() + copy * input_bytes, numbers.data(), input_bytes).ok()) return 1;

  std::printf("%s, %ld x %ld bf16, graphs, %d copies in turn\n", device->name.c_str(),
              static_cast<long>(rows), static_cast<long>(k), copies);
  std::printf("%-44s%9s%9s%11s%8s\n", "activation", "us", "TB/s", "bare us", "bare/it");
  std::vector<Operand> seen;
  for (const Scheme& row : all_schemes()) {
    if (!row.quantizes_activations() || std::find(seen.begin(), seen.end(), row.activation) != seen.end())
      continue;
    seen.push_back(row.activation);
    const SchemeId id = *find_scheme(row.name);
    const auto layout = cuda::activation_layout(id, rows, k);
    const std::size_t passes = row.batch_dependent() ? 2 : 1;
    const std::size_t reads = passes * input_bytes;
    const std::size_t writes = layout->value_bytes + layout->scale_bytes + layout->token_scale_bytes;
    auto* token_scales = workspace->as<float>() + 1024;
    const double us = graph_us(2 * copies, [&](int i, cudaStream_t stream) {
      const std::size_t at = i % copies * input_bytes;
      const Status status = cuda::quantize_activations(
          id, {.x = {inputs->data() + at, DType::bf16, rows, k}, .rows = rows},
          {.values = outputs->data() + at, .scales = scales->data(), .token_scales = token_scales},
          {workspace->data(), 4096}, stream);
      if (!status.ok()) std::printf("%s\n", status.message().c_str());
    });
    // The second pass has its own input in the bare copy too: it may not count on the cache.
    const double bare = graph_us(2 * (copies - 1), [&](int i, cudaStream_t stream) {
      const int first = i % (copies - 1);
      move_bytes<<<132 * 4, 512, 0, stream>>>(
          reinterpret_cast<const uint4*>(inputs->data() + first * input_bytes), reads / 16,
          reinterpret_cast<uint4*>(outputs->data() + first * input_bytes), writes / 16);
    });
    std::printf("%-44s%9.1f%9.2f%11.1f%8.2f\n", describe(row.activation, false).c_str(), us,
                static_cast<double>(reads + writes) / us / 1e6, bare, bare / us);
  }
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

}  // namespace
}  // namespace gatefold

int main(int argc, char** argv) {
  return argc == 3 ? gatefold::run(std::atoll(argv[1]), std::atoll(argv[2])) : gatefold::run(4096, 7168);
}
