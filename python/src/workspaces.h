#pragma once
/// \file
/// Memory for calls of plans.

#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "errors.h"
#include "gatefold/moe.h"
#include "torch_abi.h"

namespace gatefold::python {

/// Workspaces for as many calls as run at once. Thread-safe.
class Workspaces {
 public:
  Workspaces(std::size_t bytes, const Device& device) : bytes_(bytes), device_(device) {}

  /// Calls work(std::span<std::byte>) -> Status, which queues in `stream`, with memory that is its own:
  /// torch's if the stream is the one in which torch works (`in_torch`), as graph capture wants it; else
  /// memory that only later calls in the stream have again.
  template <class Work>
  void lend(cuda::Stream stream, bool in_torch, const Work& work) {
    if (in_torch && device_.kind == Device::Kind::cuda) {
      const TorchMemory memory(bytes_, device_.index);
      return check(work(memory.bytes()));
    }
    Workspace mine = take(stream);
    Status done =
        work(mine.host.empty() ? std::span(mine.device.data(), mine.device.bytes()) : std::span(mine.host));
    give_back(std::move(mine));
    check(std::move(done));
  }

 private:
  struct Workspace {
    cuda::Stream stream = nullptr;  ///< the order in which it may be used again
    std::vector<std::byte> host;
    cuda::Memory device;
  };
  Workspace take(cuda::Stream stream);
  void give_back(Workspace workspace);

  std::size_t bytes_;
  Device device_;
  std::mutex mutex_;
  std::vector<Workspace> free_;
};

}  // namespace gatefold::python
