#pragma once
/// \file
/// What benches of the GPU need: times of work in a stream, and what the device reads at best.

#include <functional>
#include <memory>
#include <vector>

#include "gatefold/cuda.h"

namespace gatefold::cuda {

using Work = std::function<Status(Stream)>;

/// Times work by events on the device, in a stream of its own.
class Timer {
 public:
  static Result<Timer> create(int device);

  /// Microseconds from before the work to after it, launched piece by piece.
  Result<double> launched(const Work& work);
  /// Captures the work in a graph, replays it once untimed and then `count` times: the microseconds of each.
  Result<std::vector<double>> replayed(const Work& work, int count);

 private:
  struct State;
  explicit Timer(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// Reads pieces of device memory, `bytes` (a multiple of 16) from base + index * stride on, for each of the
/// `count` indices in device memory. Nothing is made of what is read.
struct ReadArgs {
  const std::byte* base = nullptr;
  std::int64_t stride = 0, bytes = 0;
  const std::int32_t* indices = nullptr;
  int count = 0;
};
Status launch_read(const ReadArgs& args, int device, Stream stream);

}  // namespace gatefold::cuda
