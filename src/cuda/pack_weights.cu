#include "cuda/weights.h"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_records(const PackJob job) {
  for (std::int64_t i = blockIdx.x; i < job.shape.units * job.shape.records; i += gridDim.x)
    pack_record(job, i / job.shape.records, i % job.shape.records, threadIdx.x, kThreads);
}

/// A warp for each row.
__global__ void __launch_bounds__(kThreads) pack_row_scales(const PackJob job) {
  const int lane = threadIdx.x % 32;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t i = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; i < job.shape.units * kUnitRows;
       i += warps) {
    const PackRow at = row_of(job, i / kUnitRows, static_cast<int>(i % kUnitRows));
    const bool finite = __all_sync(~0u, !at.valid || finite_share(job, at, lane, 32));
    if (lane == 0) reinterpret_cast<float*>(job.out)[i] = row_scale(at, finite);
  }
}

}  // namespace

cudaError_t launch_pack(const PackJob& job, cudaStream_t stream) {
  constexpr std::int64_t most = 4096;
  if (job.shape.format.row_scale)
    pack_row_scales<<<static_cast<unsigned>(std::min(most, job.shape.units)), kThreads, 0, stream>>>(job);
  const std::int64_t records = job.shape.units * job.shape.records;
  pack_records<<<static_cast<unsigned>(std::min(most, records)), kThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace gatefold::cuda
