#include "cuda/device.h"

#include "gpu.h"

namespace gatefold {
namespace {

TEST(CudaDevice, OlderAndNewerGpusAreRefusedByName) {
  EXPECT_TRUE(cuda::check_architecture({.name = "NVIDIA H200", .major = 9}).ok());
  const Status older = cuda::check_architecture({.index = 1, .name = "NVIDIA A100", .major = 8});
  EXPECT_EQ(older.code(), Code::unsupported);
  EXPECT_EQ(older.message(), "device 1 (NVIDIA A100) is sm_80; the CUDA kernels need sm_90 (Hopper)");
  EXPECT_FALSE(cuda::check_architecture({.name = "NVIDIA B200", .major = 10}).ok());
}

TEST(CudaDevice, ErrorsSayWhatWasTried) {
  EXPECT_TRUE(cuda::check(cudaSuccess, "copy").ok());
  const Status status = cuda::check(cudaErrorInvalidValue, "copy 12 bytes");
  EXPECT_NE(status.message().find("cannot copy 12 bytes"), std::string::npos);
  EXPECT_NE(status.message().find("cudaErrorInvalidValue"), std::string::npos);
}

TEST(CudaDevice, WithoutAGpuItIsSaid) {
  const auto device = cuda::device_info();
  if (device) GTEST_SKIP() << "there is one: " << device->name;
  EXPECT_EQ(device.status().code(), Code::unsupported);
  EXPECT_EQ(cuda::Memory::allocate(16, "a test").status().message(), device.status().message());
  EXPECT_EQ(cuda::Graph::record([](cuda::Stream) { return Status(); }).status().message(),
            device.status().message());
}

class CudaMemory : public GpuTest {};

TEST_F(CudaMemory, GoesThereAndBack) {
  std::vector<int> values(1000);
  for (int i = 0; i < 1000; ++i) values[i] = i * i;
  const DeviceVector<int> there(values);
  EXPECT_EQ(there.host(), values);
  auto pinned = cuda::Memory::allocate(4000, "a test", 0, cuda::Place::pinned);
  ASSERT_TRUE(pinned.ok());
  ASSERT_TRUE(cuda::copy(pinned->data(), there.data(), 4000).ok());
  ASSERT_TRUE(cuda::synchronize().ok());
  EXPECT_EQ(std::vector<int>(pinned->as<int>(), pinned->as<int>() + 1000), values);
}

TEST_F(CudaMemory, TooMuchSaysHowMuchAndForWhat) {
  const auto device = cuda::device_info();
  const auto memory = cuda::Memory::allocate(device->memory_bytes + 1, "packed weights");
  ASSERT_FALSE(memory.ok());
  EXPECT_EQ(memory.status().code(), Code::io_error);
  EXPECT_EQ(memory.status().message().find("no device memory for packed weights: " +
                                           std::to_string(device->memory_bytes + 1) + " bytes"),
            0u);
  EXPECT_TRUE(cuda::Memory::allocate(1 << 20, "a test").ok());  // the error is not sticky
}

TEST_F(CudaMemory, NoSuchDevice) {
  EXPECT_EQ(cuda::device_info(1000).status().code(), Code::invalid_argument);
  EXPECT_EQ(cuda::device_info(-1).status().code(), Code::invalid_argument);
}

class CudaGraph : public GpuTest {};

TEST_F(CudaGraph, WorksWhenItIsLaunched) {
  const DeviceVector<unsigned> numbers(1000, 0);
  const auto graph =
      cuda::Graph::record([&](cuda::Stream stream) { return cuda::fill(numbers.data(), 1, 4000, stream); });
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  EXPECT_EQ(numbers.host(), std::vector<unsigned>(1000, 0));
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(cuda::fill(numbers.data(), 0, 4000).ok());
    ASSERT_TRUE(graph->launch().ok());
    EXPECT_EQ(numbers.host(), std::vector<unsigned>(1000, 0x01010101));
  }
}

TEST_F(CudaGraph, ErrorsOfRecordingComeBack) {
  const auto failed =
      cuda::Graph::record([](cuda::Stream) { return Status(Code::invalid_argument, "no such layer"); });
  EXPECT_EQ(failed.status().message(), "no such layer");
  const auto waits = cuda::Graph::record([](cuda::Stream stream) { return cuda::synchronize(stream); });
  EXPECT_NE(waits.status().message().find("cannot finish the work in a stream"), std::string::npos)
      << waits.status().message();
  EXPECT_EQ(cuda::Graph::record([](cuda::Stream) { return Status(); }, 1000).status().code(),
            Code::invalid_argument);
  EXPECT_TRUE(cuda::synchronize().ok());
}

}  // namespace
}  // namespace gatefold
