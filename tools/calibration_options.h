#pragma once
/// \file
/// What quantize and recommend share: a method, and a text to calibrate on.

#include <optional>
#include <string>
#include <vector>

#include "gatefold/calibrate.h"
#include "tools/cli.h"

namespace gatefold::cli {

struct CalibrationOptions {
  const CLI::App* command = nullptr;  ///< that has them
  std::optional<Method> method;       ///< none: round to nearest
  std::string file;
  std::int64_t limit = 131072;  ///< of tokens
  bool all_experts = false;
  CalibrateOptions calibrate;
};

/// --method, --calibration and what belongs to them.
void add_calibration_options(CLI::App* command, CalibrationOptions& options);

/// Error: an option that would be ignored, and what it needs. `reads_text`: without a method too.
Status check_calibration_options(const CalibrationOptions& options, bool reads_text);

/// The text of a byte-level model, or token ids.
Result<std::vector<std::int32_t>> read_calibration(const CalibrationOptions& options,
                                                   const Checkpoint& source);

/// With --all-experts; stops when interrupted.
CalibrateOptions calibrate_options_of(const CalibrationOptions& options, std::size_t tokens);

}  // namespace gatefold::cli
