#include "cuda/blas.h"

#include <fmt/format.h>

#include "cuda/dynamic_library.h"

namespace gatefold::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = 32 << 20;

// As cublas_api.h has them.
constexpr int kPlain = 0, kTransposed = 1;
struct Cublas {
  int (*create)(void** handle) = nullptr;
  int (*destroy)(void* handle) = nullptr;
  int (*set_stream)(void* handle, cudaStream_t stream) = nullptr;
  int (*set_workspace)(void* handle, void* workspace, std::size_t bytes) = nullptr;
  int (*sgemm)(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const float* alpha,
               const float* a, int lda, const float* b, int ldb, const float* beta, float* c,
               int ldc) = nullptr;

  static Result<Cublas> load() {
    Result<DynamicLibrary> library = DynamicLibrary::open("libcublas.so.13");
    if (!library) return library.status();
    Cublas found;
    library->find("cublasCreate_v2", found.create);
    library->find("cublasDestroy_v2", found.destroy);
    library->find("cublasSetStream_v2", found.set_stream);
    library->find("cublasSetWorkspace_v2", found.set_workspace);
    library->find("cublasSgemm_v2", found.sgemm);
    if (!library->status().ok()) return library->status();
    return found;
  }
};

const Result<Cublas>& cublas() {
  static const Result<Cublas> loaded = Cublas::load();
  return loaded;
}

Status check_cublas(int error) {
  if (error == 0) return {};
  return {Code::io_error, fmt::format("cuBLAS: error {}", error)};
}

}  // namespace

Result<Blas> Blas::create(int device, Stream stream) {
  if (!cublas()) return cublas().status();
  const DeviceGuard guard(device);
  Blas blas;
  Result<Memory> workspace = Memory::allocate(kWorkspaceBytes, "cuBLAS", device);
  if (!workspace) return workspace.status();
  blas.workspace_ = std::move(*workspace);
  if (Status status = check_cublas(cublas()->create(&blas.handle_)); !status.ok()) return status;
  for (const int error : {cublas()->set_stream(blas.handle_, native(stream)),
                          cublas()->set_workspace(blas.handle_, blas.workspace_.data(), kWorkspaceBytes)})
    if (Status status = check_cublas(error); !status.ok()) return status;
  return blas;
}

Blas& Blas::operator=(Blas&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(workspace_, other.workspace_);
  std::swap(status_, other.status_);
  return *this;
}

Blas::~Blas() {
  if (handle_ != nullptr) cublas()->destroy(handle_);
}

/// cuBLAS thinks in columns: it is told to compute c^T = b^T a^T.
void Blas::multiply(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const Rows& a, const Rows& b,
                    float beta, float* c, std::int64_t stride) {
  if (!status_.ok() || m == 0 || n == 0) return;
  status_ = check_cublas(cublas()->sgemm(
      handle_, b.transposed ? kTransposed : kPlain, a.transposed ? kTransposed : kPlain, static_cast<int>(n),
      static_cast<int>(m), static_cast<int>(k), &alpha, b.data, static_cast<int>(b.stride), a.data,
      static_cast<int>(a.stride), &beta, c, static_cast<int>(stride)));
}

}  // namespace gatefold::cuda
