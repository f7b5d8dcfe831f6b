#pragma once
/// \file
/// Measures what a plan may choose (CpuTuning and CudaTuning in moe.h) and keeps the best in a file that
/// plans read.
///
/// The file is JSON: GATEFOLD_TUNING, else $XDG_CACHE_HOME/gatefold/tuning.json, else
/// ~/.cache/gatefold/tuning.json. Its entries are for one CPU model, number of threads, scheme, layer shape
/// and class of token counts (1-2, 3-16, more), or for one GPU model, scheme, layer shape (with its ep_size)
/// and class (1, 2, 3-4, 5-8, 9-16, ..), and of fp8 activations for both ways to add up
/// (PlanOptions::fast_accumulation), whatever the routing was: the last measurement counts. A process reads
/// it once, when it makes its first plan. Results on a CPU do not depend on it; on a GPU they do, by the
/// rounding of f32 sums.

#include <functional>
#include <string>
#include <vector>

#include "gatefold/bench.h"
#include "gatefold/moe.h"

namespace gatefold {

struct TuneOptions {
  Device device;
  BenchShape shape;
  std::vector<SchemeId> schemes;
  std::vector<int> tokens = {1, 16, 512};
  BenchRouting routing = BenchRouting::uniform;  ///< what plans are to be fast for
  int threads = 0;                               ///< 0: OpenMP's default
  double seconds = 1.0;                          ///< for each thing that is chosen; not on a GPU
  std::uint64_t weight_bytes = 1'000'000'000;
  bool fast_accumulation = false;  ///< PlanOptions, of the plans that it is for
  std::string file = {};           ///< empty: the one that plans read
};

/// A candidate of a CUDA plan, as predicted (MoePlan::candidates) and as measured: whole calls, from ids, one
/// after the other in a CUDA graph.
struct CudaMeasured {
  CudaTuning tuning;
  double clocks = 0, us = 0;
};

struct TuneRow {
  std::string_view scheme;
  int tokens = 0;
  CpuTuning best;                                ///< on a CPU
  CudaTuning cuda_default = {}, cuda_best = {};  ///< on a GPU: what the model says, and the fastest
  std::vector<CudaMeasured> candidates = {};     ///< on a GPU
  int sm_mhz = 0;                                ///< on a GPU: right after; 0 where it cannot be read
  double us_default = 0, us_best = 0;            ///< medians, measured in turns
};

/// Entries of the file for other things stay. `on_row` gets each row as soon as it is there. Errors: a shape
/// that a scheme cannot have, no memory, a file that cannot be read or written (it is replaced whole or not
/// at all).
Result<std::vector<TuneRow>> tune(const TuneOptions& options,
                                  const std::function<void(const TuneRow&)>& on_row = {});

/// Why the file that plans read is ignored, in one line; empty if it is not, or no plan has been made.
std::string tuning_warning();

}  // namespace gatefold
