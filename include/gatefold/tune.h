#pragma once
/// \file
/// Measures what a CPU plan may choose freely (CpuTuning in moe.h) and keeps the best in a file that plans
/// read.
///
/// The file is JSON: GATEFOLD_TUNING, else $XDG_CACHE_HOME/gatefold/tuning.json, else
/// ~/.cache/gatefold/tuning.json. Its entries are for one CPU model, number of threads, scheme, layer shape
/// and class of token counts (1-2, 3-16, more). A process reads it once, when it makes its first plan.
/// Results do not depend on it.

#include <functional>
#include <string>
#include <vector>

#include "gatefold/bench.h"
#include "gatefold/moe.h"

namespace gatefold {

struct TuneOptions {
  BenchShape shape;
  std::vector<SchemeId> schemes;
  std::vector<int> tokens = {1, 16, 512};
  int threads = 0;       ///< 0: OpenMP's default
  double seconds = 1.0;  ///< for each thing that is chosen
  std::uint64_t weight_bytes = 1'000'000'000;
  std::string file = {};  ///< empty: the one that plans read
};

struct TuneRow {
  std::string_view scheme;
  int tokens = 0;
  CpuTuning best;
  double us_default = 0, us_best = 0;  ///< medians, measured in turns
};

/// Entries of the file for other things stay. `on_row` gets each row as soon as it is there. Errors: a shape
/// that a scheme cannot have, no memory, a file that cannot be read or written (it is replaced whole or not
/// at all).
Result<std::vector<TuneRow>> tune(const TuneOptions& options,
                                  const std::function<void(const TuneRow&)>& on_row = {});

/// Why the file that plans read is ignored, in one line; empty if it is not, or no plan has been made.
std::string tuning_warning();

}  // namespace gatefold
