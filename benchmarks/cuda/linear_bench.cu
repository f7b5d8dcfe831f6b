// grouped_gemm and scaled_mm of one matrix: few rows beside a bare read of the weights, many beside cuBLAS.
// linear_bench [SIZE [choices]]
// choices: what the plan chooses by up to 1024 rows beside the fastest candidate, of more schemes, and how
// much that loses.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/measure.h"
#include "format/code_rows.h"
#include "gatefold/codec.h"
#include "gatefold/cuda_linear.h"
#include "gatefold/cuda_quantize.h"
#include "graph_time.h"

namespace gatefold {
namespace {

template <class T>
T take(Result<T> result) {
  if (!result) {
    std::printf("%s\n", result.status().message().c_str());
    std::exit(1);
  }
  return std::move(*result);
}

/// [rows, cols] of bf16 in device memory.
cuda::Memory random_rows(std::int64_t rows, std::int64_t cols) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pattern(1048573), codes(static_cast<std::size_t>(rows * cols));
  for (std::uint16_t& code : pattern)
    code = static_cast<std::uint16_t>(encode<formats::bf16>(normal(random)));
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = pattern[i % pattern.size()];
  cuda::Memory memory = take(cuda::Memory::allocate(codes.size() * 2, "rows"));
  if (!cuda::copy(memory.data(), codes.data(), codes.size() * 2).ok()) std::exit(1);
  return memory;
}

/// Copies of a random matrix, each in memory of its own.
std::vector<cuda::LinearWeights> random_weights(SchemeId id, std::int64_t size, std::size_t bytes) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> pattern(4099), w(static_cast<std::size_t>(size * size));
  for (float& x : pattern) x = normal(random);
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = pattern[i % pattern.size()];
  const QuantizedMatrix matrix = take(quantize(id, {w.data(), DType::f32, size, size}));
  const QuantizedMatrix* one[] = {&matrix};
  std::vector<cuda::LinearWeights> weights;
  do weights.push_back(take(cuda::LinearWeights::pack(one)));
  while (weights.size() * weights[0].packed_bytes() < bytes);
  return weights;
}

/// Rows as a call takes them: numbers, or codes of a scheme's activations and their scales.
struct CallRows {
  cuda::Memory numbers, codes, scales;
  cuda::LinearInputs inputs;

  CallRows(SchemeId id, bool quantized, std::int64_t rows, std::int64_t k) : numbers(random_rows(rows, k)) {
    inputs.x = {numbers.data(), DType::bf16, rows, k};
    if (!quantized) return;
    const auto layout = take(cuda::activation_layout(id, rows, k));
    codes = take(cuda::Memory::allocate(layout.value_bytes, "codes"));
    scales = take(cuda::Memory::allocate(layout.scale_bytes, "scales"));
    const cuda::Memory workspace = take(cuda::Memory::allocate(layout.workspace_bytes, "a workspace"));
    const Status status = cuda::quantize_activations(id, {.x = inputs.x, .rows = rows},
                                                     {.values = codes.data(), .scales = scales.data()},
                                                     {workspace.data(), workspace.bytes()});
    if (!status.ok() || !cuda::synchronize().ok()) std::exit(1);
    inputs.x = {codes.data(), dtype_of_codes(scheme(id).activation.value), rows, k};
    inputs.scales = scales.data();
  }
};

/// Microseconds of a call by what the plan chooses, and of the fastest candidate.
struct Times {
  CudaTuning chosen, fastest;
  double us = 0, us_fastest = 0;
};
/// Without candidates that the model takes for more than `most` times as slow as the best one.
Times time(const std::vector<cuda::LinearWeights>& weights, std::int64_t rows, bool quantized = false,
           double most = 2) {
  const cuda::LinearShape& shape = weights[0].shape();
  cuda::LinearOptions options{.max_rows = static_cast<int>(rows)};
  const auto any = take(cuda::LinearPlan::create(shape, options));
  const CallRows x(shape.scheme, quantized, rows, shape.k);
  const cuda::Memory y = take(cuda::Memory::allocate(static_cast<std::size_t>(rows * shape.n) * 2, "y"));
  const int copies = static_cast<int>(weights.size());
  Times times;
  const auto candidates = any.candidates(options.max_rows);
  const double least =
      std::min_element(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
        return a.clocks < b.clocks;
      })->clocks;
  for (const CudaCandidate& candidate : candidates) {
    if (candidate.clocks > most * least) continue;
    options.cuda_tuning = candidate.tuning;
    const auto plan = take(cuda::LinearPlan::create(shape, options));
    const cuda::Memory workspace = take(cuda::Memory::allocate(plan.workspace_bytes(), "a workspace"));
    const double us = graph_us(rows > 1024 ? 2 : 4 * copies, [&](int i, cudaStream_t stream) {
      const Status status = plan.scaled_mm(weights[static_cast<std::size_t>(i % copies)], x.inputs,
                                           {y.data(), DType::bf16, rows, shape.n},
                                           {workspace.data(), workspace.bytes()}, stream);
      if (!status.ok()) std::printf("%s\n", status.message().c_str());
    });
    if (candidate.chosen) times.chosen = candidate.tuning, times.us = us;
    if (times.us_fastest == 0 || us < times.us_fastest)
      times.fastest = candidate.tuning, times.us_fastest = us;
  }
  return times;
}

