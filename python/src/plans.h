#pragma once
/// \file
/// What plans of layers and of matrices share.

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "errors.h"
#include "gatefold/moe.h"
#include "torch_abi.h"

namespace gatefold::python {

/// Called before anything that may start threads. Throws if this process was forked from one in which they
/// ran: they do not exist here, and a parallel region would wait for them forever.
void use_threads();

/// Whether the plans of operators look after themselves (PlanOptions::debug_workspace), from now on.
void debug_operators(bool on);
bool debugging_operators();

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

/// The plans of operators, for up to 2^i tokens or rows. Thread-safe.
template <class Plan>
class PlansBySize {
 public:
  /// What follows from outside of a plan's options.
  struct Surroundings {
    int threads = 0;
    bool debug = false;
    friend bool operator==(const Surroundings&, const Surroundings&) = default;
  };
  /// One for at least so many; make(int most) -> std::shared_ptr<Plan> is called if there is none that was
  /// made in the same surroundings.
  template <class Make>
  std::shared_ptr<Plan> find(std::int64_t size, const Surroundings& now, const Make& make) {
    const int log2 = size <= 1 ? 0 : std::bit_width(static_cast<std::uint64_t>(size - 1));
    if (log2 >= static_cast<int>(entries_.size())) invalid(fmt::format("{} rows are more than 2^24", size));
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[static_cast<std::size_t>(log2)];
    if (entry.plan == nullptr || !(entry.made_in == now)) entry = {make(1 << log2), now};
    return entry.plan;
  }

 private:
  struct Entry {
    std::shared_ptr<Plan> plan;
    Surroundings made_in;
  };
  std::mutex mutex_;
  std::array<Entry, 25> entries_;
};

}  // namespace gatefold::python
