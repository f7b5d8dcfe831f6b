#pragma once
/// \file
/// GPTQ on a GPU: quantize/gptq.h's algorithm, with sums in other orders.

#include "cuda/blas.h"
#include "cuda/gptq_kernels.h"
#include "quantize/gptq.h"

namespace gatefold::cuda {

/// Device memory that grows.
class Buffer {
 public:
  /// At least so many bytes; the content is lost if it has to grow.
  Status reserve(std::size_t bytes, int device);
  template <class T>
  T* as() const {
    return memory_.as<T>();
  }

 private:
  Memory memory_;
};

/// For one stream and one thread; the stream's work before a call is waited for by the call's.
class Gptq {
 public:
  Gptq(SchemeId scheme, int device, Stream stream) : scheme_(scheme), device_(device), stream_(stream) {}

  /// `count` matrices [n, k] of the same inputs, one after the other. On the device: `weights` [count, n, k];
  /// `hessian` [k, k], to whose diagonal the damping is added; `values` get what the matrices of `out`
  /// [count] decode to. Two-level schemes: all matrices get the same scale. Returns when the matrices are
  /// there. Errors: as on the CPU; CUDA's.
  Status run(Blas& blas, int count, std::int64_t n, std::int64_t k, const float* weights, float* hessian,
             const GptqOptions& options, float* values, QuantizedMatrix* out);

  /// Rounds to nearest instead. Scales are searched for the least error of inputs with this Hessian, which
  /// is only read; without one they are those of the plain rule. Without `out` the work is only launched.
  Status nearest(int count, std::int64_t n, std::int64_t k, const float* weights, const float* hessian,
                 float* values, QuantizedMatrix* out);

 private:
  Status start(MatrixStack& stack, const float* weights);
  Status set_order(const MatrixStack& stack, const float* hessian);
  Status invert(Blas& blas, int k, float* hessian, double damping);
  void factor(Blas& blas, int k, int begin, int size);
  void round(Blas& blas, const MatrixStack& stack, const float* weights, float* values);
  void refine(Blas& blas, const MatrixStack& stack, const float* weights, const float* hessian, int turns,
              float* values);
  QuantizedLayout encode(const MatrixStack& stack, float* values);
  Status download(const MatrixStack& stack, float* values, QuantizedMatrix* out);
  GptqKernels kernels() const { return {native(stream_), scheme_}; }

  SchemeId scheme_;
  int device_;
  Stream stream_;
  double mean_ = 0;                      ///< of the Hessian's diagonal
  Buffer squares_[3];                    ///< [k, k]: flipped Hessian, then the factor; L; its inverse
  Buffer columns_, gradient_, changes_;  ///< [rows, k]; the last also for a block or a group
  Buffer ranges_, tried_;                ///< of the search of scales
  Buffer scales_, zeros_, importance_, order_, flags_, codes_;
};

}  // namespace gatefold::cuda
