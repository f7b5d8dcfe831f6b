#include "cpu/gemm.h"

#include "cpu/vec.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

/// A tile of M tokens by R rows in registers: 16 accumulators where there are 32 registers, else 8.
constexpr int kTokens = Vec::lanes == 16 ? 4 : 2;
constexpr int kRows = 4;

template <int M, int R>
void tile(const float* const* x, const float* w, std::int64_t k, float* out, std::int64_t stride) {
  Vec sums[M][R];
  for (auto& row : sums)
    for (Vec& s : row) s = zero();
  for (std::int64_t i = 0; i < k; i += Vec::lanes) {
    Vec weights[R];
    for (int r = 0; r < R; ++r) weights[r] = load(w + r * k + i);
    for (int m = 0; m < M; ++m) {
      const Vec activation = load(x[m] + i);
      for (int r = 0; r < R; ++r) sums[m][r] = multiply_add(activation, weights[r], sums[m][r]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) out[m * stride + r] = sum(sums[m][r]);
}

template <int R>
void rows_tile(const float* const* x, std::int64_t tokens, const float* w, std::int64_t k, float* out,
               std::int64_t stride) {
  std::int64_t m = 0;
  for (; m + kTokens <= tokens; m += kTokens) tile<kTokens, R>(x + m, w, k, out + m * stride, stride);
  for (; m < tokens; ++m) tile<1, R>(x + m, w, k, out + m * stride, stride);
}

void multiply(const float* const* x, std::int64_t tokens, const float* w, std::int64_t rows, std::int64_t k,
              float* out, std::int64_t stride) {
  std::int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) rows_tile<kRows>(x, tokens, w + r * k, k, out + r, stride);
  for (; r < rows; ++r) rows_tile<1>(x, tokens, w + r * k, k, out + r, stride);
}

}  // namespace

extern const Multiply multiply_kernel;
const Multiply multiply_kernel = multiply;

}  // namespace gatefold::GATEFOLD_ISA
