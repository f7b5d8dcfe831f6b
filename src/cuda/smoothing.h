#pragma once
/// \file
/// quantize/smoothing.h's search, with the products on a GPU.

#include <vector>

#include "cuda/activation_rounder.h"
#include "cuda/blas.h"
#include "cuda/gptq.h"

namespace gatefold::cuda {

/// For one stream and one thread.
class Smoothing {
 public:
  Smoothing(SchemeId scheme, int device, Stream stream)
      : device_(device), stream_(stream), rounder_(scheme, device, stream) {}

  /// Sample x [rows, k], and matrices [count, n, k], both on the device. As search_smoothing; `static_scale`
  /// is not used, as there.
  Result<std::vector<float>> search(Blas& blas, Gptq& gptq, bool maxima, bool powers_of_two, const float* x,
                                    std::int64_t rows, const float* matrices, int count, std::int64_t n,
                                    std::int64_t k);

 private:
  int device_;
  Stream stream_;
  ActivationRounder rounder_;
  Buffer factors_, magnitudes_;  // [k]; [1 + count, k]
  Buffer rounded_, scaled_;      // [rows, k]; [n, k]
  Buffer wanted_, product_;      // [count, rows, n]; [rows, n]
  Buffer losses_;                // [count, rows] f64
};

}  // namespace gatefold::cuda
