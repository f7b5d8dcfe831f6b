#include "cuda/device.h"

namespace gatefold::cuda {

struct Graph::State {
  int device = 0;
  cudaStream_t stream = nullptr;  // of recording
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t launchable = nullptr;

  ~State() {
    const DeviceGuard guard(device);
    if (launchable != nullptr) cudaGraphExecDestroy(launchable);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};

Result<Graph> Graph::record(const std::function<Status(Stream)>& work, int device) {
  if (const auto info = device_info(device); !info) return info.status();
  const DeviceGuard guard(device);
  auto state = std::make_shared<State>();
  state->device = device;
  if (Status status =
          check(cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking), "create a stream");
      !status.ok())
    return status;
  if (Status status =
          check(cudaStreamBeginCapture(state->stream, cudaStreamCaptureModeThreadLocal), "record a graph");
      !status.ok())
    return status;
  const Status done = work(state->stream);
  const cudaError_t ended = cudaStreamEndCapture(state->stream, &state->graph);
  if (!done.ok()) {
    cudaGetLastError();
    return done;
  }
  if (Status status = check(ended, "record a graph"); !status.ok()) return status;
  if (Status status = check(cudaGraphInstantiate(&state->launchable, state->graph), "instantiate a graph");
      !status.ok())
    return status;
  return Graph(std::move(state));
}

Status Graph::launch(Stream stream) const {
  const DeviceGuard guard(state_->device);
  return check(cudaGraphLaunch(state_->launchable, native(stream)), "launch a graph");
}

}  // namespace gatefold::cuda
