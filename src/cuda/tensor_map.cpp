#include "cuda/tensor_map.h"

#include "cuda/dynamic_library.h"

namespace gatefold::cuda {
namespace {

using Encode = decltype(cuTensorMapEncodeTiled);

/// Of the driver, which is not linked; nullptr if it has none.
Encode* encode_function() {
  Encode* function = nullptr;
  if (Result<DynamicLibrary> driver = DynamicLibrary::open("libcuda.so.1"))
    driver->find("cuTensorMapEncodeTiled", function);
  return function;
}

}  // namespace

cudaError_t make_row_boxes(const void* rows, std::int64_t row_bytes, std::int64_t count, int box_rows,
                           CUtensorMap* map) {
  static Encode* const encode = encode_function();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(count)},
                   strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {128, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(rows), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace gatefold::cuda
