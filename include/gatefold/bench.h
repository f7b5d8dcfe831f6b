#pragma once
/// \file
/// Timing of whole MoE layers on random weights, beside what the machine can do at best, measured in the same
/// run: machines differ, and shared ones change by the minute, so only the ratios mean something.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gatefold/moe.h"
#include "gatefold/status.h"

namespace gatefold {

struct BenchShape {
  std::string name;
  int hidden = 0, intermediate = 0, experts = 0, top_k = 0;
};

/// The layers of published models. deepseek-v3 and deepseek-v4-pro: the experts of one of 8 ranks.
std::span<const BenchShape> bench_presets();

struct BenchOptions {
  Device device;
  BenchShape shape;
  std::vector<SchemeId> schemes;
  std::vector<int> tokens = {1, 8, 64, 512};
  int threads = 0;       ///< 0: OpenMP's default
  double seconds = 1.0;  ///< per row, at least; not on a GPU
  std::uint64_t weight_bytes =
      3'000'000'000;  ///< layers are repeated, each with memory of its own, up to this
};

struct BenchRow {
  std::string_view scheme;
  std::string kernel;
  int tokens = 0;
  int runs = 0;
  double us_median = 0, us_min = 0, us_max = 0;  ///< on a GPU: calls one after the other in a CUDA graph
  double us_launched = 0;                        ///< GPU: launched one by one; median
  std::uint64_t weight_bytes = 0;  ///< packed bytes, scales included, of the experts that a call hits (mean)
  double gb_per_s = 0;             ///< weight_bytes / time, median
  double gflop_per_s = 0;          ///< 6 * tokens * top_k * hidden * intermediate / time
  /// Plain reading by the same threads, or on the same GPU (the same bytes), between the runs.
  double read_gb_per_s = 0;
  double read_ratio = 0;  ///< gb_per_s / read_gb_per_s
  /// The best multiply-add in registers by the same threads: of int8 if the scheme's activations are int8,
  /// else of f32 or bf16, whichever is faster. Not measured on a GPU.
  double multiply_gflop_per_s = 0;
  double multiply_ratio = 0;
};

/// Routing is uniform at random. `on_row` gets each row as soon as it is there.
Result<std::vector<BenchRow>> bench(const BenchOptions& options,
                                    const std::function<void(const BenchRow&)>& on_row = {});

}  // namespace gatefold
