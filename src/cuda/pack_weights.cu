#include "cuda/elements.cuh"
#include "cuda/pack.h"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;

template <class Codes>
__global__ void __launch_bounds__(kThreads) pack_records(const __grid_constant__ PackJob job) {
  constexpr PackedFormat codes = Codes::format;
  for (std::int64_t unit = job.first_unit + blockIdx.y; unit < job.end_unit; unit += gridDim.y)
    for (std::int64_t record = blockIdx.x; record < job.shape.records; record += gridDim.x)
      pack_record(job, codes, unit, record, threadIdx.x, kThreads);
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

template <class S>
struct CodesOf {
  static constexpr PackedFormat format = format_of_codes(packed_format(S::scheme));
};

/// The first scheme of the table whose codes lie like these.
constexpr SchemeId first_with_codes(const PackedFormat& codes) {
  std::size_t i = 0;
  while (!(format_of_codes(packed_format(operands::table[i])) == codes)) ++i;
  return static_cast<SchemeId>(i);
}

}  // namespace

cudaError_t launch_pack(const PackJob& job, cudaStream_t stream) {
  constexpr std::int64_t most = 4096;
  const auto units = static_cast<unsigned>(std::min(most, job.end_unit - job.first_unit));
  const auto records = static_cast<unsigned>(std::min(most, job.shape.records));
  if (job.shape.format.row_scale) pack_row_scales<<<units, kThreads, 0, stream>>>(job);
  for_each_scheme([&]<class S>() {
    constexpr PackedFormat codes = CodesOf<S>::format;
    if constexpr (first_with_codes(codes) == S::id)
      if (format_of_codes(job.shape.format) == codes)
        pack_records<CodesOf<S>><<<dim3(records, units), kThreads, 0, stream>>>(job);
  });
  return cudaGetLastError();
}

}  // namespace gatefold::cuda
