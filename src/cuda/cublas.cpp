// Dense multiplies by cuBLAS, as yardsticks of rates and of errors.
#include <fmt/format.h>
#include <library_types.h>

#include <algorithm>
#include <random>

#include "cuda/device.h"
#include "cuda/dynamic_library.h"
#include "cuda/measure.h"
#include "format/median.h"
#include "gatefold/codec.h"

namespace gatefold::cuda {
namespace {

// As cublasLt.h has them.
constexpr int kCompute32f = 68, kCompute32i = 72, kTransposeA = 3, kMostWorkspace = 1, kTranspose = 1;
struct LtAlgorithm {
  std::uint64_t data[8];
};
struct LtHeuristic {
  LtAlgorithm algorithm;
  std::size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

struct CublasLt {
  int (*create)(void** handle) = nullptr;
  int (*destroy)(void* handle) = nullptr;
  int (*create_multiply)(void** multiply, int compute, int scale_type) = nullptr;
  int (*set_multiply)(void* multiply, int attribute, const void* value, std::size_t bytes) = nullptr;
  int (*destroy_multiply)(void* multiply) = nullptr;
  int (*create_matrix)(void** matrix, int type, std::uint64_t rows, std::uint64_t cols,
                       std::int64_t stride) = nullptr;
  int (*destroy_matrix)(void* matrix) = nullptr;
  int (*create_preference)(void** preference) = nullptr;
  int (*set_preference)(void* preference, int attribute, const void* value, std::size_t bytes) = nullptr;
  int (*destroy_preference)(void* preference) = nullptr;
  int (*choose)(void* handle, void* multiply, void* a, void* b, void* c, void* d, void* preference, int count,
                LtHeuristic* found, int* found_count) = nullptr;
  int (*multiply)(void* handle, void* multiply, const void* alpha, const void* a, void* a_matrix,
                  const void* b, void* b_matrix, const void* beta, const void* c, void* c_matrix, void* d,
                  void* d_matrix, const LtAlgorithm* algorithm, void* workspace, std::size_t workspace_bytes,
                  cudaStream_t stream) = nullptr;

  static Result<CublasLt> load() {
    Result<DynamicLibrary> library = DynamicLibrary::open("libcublasLt.so.13");
    if (!library) return library.status();
    CublasLt lt;
    library->find("cublasLtCreate", lt.create);
    library->find("cublasLtDestroy", lt.destroy);
    library->find("cublasLtMatmulDescCreate", lt.create_multiply);
    library->find("cublasLtMatmulDescSetAttribute", lt.set_multiply);
    library->find("cublasLtMatmulDescDestroy", lt.destroy_multiply);
    library->find("cublasLtMatrixLayoutCreate", lt.create_matrix);
    library->find("cublasLtMatrixLayoutDestroy", lt.destroy_matrix);
    library->find("cublasLtMatmulPreferenceCreate", lt.create_preference);
    library->find("cublasLtMatmulPreferenceSetAttribute", lt.set_preference);
    library->find("cublasLtMatmulPreferenceDestroy", lt.destroy_preference);
    library->find("cublasLtMatmulAlgoGetHeuristic", lt.choose);
    library->find("cublasLtMatmul", lt.multiply);
    if (!library->status().ok()) return library->status();
    return lt;
  }
};

constexpr std::int64_t kSize = 8192;
constexpr std::size_t kWorkspaceBytes = 64 << 20;

/// y [rows, n] = x [rows, k] w [n, k]^T, in bf16, f32, or i32 for int8.
struct DenseShape {
  Format format;  ///< of x and w
  std::int64_t rows = kSize, n = kSize, k = kSize;
  bool f32 = false;  ///< y, but for int8

  std::size_t bytes(std::int64_t matrix_rows) const {
    return static_cast<std::size_t>(matrix_rows * k * format.bits / 8);
  }
};

class DenseMultiply {
 public:
  explicit DenseMultiply(const CublasLt& lt) : lt_(lt) {}
  ~DenseMultiply() {
    if (preference_ != nullptr) lt_.destroy_preference(preference_);
    for (void* matrix : {w_matrix_, x_matrix_, y_matrix_})
      if (matrix != nullptr) lt_.destroy_matrix(matrix);
    if (multiply_ != nullptr) lt_.destroy_multiply(multiply_);
    if (handle_ != nullptr) lt_.destroy(handle_);
  }
  DenseMultiply(const DenseMultiply&) = delete;
  DenseMultiply& operator=(const DenseMultiply&) = delete;

