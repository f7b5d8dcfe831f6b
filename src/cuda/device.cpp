#include "cuda/device.h"

#include <fmt/format.h>

namespace gatefold::cuda {

Status check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return {Code::io_error,
          fmt::format("cannot {}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error))};
}

Status check_architecture(const DeviceInfo& device) {
  if (device.major == 9 && device.minor == 0) return {};
  return {Code::unsupported, fmt::format("device {} ({}) is sm_{}{}; the CUDA kernels need sm_90 (Hopper)",
                                         device.index, device.name, device.major, device.minor)};
}

DeviceGuard::DeviceGuard(int device) : device_(device), previous_(device) {
  if (cudaGetDevice(&previous_) == cudaSuccess && previous_ != device_) cudaSetDevice(device_);
}
DeviceGuard::~DeviceGuard() {
  if (previous_ != device_) cudaSetDevice(previous_);
}

Result<DeviceInfo> device_info(int index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    const char* why = error == cudaErrorInsufficientDriver ? "no driver for CUDA 13 is installed"
                      : error == cudaErrorInitializationError
                          ? "CUDA does not start (a forked process cannot use what its parent has started)"
                      : error == cudaSuccess || error == cudaErrorNoDevice ? "none is there"
                                                                           : cudaGetErrorString(error);
    return Status(Code::unsupported, fmt::format("no NVIDIA GPU can be used: {}", why));
  }
  if (index < 0 || index >= count)
    return Status(Code::invalid_argument, fmt::format("CUDA device {}: this machine has {}", index, count));
  cudaDeviceProp properties{};
  if (Status status = check(cudaGetDeviceProperties(&properties, index), "ask what the GPU is"); !status.ok())
    return status;
  DeviceInfo info{.index = index,
                  .name = properties.name,
                  .major = properties.major,
                  .minor = properties.minor,
                  .multiprocessors = properties.multiProcessorCount,
                  .memory_bytes = properties.totalGlobalMem,
                  .l2_bytes = static_cast<std::size_t>(properties.l2CacheSize)};
  if (Status status = check_architecture(info); !status.ok()) return status;
  return info;
}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  std::swap(place_, other.place_);
  return *this;
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  const DeviceGuard guard(device_);
  place_ == Place::device ? cudaFree(data_) : cudaFreeHost(data_);
}

Result<Memory> Memory::allocate(std::size_t bytes, std::string_view what, int device, Place place) {
  Result<DeviceInfo> info = device_info(device);
  if (!info) return info.status();
  Memory memory;
  memory.device_ = device;
  memory.place_ = place;
  if (bytes == 0) return memory;

  const DeviceGuard guard(device);
  void* data = nullptr;
  const cudaError_t error = place == Place::device ? cudaMalloc(&data, bytes) : cudaMallocHost(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    if (place == Place::pinned)
      return Status(Code::io_error, fmt::format("no page-locked memory for {}: {} bytes", what, bytes));
    std::size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return Status(Code::io_error,
                  fmt::format("no device memory for {}: {} bytes, and {} of {} are free on device {} ({})",
                              what, bytes, free, total, device, info->name));
  }
  if (Status status = check(error, fmt::format("allocate {} bytes for {}", bytes, what)); !status.ok())
    return status;
  memory.data_ = static_cast<std::byte*>(data);
  memory.bytes_ = bytes;
  return memory;
}

Status copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)),
               fmt::format("copy {} bytes", bytes));
}

Status fill(void* to, unsigned char byte, std::size_t bytes, Stream stream) {
  return check(cudaMemsetAsync(to, byte, bytes, native(stream)), fmt::format("fill {} bytes", bytes));
}

Status synchronize(Stream stream) {
  return check(cudaStreamSynchronize(native(stream)), "finish the work in a stream");
}

}  // namespace gatefold::cuda
