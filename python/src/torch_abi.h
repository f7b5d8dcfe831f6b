#pragma once
/// \file
/// The part of torch's stable C interface that the operators use, found in the torch that is loaded: nothing
/// of torch is needed to build, and one module serves torch >= 2.10. Names and meanings: the headers
/// torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h; python/tests/test_torch_abi.py
/// compares these declarations with them.

#include <cstddef>
#include <cstdint>
#include <span>

struct AtenTensorOpaque;
struct StringOpaque;
class TorchLibraryOpaque;
struct CUDAGuardOpaque;

namespace gatefold::python {

/// 0: no error.
using TorchError = std::int32_t;
using TorchTensor = AtenTensorOpaque*;
using TorchString = StringOpaque*;
using TorchLibrary = TorchLibraryOpaque*;
using TorchGuard = CUDAGuardOpaque*;
/// A boxed argument or result: a number or a handle in 64 bits.
using TorchValue = std::uint64_t;
using TorchKernel = void (*)(TorchValue* stack, std::uint64_t inputs, std::uint64_t outputs);

/// Of the interface as it is used here: 2.10.
inline constexpr std::uint64_t kTorchVersion = 2ull << 56 | 10ull << 48;

// GATEFOLD_TORCH(result, name, arguments)
#define GATEFOLD_TORCH_FUNCTIONS(GATEFOLD_TORCH)                                                          \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_device_type_cpu, ())                                            \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_device_type_cuda, ())                                           \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_dtype_float32, ())                                              \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_dtype_float64, ())                                              \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_dtype_float16, ())                                              \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_dtype_bfloat16, ())                                             \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_dtype_int32, ())                                                \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_dtype_int64, ())                                                \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_dtype_uint8, ())                                                \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_dtype_int8, ())                                                 \
  GATEFOLD_TORCH(std::int32_t, aoti_torch_dtype_float8_e4m3fn, ())                                        \
  GATEFOLD_TORCH(TorchError, aoti_torch_delete_tensor_object, (TorchTensor))                              \
  GATEFOLD_TORCH(TorchError, aoti_torch_get_data_ptr, (TorchTensor, void**))                              \
  GATEFOLD_TORCH(TorchError, aoti_torch_get_dim, (TorchTensor, std::int64_t*))                            \
  GATEFOLD_TORCH(TorchError, aoti_torch_get_sizes, (TorchTensor, std::int64_t**))                         \
  GATEFOLD_TORCH(TorchError, aoti_torch_get_strides, (TorchTensor, std::int64_t**))                       \
  GATEFOLD_TORCH(TorchError, aoti_torch_get_dtype, (TorchTensor, std::int32_t*))                          \
  GATEFOLD_TORCH(TorchError, aoti_torch_get_device_type, (TorchTensor, std::int32_t*))                    \
  GATEFOLD_TORCH(TorchError, aoti_torch_get_device_index, (TorchTensor, std::int32_t*))                   \
  GATEFOLD_TORCH(TorchError, aoti_torch_empty_strided,                                                    \
                 (std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t, std::int32_t,     \
                  std::int32_t, TorchTensor*))                                                            \
  GATEFOLD_TORCH(TorchError, aoti_torch_library_init_impl,                                                \
                 (const char*, const char*, const char*, std::uint32_t, TorchLibrary*))                   \
  GATEFOLD_TORCH(TorchError, torch_library_impl, (TorchLibrary, const char*, TorchKernel, std::uint64_t)) \
  GATEFOLD_TORCH(TorchError, torch_string_length, (TorchString, std::size_t*))                            \
  GATEFOLD_TORCH(TorchError, torch_string_c_str, (TorchString, const char**))                             \
  GATEFOLD_TORCH(TorchError, torch_delete_string, (TorchString))
// Only where torch was built with CUDA:
#define GATEFOLD_TORCH_CUDA_FUNCTIONS(GATEFOLD_TORCH)                                              \
  GATEFOLD_TORCH(TorchError, aoti_torch_get_current_cuda_stream, (std::int32_t, void**))           \
  GATEFOLD_TORCH(TorchError, aoti_torch_create_cuda_guard, (std::int32_t, TorchGuard*))            \
  GATEFOLD_TORCH(TorchError, aoti_torch_delete_cuda_guard, (TorchGuard))                           \
  GATEFOLD_TORCH(TorchError, aoti_torch_cuda_caching_allocator_raw_alloc, (std::uint64_t, void**)) \
  GATEFOLD_TORCH(TorchError, aoti_torch_cuda_caching_allocator_raw_delete, (void*))

struct TorchFunctions {
#define GATEFOLD_TORCH(result, name, arguments) result(*name) arguments = nullptr;
  GATEFOLD_TORCH_FUNCTIONS(GATEFOLD_TORCH)
  GATEFOLD_TORCH_CUDA_FUNCTIONS(GATEFOLD_TORCH)
#undef GATEFOLD_TORCH
};

/// Of the torch that is loaded. Throws Unsupported if none is, or an older one.
const TorchFunctions& torch_functions();

/// What torch has queued its work in for this GPU, in this thread.
void* torch_stream(std::int32_t device);

/// Bytes on a GPU from torch's allocator, for work in torch_stream(): they may be had again by later work in
/// it, also while a graph is captured.
class TorchMemory {
 public:
  TorchMemory(std::size_t bytes, std::int32_t device);
  ~TorchMemory();
  TorchMemory(const TorchMemory&) = delete;
  TorchMemory& operator=(const TorchMemory&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace gatefold::python