void print(const std::string& name, std::int64_t rows, const Times& times, double best, double ratio) {
  std::printf("%-25s%6ld%9.1f%10.1f%7.2f  %s", name.c_str(), static_cast<long>(rows), times.us, best, ratio,
              describe(times.chosen).c_str());
  if (times.us > 1.01 * times.us_fastest)
    std::printf(" (%s: %.1f us)", describe(times.fastest).c_str(), times.us_fastest);
  std::printf("\n");
}

std::string name_of(SchemeId id, bool quantized) {
  return std::string(scheme(id).name) + (quantized ? ", codes" : "");
}

void few_rows(SchemeId id, std::int64_t size, std::size_t l2_bytes) {
  const auto weights = random_weights(id, size, 5 * l2_bytes);
  const std::size_t bytes = weights[0].packed_bytes() / 16 * 16;
  const cuda::Memory memory = take(cuda::Memory::allocate(bytes * weights.size(), "a bare read"));
  const auto copies = static_cast<int>(weights.size());
  const double read = graph_us(4 * copies, [&](int i, cudaStream_t stream) {
    const cuda::ReadArgs args{.base = memory.data() + static_cast<std::size_t>(i % copies) * bytes,
                              .stride = 0,
                              .bytes = static_cast<std::int64_t>(bytes),
                              .count = 1};
    if (!cuda::launch_read(args, 0, stream).ok()) std::printf("cannot read\n");
  });
  for (const std::int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
    for (const bool quantized : {false, true}) {
      if (quantized && !scheme(id).quantizes_activations()) continue;
      const Times times = time(weights, rows, quantized);
      print(name_of(id, quantized), rows, times, read, read / times.us);
    }
  }
}

void many_rows(SchemeId id, std::int64_t size) {
  const Format activation = scheme(id).activation.value;
  const Format dense =
      activation == formats::e4m3 || activation == formats::int8 ? activation : formats::bf16;
  const Result<double> best = cuda::dense_gflop_per_s(dense, 0);
  const auto weights = random_weights(id, size, 0);
  for (const bool quantized : {false, true}) {
    if (quantized && !scheme(id).quantizes_activations()) continue;
    const Times times = time(weights, size, quantized);
    const double gflop_per_s = 2.0 * static_cast<double>(size * size * size) / times.us / 1e3;
    print(name_of(id, quantized), size, times, gflop_per_s / 1e3, best ? gflop_per_s / *best : 0);
  }
  if (!best) std::printf("%s\n", best.status().message().c_str());
}

void choices(std::int64_t size, std::size_t l2_bytes) {
  std::vector<double> logs;
  for (const SchemeId id :
       {SchemeId::bf16, SchemeId::f16, SchemeId::int4_g128, SchemeId::mxfp4, SchemeId::fp8_channel,
        SchemeId::fp8_channel_afp8, SchemeId::int4_g128_afp8, SchemeId::mxfp4_afp8}) {
    const auto weights = random_weights(id, size, 2 * l2_bytes);
    for (const std::int64_t rows : {1, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024}) {
      const Times times = time(weights, rows, false, 4);
      print(name_of(id, false), rows, times, times.us_fastest, times.us_fastest / times.us);
      logs.push_back(std::log(times.us / times.us_fastest));
    }
  }
  std::printf("%zu choices: %.3f times the fastest candidate's time in the mean, %.3f at worst\n",
              logs.size(),
              std::exp(std::accumulate(logs.begin(), logs.end(), 0.0) / static_cast<double>(logs.size())),
              std::exp(*std::max_element(logs.begin(), logs.end())));
}

int run(std::int64_t size, bool only_choices) {
  const cuda::DeviceInfo device = take(cuda::device_info());
  if (only_choices) {
    std::printf("[%ld, %ld], bf16 in and out, graphs\n%-25s%6s%9s%10s%7s\n", static_cast<long>(size),
                static_cast<long>(size), "scheme", "rows", "us", "fastest", "of it");
    choices(size, device.l2_bytes);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
  }
  std::printf("%s, [%ld, %ld], bf16 in and out, graphs\n%-25s%6s%9s%10s%7s\n", device.name.c_str(),
              static_cast<long>(size), static_cast<long>(size), "scheme", "rows", "us", "read us", "read/it");
  for (const SchemeId id :
       {SchemeId::int4_g128, SchemeId::mxfp4, SchemeId::fp8_channel, SchemeId::fp8_channel_afp8})
    few_rows(id, size, device.l2_bytes);
  std::printf("%-25s%6s%9s%10s%7s\n", "scheme", "rows", "us", "TFLOP/s", "cuBLAS");
  for (const SchemeId id : {SchemeId::fp8_tensor_afp8, SchemeId::fp8_channel_afp8, SchemeId::fp8_block_afp8,
                            SchemeId::int8_aint8, SchemeId::bf16, SchemeId::int4_g128})
    many_rows(id, size);
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

}  // namespace
}  // namespace gatefold

int main(int argc, char** argv) {
  return gatefold::run(argc >= 2 ? std::atoll(argv[1]) : 8192,
                       argc == 3 && std::strcmp(argv[2], "choices") == 0);
}
