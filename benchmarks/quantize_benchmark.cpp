// Rate of the round-to-nearest quantizer on one core: bytes of bf16 read per second, every row of the table.
//   cmake -B build -DGATEFOLD_BENCHMARKS=ON && cmake --build build && build/benchmarks/quantize_benchmark

#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gatefold/codec.h"
#include "gatefold/quantize.h"

namespace gatefold {
namespace {

constexpr std::int64_t kRows = 1536, kCols = 2048;

void run(benchmark::State& state, SchemeId id, bool scale_search) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<std::uint16_t> weights(kRows * kCols);
  for (auto& w : weights) w = static_cast<std::uint16_t>(encode<formats::bf16>(normal(random)));
  const std::int64_t rows = scale_search ? 128 : kRows;
  for (auto _ : state)
    benchmark::DoNotOptimize(
        quantize(id, {weights.data(), DType::bf16, rows, kCols}, {.scale_search = scale_search}));
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * rows * kCols * 2);
}

const bool registered = [] {
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    const auto id = static_cast<SchemeId>(i);
    const std::string name(scheme(id).name);
    benchmark::RegisterBenchmark(name.c_str(), run, id, false);
    benchmark::RegisterBenchmark((name + "/scale_search").c_str(), run, id, true);
  }
  return true;
}();

}  // namespace
}  // namespace gatefold