  Status create(const DenseShape& shape, int device) {
    const Format format = shape.format;
    const bool integer = format == formats::int8;
    for (auto [memory, bytes] : {std::pair{&w_, shape.bytes(shape.n)},
                                 {&x_, shape.bytes(shape.rows)},
                                 {&y_, static_cast<std::size_t>(shape.rows * shape.n) * 4},
                                 {&workspace_, kWorkspaceBytes}}) {
      Result<Memory> allocated = Memory::allocate(bytes, "a dense multiply", device);
      if (!allocated) return allocated.status();
      *memory = std::move(*allocated);
    }
    const int in = integer ? CUDA_R_8I : format == formats::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
    const int out = integer ? CUDA_R_32I : shape.f32 ? CUDA_R_32F : CUDA_R_16BF;
    done(lt_.create(&handle_));
    done(lt_.create_multiply(&multiply_, integer ? kCompute32i : kCompute32f,
                             integer ? CUDA_R_32I : CUDA_R_32F));
    // cuBLAS means columns where we mean rows.
    done(lt_.set_multiply(multiply_, kTransposeA, &kTranspose, sizeof(kTranspose)));
    const auto size = [](std::int64_t count) { return static_cast<std::uint64_t>(count); };
    done(lt_.create_matrix(&w_matrix_, in, size(shape.k), size(shape.n), shape.k));
    done(lt_.create_matrix(&x_matrix_, in, size(shape.k), size(shape.rows), shape.k));
    done(lt_.create_matrix(&y_matrix_, out, size(shape.n), size(shape.rows), shape.n));
    done(lt_.create_preference(&preference_));
    done(lt_.set_preference(preference_, kMostWorkspace, &kWorkspaceBytes, sizeof(kWorkspaceBytes)));
    int found = 0;
    done(lt_.choose(handle_, multiply_, w_matrix_, x_matrix_, y_matrix_, y_matrix_, preference_, 1,
                    &heuristic_, &found));
    if (status_.ok() && found == 0) status_ = Status(Code::unsupported, "cuBLAS has no such multiply");
    one_ = integer ? 1u : 0x3f800000u;
    return status_;
  }

  Status run(Stream stream) {
    done(lt_.multiply(handle_, multiply_, &one_, w_.data(), w_matrix_, x_.data(), x_matrix_, &zero_,
                      y_.data(), y_matrix_, y_.data(), y_matrix_, &heuristic_.algorithm, workspace_.data(),
                      kWorkspaceBytes, native(stream)));
    return status_;
  }

  /// Of normal numbers: power, and with it the clock, depends on the bits.
  Status fill_random(Format format) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, format == formats::int8 ? 32.0f : 1.0f);
    const std::size_t size = static_cast<std::size_t>(format.bits) / 8;
    std::vector<std::byte> pattern(1048573 * size);
    for (std::size_t at = 0; at < pattern.size(); at += size) {
      const std::uint32_t code = with_format(format, [&]<Format F>() { return encode<F>(normal(random)); });
      for (std::size_t i = 0; i < size; ++i) pattern[at + i] = static_cast<std::byte>(code >> (8 * i));
    }
    for (const Memory* memory : {&w_, &x_})
      for (std::size_t at = 0; at < memory->bytes(); at += pattern.size())
        if (Status status = cuda::copy(memory->data() + at, pattern.data(),
                                       std::min(pattern.size(), memory->bytes() - at));
            !status.ok())
          return status;
    return {};
  }

  const Memory& w() const { return w_; }
  const Memory& x() const { return x_; }
  const Memory& y() const { return y_; }

 private:
  /// The first error stays; what follows it is not to be trusted, but harmless.
  void done(int error) {
    if (status_.ok() && error != 0)
      status_ = Status(Code::unsupported, fmt::format("cuBLAS: error {}", error));
  }

  const CublasLt& lt_;
  void *handle_ = nullptr, *multiply_ = nullptr, *w_matrix_ = nullptr, *x_matrix_ = nullptr,
       *y_matrix_ = nullptr, *preference_ = nullptr;
  LtHeuristic heuristic_{};
  Memory w_, x_, y_, workspace_;
  std::uint32_t one_ = 0, zero_ = 0;  // of the multiply's scale type
  Status status_;
};

const Result<CublasLt>& cublas_lt() {
  static const Result<CublasLt> lt = CublasLt::load();
  return lt;
}

}  // namespace

Result<double> dense_gflop_per_s(Format format, int device) {
  const Result<CublasLt>& lt = cublas_lt();
  if (!lt) return lt.status();
  const DeviceGuard guard(device);
  DenseMultiply multiply(*lt);
  if (Status status = multiply.create({format}, device); !status.ok()) return status;
  if (Status status = multiply.fill_random(format); !status.ok()) return status;
  Result<Timer> timer = Timer::create(device);
  if (!timer) return timer.status();
  constexpr int kMultiplies = 15;
  const Result<std::vector<double>> times =
      timer->rested([&](Stream stream) { return multiply.run(stream); }, kMultiplies);
  if (!times) return times.status();
  return 2.0 * kSize * kSize * kSize / median(*times) / 1e3;
}

Result<std::vector<float>> dense_product(std::span<const std::byte> x, std::span<const std::byte> w,
                                         std::int64_t rows, std::int64_t n, std::int64_t k, int device) {
  const Result<CublasLt>& lt = cublas_lt();
  if (!lt) return lt.status();
  const DeviceGuard guard(device);
  DenseMultiply multiply(*lt);
  if (Status status = multiply.create({formats::e4m3, rows, n, k, true}, device); !status.ok()) return status;
  if (Status status = cuda::copy(multiply.x().data(), x.data(), x.size()); !status.ok()) return status;
  if (Status status = cuda::copy(multiply.w().data(), w.data(), w.size()); !status.ok()) return status;
  if (Status status = multiply.run(nullptr); !status.ok()) return status;
  std::vector<float> y(static_cast<std::size_t>(rows * n));
  if (Status status = cuda::copy(y.data(), multiply.y().data(), y.size() * sizeof(float)); !status.ok())
    return status;
  return y;
}

}  // namespace gatefold::cuda
