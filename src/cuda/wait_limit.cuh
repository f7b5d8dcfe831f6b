#pragma once
/// \file
/// A limit to waiting for other threads, so that a kernel that hangs says so.

#include <cstdint>

namespace gatefold::cuda {

/// For debugging: a wait that lasts longer ends its kernel with an error. 0: there is no limit, and no cost.
#ifndef GATEFOLD_CUDA_WAIT_NS
#define GATEFOLD_CUDA_WAIT_NS 0
#endif

/// Part of every loop that waits for other threads: for (WaitLimit limit; not yet; limit.check()) ...
class WaitLimit {
 public:
  __device__ __forceinline__ void check() {
    if constexpr (kLimit != 0) {
      const std::uint64_t now = nanoseconds();
      if (begin_ == 0) begin_ = now;
      if (now - begin_ > kLimit) __trap();  // "unspecified launch failure"
    }
  }

 private:
  static constexpr std::uint64_t kLimit = GATEFOLD_CUDA_WAIT_NS;
  static __device__ std::uint64_t nanoseconds() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
  std::uint64_t begin_ = 0;
};

}  // namespace gatefold::cuda
