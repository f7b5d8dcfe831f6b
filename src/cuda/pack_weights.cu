#include "cuda/elements.cuh"
#include "cuda/weights.h"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;

template <class Value>
__global__ void __launch_bounds__(kThreads) pack_records(const __grid_constant__ PackJob job) {
  for (std::int64_t unit = job.first_unit + blockIdx.y; unit < job.end_unit; unit += gridDim.y)
    for (std::int64_t record = blockIdx.x; record < job.shape.records; record += gridDim.x)
      pack_record(job, Value::format, unit, record, threadIdx.x, kThreads);
}

/// A warp for each row.
__global__ void __launch_bounds__(kThreads) pack_row_scales(const __grid_constant__ PackJob job) {
  const int lane = threadIdx.x % 32;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t i = job.first_unit * kUnitRows + blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
       i < job.end_unit * kUnitRows; i += warps) {
    const PackRow at = row_of(job, i / kUnitRows, static_cast<int>(i % kUnitRows));
    RowRange range = range_of_share(job, at, lane, 32);
    range.finite = __all_sync(~0u, range.finite);
    range.largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(range.largest)));  // not negative
    if (lane == 0) reinterpret_cast<float*>(job.out)[i] = row_scale(job.shape.format, at, range);
  }
}

/// The first scheme of the table whose weights are of this format.
constexpr SchemeId first_with_value(Format value) {
  std::size_t i = 0;
  while (!(operands::table[i].weight.value == value)) ++i;
  return static_cast<SchemeId>(i);
}

}  // namespace

cudaError_t launch_pack(const PackJob& job, cudaStream_t stream) {
  constexpr std::int64_t most = 4096;
  const auto units = static_cast<unsigned>(std::min(most, job.end_unit - job.first_unit));
  const auto records = static_cast<unsigned>(std::min(most, job.shape.records));
  if (job.shape.format.row_scale) pack_row_scales<<<units, kThreads, 0, stream>>>(job);
  for_each_scheme([&]<class S>() {
    constexpr Format value = S::scheme.weight.value;
    if constexpr (first_with_value(value) == S::id)
      if (job.shape.format.value == value)
        pack_records<FormatTag<value>><<<dim3(records, units), kThreads, 0, stream>>>(job);
  });
  return cudaGetLastError();
}

}  // namespace gatefold::cuda
