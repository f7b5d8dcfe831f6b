#include "cuda/measure.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include "cuda/device.h"

namespace gatefold::cuda {

namespace {
constexpr double kWarmUs = 5000, kMostUs = 20000;
constexpr std::chrono::milliseconds kRest(100);
}  // namespace

struct Timer::State {
  int device = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;

  Status create(int index) {
    device = index;
    const DeviceGuard guard(device);
    if (Status status = check(cudaStreamCreate(&stream), "create a stream"); !status.ok()) return status;
    if (Status status = check(cudaEventCreate(&begin), "create an event"); !status.ok()) return status;
    return check(cudaEventCreate(&end), "create an event");
  }
  ~State() {
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
  Result<double> time(const Work& work) {
    const DeviceGuard guard(device);
    if (Status status = check(cudaEventRecord(begin, stream), "record an event"); !status.ok()) return status;
    if (Status status = work(stream); !status.ok()) return status;
    if (Status status = check(cudaEventRecord(end, stream), "record an event"); !status.ok()) return status;
    if (Status status = synchronize(stream); !status.ok()) return status;
    float milliseconds = 0;
    if (Status status = check(cudaEventElapsedTime(&milliseconds, begin, end), "read a time"); !status.ok())
      return status;
    return 1000.0 * milliseconds;
  }
};

Result<Timer> Timer::create(int device) {
  auto state = std::make_shared<State>();
  if (Status status = state->create(device); !status.ok()) return status;
  return Timer(std::move(state));
}

Result<double> Timer::launched(const Work& work) {
  return state_->time(work);
}

Result<std::vector<double>> Timer::replayed(const Work& work, int count) {
  return replay(work, count, std::numeric_limits<double>::infinity());
}

Result<std::vector<double>> Timer::rested(const Work& work, int count) {
  std::this_thread::sleep_for(kRest);
  return replay(work, count, kMostUs);
}

Result<std::vector<double>> Timer::replay(const Work& work, int count, double most_us) {
  const Result<Graph> graph = Graph::record(work, state_->device);
  if (!graph) return graph.status();
  const auto launch = [&](Stream stream) { return graph->launch(stream); };
  std::vector<double> times;
  double all_us = 0;
  while (times.empty() || (static_cast<int>(times.size()) < count && all_us < most_us)) {
    const Result<double> time = state_->time(launch);
    if (!time) return time.status();
    // Clocks and caches take a while to become what they stay.
    if (all_us >= kWarmUs) times.push_back(*time);
    all_us += *time;
  }
  return times;
}

namespace {

constexpr int kThreads = 1024, kAhead = 4;

/// Blocks x read piece y, a word a thread in turn.
__global__ void __launch_bounds__(kThreads) read_kernel(const __grid_constant__ ReadArgs args, uint4* never) {
  const auto words = static_cast<unsigned>(args.bytes / 16), step = gridDim.x * kThreads;
  const auto* from = reinterpret_cast<const uint4*>(args.base + args.indices[blockIdx.y] * args.stride);
  uint4 sum{};
  for (unsigned first = blockIdx.x * kThreads + threadIdx.x; first < words; first += kAhead * step) {
    uint4 read[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i * step < words) read[i] = __ldcs(from + first + i * step);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) sum.x ^= read[i].x ^ read[i].y ^ read[i].z ^ read[i].w;
  }
  if (sum.x == 0x12345678 && never != nullptr) *never = sum;
}

}  // namespace

Status launch_read(const ReadArgs& args, int device, Stream stream) {
  const Result<DeviceInfo> info = device_info(device);
  if (!info) return info.status();
  const DeviceGuard guard(device);
  // `never` is only known to be null on the host: the compiler cannot leave the reads out.
  const int each = std::max(1, 2 * info->multiprocessors / args.count);
  read_kernel<<<dim3(each, args.count), kThreads, 0, native(stream)>>>(args, nullptr);
  return check_launch("launch a read");
}

}  // namespace gatefold::cuda
