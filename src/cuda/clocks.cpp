#include <fmt/format.h>

#include <array>

#include "cuda/device.h"
#include "cuda/dynamic_library.h"
#include "cuda/measure.h"

namespace gatefold::cuda {
namespace {

// As nvml.h has them.
using NvmlDevice = struct nvmlDevice_st*;
constexpr int kNvmlClockSm = 1, kNvmlClockMemory = 2;

/// The driver's management library.
struct Nvml {
  int (*init)() = nullptr;
  int (*device_by_bus_id)(const char* bus_id, NvmlDevice* device) = nullptr;
  int (*clock)(NvmlDevice device, int type, unsigned* mhz) = nullptr;

  static Result<Nvml> load() {
    Result<DynamicLibrary> library = DynamicLibrary::open("libnvidia-ml.so.1");
    if (!library) return library.status();
    Nvml nvml;
    library->find("nvmlInit_v2", nvml.init);
    library->find("nvmlDeviceGetHandleByPciBusId_v2", nvml.device_by_bus_id);
    library->find("nvmlDeviceGetClockInfo", nvml.clock);
    if (!library->status().ok()) return library->status();
    if (const int error = nvml.init(); error != 0)
      return Status(Code::unsupported, fmt::format("NVML does not start: error {}", error));
    return nvml;
  }
};

}  // namespace

Result<Clocks> read_clocks(int device) {
  static const Result<Nvml> nvml = Nvml::load();
  if (!nvml) return nvml.status();
  std::array<char, 32> bus_id{};
  if (Status status = check(cudaDeviceGetPCIBusId(bus_id.data(), bus_id.size(), device), "ask for a bus id");
      !status.ok())
    return status;
  NvmlDevice handle = nullptr;
  unsigned sm = 0, memory = 0;
  int error = nvml->device_by_bus_id(bus_id.data(), &handle);
  if (error == 0) error = nvml->clock(handle, kNvmlClockSm, &sm);
  if (error == 0) error = nvml->clock(handle, kNvmlClockMemory, &memory);
  if (error != 0) return Status(Code::io_error, fmt::format("NVML cannot read the clocks: error {}", error));
  return Clocks{static_cast<int>(sm), static_cast<int>(memory)};
}

}  // namespace gatefold::cuda
