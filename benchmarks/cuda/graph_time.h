#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

namespace gatefold {

/// Time of one call in microseconds: the median over replays of a graph of several calls, which work on
/// copies in turn, so that data comes from memory.
template <class Call>
double graph_us(int calls, Call&& call) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t begin, end;
  cudaStreamCreate(&stream);
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  for (int i = 0; i < calls; ++i) call(i, stream);
  cudaStreamEndCapture(stream, &graph);
  if (cudaGraphInstantiate(&replay, graph) != cudaSuccess) return 0;
  std::vector<float> times;
  for (int i = -3; i < 21; ++i) {
    cudaEventRecord(begin, stream);
    cudaGraphLaunch(replay, stream);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 0) times.push_back(ms * 1000);
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2] / calls;
}

}  // namespace gatefold
