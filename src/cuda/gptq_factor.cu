// The factor of a Hessian's inverse, piece by piece.
#include "cuda/gptq_kernels.h"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void take_diagonal(const float* h, int k, float* out) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < k) out[i] = h[static_cast<std::int64_t>(i) * (k + 1)];
}

__global__ void add_diagonal(float* h, int k, float value) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < k) h[static_cast<std::int64_t>(i) * (k + 1)] += value;
}

__global__ void flip_matrix(const float* h, const int* order, int k, float* out) {
  const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), i = static_cast<int>(blockIdx.y);
  if (j < k)
    out[static_cast<std::int64_t>(i) * k + j] =
        h[static_cast<std::int64_t>(order[k - 1 - i]) * k + order[k - 1 - j]];
}

__global__ void unflip_factor(const float* inverse, const int* order, int k, float* factor,
                              float* importance) {
  const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), i = static_cast<int>(blockIdx.y);
  if (j >= k) return;
  const float value = j < i ? 0.0f : inverse[static_cast<std::int64_t>(k - 1 - i) * k + (k - 1 - j)];
  factor[static_cast<std::int64_t>(i) * k + j] = value;
  if (i == j) importance[order[i]] = 1.0f / (value * value);
}

/// Elimination of [A | 1] gives [L^T | L^-1], a column at a time. 1024 threads.
__global__ void __launch_bounds__(1024)
    factor_one_block(const float* a, int size, int stride, float* l, float* inverse, int* failed) {
  __shared__ float left[kFactorBlock][kFactorBlock + 1], right[kFactorBlock][kFactorBlock + 1];
  for (int at = static_cast<int>(threadIdx.x); at < size * size; at += 1024) {
    const int i = at / size, j = at % size;
    left[i][j] = j <= i ? a[static_cast<std::int64_t>(i) * stride + j] : 0.0f;
    right[i][j] = i == j ? 1.0f : 0.0f;
  }
  __syncthreads();
  for (int j = 0; j < size; ++j) {
    const float pivot = left[j][j];
    const bool positive = pivot > 0;  // not if NaN
    if (!positive && threadIdx.x == 0) *failed = 1;
    const float root = positive ? sqrtf(pivot) : 1.0f;
    __syncthreads();
    for (int i = j + static_cast<int>(threadIdx.x); i < size; i += 1024)
      left[i][j] = i == j ? root : left[i][j] / root;
    for (int c = static_cast<int>(threadIdx.x); c <= j; c += 1024) right[j][c] /= root;
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < (size - j - 1) * size; at += 1024) {
      const int i = j + 1 + at / size, c = at % size;
      if (c <= j)
        right[i][c] -= left[i][j] * right[j][c];
      else if (c <= i)
        left[i][c] -= left[i][j] * left[c][j];
    }
    __syncthreads();
  }
  for (int at = static_cast<int>(threadIdx.x); at < size * size; at += 1024) {
    const int i = at / size, j = at % size;
    l[static_cast<std::int64_t>(i) * stride + j] = left[i][j];
    inverse[static_cast<std::int64_t>(i) * stride + j] = right[i][j];
  }
}

}  // namespace

void GptqKernels::diagonal(const float* h, int k, float* out) const {
  take_diagonal<<<blocks_for(k, kThreads), kThreads, 0, stream>>>(h, k, out);
}

void GptqKernels::add_to_diagonal(float* h, int k, float value) const {
  add_diagonal<<<blocks_for(k, kThreads), kThreads, 0, stream>>>(h, k, value);
}

void GptqKernels::flip(const float* h, const int* order, int k, float* out) const {
  flip_matrix<<<dim3(blocks_for(k, kThreads), static_cast<unsigned>(k)), kThreads, 0, stream>>>(h, order, k,
                                                                                                out);
}

void GptqKernels::factor_block(const float* a, int size, int stride, float* l, float* inverse,
                               int* failed) const {
  factor_one_block<<<1, 1024, 0, stream>>>(a, size, stride, l, inverse, failed);
}

void GptqKernels::unflip(const float* inverse, const int* order, int k, float* factor,
                         float* importance) const {
  unflip_factor<<<dim3(blocks_for(k, kThreads), static_cast<unsigned>(k)), kThreads, 0, stream>>>(
      inverse, order, k, factor, importance);
}

}  // namespace gatefold::cuda
