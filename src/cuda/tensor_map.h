#pragma once
/// \file
/// What copies in bulk by coordinates need to know of a tensor.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace gatefold::cuda {

/// [rows, bytes], a multiple of 16 bytes from one row to the next and aligned to as many, to be copied in
/// boxes of so many rows (at most 256) by 128 bytes, which are swizzled as multiplies by warpgroups read
/// them. What rows or columns lack is 0. Errors: what the driver says.
cudaError_t make_row_boxes(const void* rows, std::int64_t row_bytes, std::int64_t count, int box_rows,
                           CUtensorMap* map);

}  // namespace gatefold::cuda
