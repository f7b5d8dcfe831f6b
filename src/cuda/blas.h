#pragma once
/// \file
/// f32 multiplies by cuBLAS, which is loaded when it is asked for.

#include <cstdint>

#include "cuda/device.h"

namespace gatefold::cuda {

/// A row-major matrix; each row is `stride` floats after the one before it. Transposed: its columns are what
/// is meant by rows.
struct Rows {
  const float* data = nullptr;
  std::int64_t stride = 0;
  bool transposed = false;
};

/// For one stream and one thread. Nothing is rounded to less than f32; the same call gives the same bits.
class Blas {
 public:
  /// Errors: cuBLAS 13 is not there (unsupported), no memory.
  static Result<Blas> create(int device, Stream stream);
  Blas(Blas&& other) noexcept { *this = std::move(other); }
  Blas& operator=(Blas&& other) noexcept;
  ~Blas();

  /// c [m, n] = beta c + alpha a b, a [m, k], b [k, n]. c must not overlap a or b. Later calls do nothing
  /// after an error, which `status` keeps.
  void multiply(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const Rows& a, const Rows& b,
                float beta, float* c, std::int64_t stride);
  const Status& status() const { return status_; }

 private:
  Blas() = default;

  void* handle_ = nullptr;
  Memory workspace_;  ///< its own: shared ones would make the order of sums depend on other streams
  Status status_;
};

}  // namespace gatefold::cuda
