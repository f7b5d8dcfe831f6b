#pragma once
/// \file
/// NVIDIA GPUs: what is there, and memory on it. No CUDA header is needed to include this one.
///
/// The kernels need sm_90 (Hopper: H100, H200, GH200). Nothing of the driver is linked: the same binary
/// starts on machines without a GPU, and says so when it is asked for one. In a build without CUDA
/// (GATEFOLD_CUDA=OFF) every function returns Code::unsupported.
///
/// Functions are thread-safe and leave the calling thread's current device as it was. Work is stream-ordered:
/// a call that takes a Stream returns before its work is done, and works under stream capture.

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "gatefold/status.h"

namespace gatefold::cuda {

/// A cudaStream_t; nullptr is the default stream. It must belong to the current device.
using Stream = void*;

struct DeviceInfo {
  int index = 0;
  std::string name;  ///< "NVIDIA H200"
  int major = 0;     ///< compute capability: sm_90 is 9.0
  int minor = 0;
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::size_t l2_bytes = 0;
};

/// Makes a GPU the calling thread's current one, for as long as the guard lives: the default stream is the
/// current device's. Does nothing where there is none.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_, previous_;
};

/// The GPU with this index. Errors: no driver, no GPU, one that is not sm_90 (unsupported); an index that
/// this machine does not have (invalid_argument).
Result<DeviceInfo> device_info(int index = 0);

enum class Place : unsigned char {
  device,
  pinned,  ///< page-locked host memory: copies from it run at the full rate, and beside other work
};

/// Memory that is freed with its handle. Freeing waits until the device is idle.
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  /// Not initialized, aligned to 256 bytes; 0 bytes are fine. `what` it is for appears in errors: those of
  /// device_info, and too little memory (io_error: "no device memory for packed weights: ...").
  static Result<Memory> allocate(std::size_t bytes, std::string_view what, int device = 0,
                                 Place place = Place::device);

  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }
  Place place() const { return place_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int device_ = 0;
  Place place_ = Place::device;
};

/// Copies between any two of host, pinned and device memory. From or to pinned memory: stream-ordered; other
/// host memory is read, or has been written, when the call returns.
Status copy(void* to, const void* from, std::size_t bytes, Stream stream = nullptr);

/// Sets every byte of device memory. Stream-ordered.
Status fill(void* to, unsigned char byte, std::size_t bytes, Stream stream = nullptr);

/// Waits for all work in the stream. Errors: what went wrong in it.
Status synchronize(Stream stream = nullptr);

/// Calls that are recorded once and launched many times. A launch costs the host about as much as that of one
/// kernel, however many kernels the calls have (docs/performance.md). Pointers and shapes are those of the
/// recorded calls, whose memory has to outlive the graph; what lies there may change from launch to launch.
class Graph {
 public:
  /// Records what `work` does in the stream that it is given, on this device, and does none of it. Errors:
  /// those of `work` and of device_info; what cannot be recorded (io_error), such as waiting for a stream.
  static Result<Graph> record(const std::function<Status(Stream)>& work, int device = 0);

  /// Stream-ordered; launches of one graph come one after the other in any streams. For one thread at a time.
  Status launch(Stream stream = nullptr) const;

 private:
  struct State;
  explicit Graph(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace gatefold::cuda
