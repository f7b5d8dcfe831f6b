#include "torch_abi.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <type_traits>

#include "errors.h"

namespace gatefold::python {
namespace {

TorchFunctions find_functions() {
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) throw StatusError{{Code::unsupported, "torch is not loaded (no libtorch_cpu.so)"}};
  TorchFunctions found;
  const auto find = [](void* in, auto& function, const char* name, bool needed) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(in, name));
    if (function == nullptr && needed)
      throw StatusError{
          {Code::unsupported, fmt::format("this torch has no {}: it is older than 2.10", name)}};
  };
#define GATEFOLD_TORCH(result, name, arguments) find(library, found.name, #name, true);
  GATEFOLD_TORCH_FUNCTIONS(GATEFOLD_TORCH)
#undef GATEFOLD_TORCH
  if (void* with_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD); with_cuda != nullptr) {
#define GATEFOLD_TORCH(result, name, arguments) find(with_cuda, found.name, #name, true);
    GATEFOLD_TORCH_CUDA_FUNCTIONS(GATEFOLD_TORCH)
#undef GATEFOLD_TORCH
  }
  return found;
}

}  // namespace

const TorchFunctions& torch_functions() {
  static const TorchFunctions functions = find_functions();
  return functions;
}

void* torch_stream(std::int32_t device) {
  const TorchFunctions& torch = torch_functions();
  if (torch.aoti_torch_get_current_cuda_stream == nullptr)
    throw StatusError{{Code::unsupported, "this torch was built without CUDA"}};
  void* stream = nullptr;
  if (torch.aoti_torch_get_current_cuda_stream(device, &stream) != 0)
    throw StatusError{{Code::internal, "torch: get_current_cuda_stream failed"}};
  return stream;
}

TorchMemory::TorchMemory(std::size_t bytes, std::int32_t device) {
  const TorchFunctions& torch = torch_functions();
  TorchGuard guard = nullptr;
  void* data = nullptr;
  bool ok = torch.aoti_torch_create_cuda_guard(device, &guard) == 0;
  ok = ok && torch.aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &data) == 0;
  if (guard != nullptr) torch.aoti_torch_delete_cuda_guard(guard);
  if (!ok) throw StatusError{{Code::io_error, fmt::format("torch has no {} bytes on GPU {}", bytes, device)}};
  bytes_ = {static_cast<std::byte*>(data), bytes};
}

TorchMemory::~TorchMemory() {
  if (!bytes_.empty()) torch_functions().aoti_torch_cuda_caching_allocator_raw_delete(bytes_.data());
}

}  // namespace gatefold::python
