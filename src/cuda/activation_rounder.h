#pragma once
/// \file
/// Activations in f32 as a scheme rounds them: what experts see while they are calibrated on a GPU.

#include "cuda/gptq.h"
#include "gatefold/cuda_quantize.h"

namespace gatefold::cuda {

/// For one stream and one thread.
class ActivationRounder {
 public:
  ActivationRounder(SchemeId scheme, int device, Stream stream)
      : scheme_(scheme), device_(device), stream_(stream) {}

  /// x [rows, k] on the device, in place. Dynamic scales of a tensor are those of these rows.
  Status round(const std::optional<TensorScale>& static_scale, std::int64_t rows, std::int64_t k, float* x);

 private:
  SchemeId scheme_;
  int device_;
  Stream stream_;
  Buffer codes_, scales_, token_scales_, static_scale_, workspace_;
};

}  // namespace gatefold::cuda
