#include "cuda/dynamic_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace gatefold::cuda {

Result<DynamicLibrary> DynamicLibrary::open(const char* name) {
  DynamicLibrary library;
  library.name_ = name;
  library.handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library.handle_ == nullptr) return Status(Code::unsupported, fmt::format("not loaded: {}", dlerror()));
  return library;
}

void* DynamicLibrary::address(const char* symbol) {
  void* found = dlsym(handle_, symbol);
  if (found == nullptr && status_.ok())
    status_ = Status(Code::unsupported, fmt::format("{} has no {}", name_, symbol));
  return found;
}

}  // namespace gatefold::cuda
