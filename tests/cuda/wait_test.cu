// A wait that never ends is an error of the stream, if waits are limited.
#undef GATEFOLD_CUDA_WAIT_NS
#define GATEFOLD_CUDA_WAIT_NS 20'000'000

#include "cuda/ptx.cuh"
#include "gpu.h"

namespace gatefold::cuda {
namespace {

using WaitOnGpu = GpuTest;

/// Waits for 16 bytes, of which `copied` come.
__global__ void wait_for_bytes(const uint4* from, unsigned copied, uint4* to) {
  __shared__ std::uint64_t barrier;
  __shared__ alignas(16) uint4 bytes;
  if (threadIdx.x == 0) {
    init_barrier(&barrier, 1);
    publish_barriers();
    expect_bytes(&barrier, 16);
    if (copied != 0) copy_bulk(&bytes, from, copied, &barrier);
  }
  __syncthreads();
  wait_barrier(&barrier, 0);
  if (threadIdx.x == 0) *to = bytes;
}

// One test: after the error the process cannot use the device.
TEST_F(WaitOnGpu, WithoutEndIsAnError) {
  const DeviceVector<std::uint32_t> from(std::vector<std::uint32_t>{1, 2, 3, 4}), to(4);
  const auto wait = [&](unsigned copied) {
    wait_for_bytes<<<1, 64>>>(reinterpret_cast<const uint4*>(from.data()), copied,
                              reinterpret_cast<uint4*>(to.data()));
    return synchronize();
  };
  ASSERT_TRUE(wait(16).ok());
  EXPECT_EQ(to.host(), from.host());
  const Status status = wait(0);
  EXPECT_EQ(status.code(), Code::io_error);
  EXPECT_NE(status.message().find("cannot finish the work in a stream: "), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace gatefold::cuda
