#pragma once
/// \file
/// What benches of the GPU need: times of work in a stream, and what the device reads at best.

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gatefold/cuda.h"
#include "gatefold/format.h"

namespace gatefold::cuda {

using Work = std::function<Status(Stream)>;

/// Times work by events on the device, in a stream of its own.
class Timer {
 public:
  static Result<Timer> create(int device);

  /// Microseconds from before the work to after it, launched piece by piece.
  Result<double> launched(const Work& work);
  /// Captures the work in a graph, replays it untimed for some milliseconds and then `count` times: the
  /// microseconds of each.
  Result<std::vector<double>> replayed(const Work& work, int count);
  /// The same from a rest, and within some 20 ms, though at least once: a device multiplies at its highest
  /// clock for 25 to 35 ms, and then, until it has rested, at what its power leaves (docs/performance.md).
  Result<std::vector<double>> rested(const Work& work, int count);

 private:
  struct State;
  explicit Timer(std::shared_ptr<State> state) : state_(std::move(state)) {}
  /// Until `count` are timed, or all of them took `most_us`, but at least one.
  Result<std::vector<double>> replay(const Work& work, int count, double most_us);
  std::shared_ptr<State> state_;
};

/// Reads pieces of device memory, `bytes` (a multiple of 16) from base + index * stride on, for each of the
/// `count` indices. Nothing is made of what is read.
struct ReadArgs {
  static constexpr int kMost = 1024;
  const std::byte* base = nullptr;
  std::int64_t stride = 0, bytes = 0;
  int count = 0;
  std::uint16_t indices[kMost] = {};  ///< with the kernel's arguments: nothing is read before the pieces are
};
Status launch_read(const ReadArgs& args, int device, Stream stream);

/// GFLOP/s of a dense multiply of 8192 x 8192 x 8192 random numbers (bf16, e4m3, int8) by cuBLAS, which is
/// loaded for it, from a rest. Errors: there is none (unsupported), no memory.
Result<double> dense_gflop_per_s(Format format, int device);

/// y [rows, n] = x [rows, k] w [n, k]^T of e4m3 codes, by cuBLAS, from and to host memory: what its sums
/// lose.
Result<std::vector<float>> dense_product(std::span<const std::byte> x, std::span<const std::byte> w,
                                         std::int64_t rows, std::int64_t n, std::int64_t k, int device);

/// What the clocks are now, from the driver's management library. Errors: there is none (unsupported).
struct Clocks {
  int sm_mhz = 0, memory_mhz = 0;
};
Result<Clocks> read_clocks(int device);

}  // namespace gatefold::cuda
