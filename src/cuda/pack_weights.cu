#include "cuda/weights.h"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_records(const __grid_constant__ PackJob job) {
  for (std::int64_t unit = job.first_unit + blockIdx.y; unit < job.end_unit; unit += gridDim.y)
    for (std::int64_t record = blockIdx.x; record < job.shape.records; record += gridDim.x)
      pack_record(job, unit, record, threadIdx.x, kThreads);
}

/// A warp for each row.
__global__ void __launch_bounds__(kThreads) pack_row_scales(const __grid_constant__ PackJob job) {
  const int lane = threadIdx.x % 32;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t i = job.first_unit * kUnitRows + blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
       i < job.end_unit * kUnitRows; i += warps) {
    const PackRow at = row_of(job, i / kUnitRows, static_cast<int>(i % kUnitRows));
    const bool finite = __all_sync(~0u, !at.valid || finite_share(job, at, lane, 32));
    if (lane == 0) reinterpret_cast<float*>(job.out)[i] = row_scale(at, finite);
  }
}

}  // namespace

cudaError_t launch_pack(const PackJob& job, cudaStream_t stream) {
  constexpr std::int64_t most = 4096;
  const auto units = static_cast<unsigned>(std::min(most, job.end_unit - job.first_unit));
  const auto records = static_cast<unsigned>(std::min(most, job.shape.records));
  if (job.shape.format.row_scale) pack_row_scales<<<units, kThreads, 0, stream>>>(job);
  pack_records<<<dim3(records, units), kThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace gatefold::cuda
