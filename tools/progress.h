#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace gatefold::cli {

/// Progress on stderr: a bar with rate and remaining time on a terminal, else a plain line every ten seconds.
/// For one thread at a time.
class Progress {
 public:
  /// Counts are shown divided by `scale`, in `unit` ("GB", 1e9).
  Progress(std::string label, std::string unit, double scale = 1);
  ~Progress();
  void set(std::uint64_t done, std::uint64_t total);
  void finish();  ///< the last line; also done by the destructor

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gatefold::cli
