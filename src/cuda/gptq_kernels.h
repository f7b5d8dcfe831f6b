#pragma once
/// \file
/// The kernels of GPTQ. What they compute is quantize/gptq.h's, step by step; sums are in other orders.

#include <cuda_runtime_api.h>

#include "gatefold/codec.h"
#include "gatefold/quantize.h"

namespace gatefold::cuda {

/// Columns whose errors are passed on together: four for each lane of a warp, which has one row.
inline constexpr int kGptqBlock = 128;
/// Rows and columns that one thread block factors.
inline constexpr int kFactorBlock = 64;

/// `count` matrices [n, k] of the same inputs and scheme, one after the other; row-major. Scales of groups
/// are those of Grid: [count * bands, groups].
struct MatrixStack {
  int count = 1, n = 0, k = 0;
  int group_k = 0, groups = 0;   ///< along k
  int band_rows = 0, bands = 0;  ///< of one matrix: rows that share scales
  float* scales = nullptr;       ///< as stored
  float* zeros = nullptr;
  TensorScale tensor_scale;  ///< of two-level operands: of all matrices

  GATEFOLD_HD int rows() const { return count * n; }
  GATEFOLD_HD int group_at(int row, int group) const {
    return (row / n * bands + row % n / band_rows) * groups + group;
  }
};

inline unsigned blocks_for(std::int64_t count, int each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

/// Launches; errors are left for cudaGetLastError. Pointers are to device memory; nothing overlaps.
struct GptqKernels {
  cudaStream_t stream;
  SchemeId scheme;

  /// diagonal [k] of h [k, k]; the bits of the largest magnitude of x [count] (zeroed before).
  void diagonal(const float* h, int k, float* out) const;
  void largest(const float* x, std::int64_t count, std::uint32_t* bits) const;
  void add_to_diagonal(float* h, int k, float value) const;

  /// out[i][j] = h[order[k - 1 - i]][order[k - 1 - j]]: from the last column to the first.
  void flip(const float* h, const int* order, int k, float* out) const;
  /// Lower L with L L^T = a [size, size], whose lower triangle is read, and its inverse; both have zeros
  /// above the diagonal. size <= kFactorBlock; all have rows of `stride`. `failed` is set if a is not
  /// positive.
  void factor_block(const float* a, int size, int stride, float* l, float* inverse, int* failed) const;
  /// U = the inverse factor, flipped back; importance[order[i]] = 1 / U[i][i]^2.
  void unflip(const float* inverse, const int* order, int k, float* factor, float* importance) const;

  /// Fills the stack's scales: the best of the first `steps` that searches try, of which the first is the
  /// plain rule's. `ranges` [rows, groups] and `errors` [steps, rows, groups] are for it.
  void search_scales(const MatrixStack& stack, const float* weights, const float* importance, int steps,
                     float2* ranges, float* errors) const;

  /// out[row][i] = x[row][order[i]]
  void permute_columns(const float* x, const int* order, int rows, int k, float* out) const;
  /// Rounds columns begin .. begin + kGptqBlock (in order) of `columns` to `values` (in place of the inputs);
  /// errors [rows, kGptqBlock] are over the diagonal of the factor.
  void round_columns(const MatrixStack& stack, const float* columns, const int* order, const float* factor,
                     int begin, float* values, float* errors) const;

  void subtract(const float* a, const float* b, std::int64_t count, float* out) const;
  /// Refinement of columns begin .. begin + kGptqBlock: changes [rows, kGptqBlock].
  void move_codes(const MatrixStack& stack, const float* hessian, const float* gradient, int begin,
                  float* values, float* changes) const;
  /// Refinement of a group's scales; `curved` [rows, columns of the group] is Q H in it, and is overwritten
  /// with the changes of the values.
  void move_scales(const MatrixStack& stack, const float* gradient, int group, float* values,
                   float* curved) const;

  /// The same for all groups in columns begin .. begin + kGptqBlock; only if groups_in_lanes(stack).
  void move_scales_of_block(const MatrixStack& stack, const float* hessian, const float* gradient, int begin,
                            float* values, float* changes) const;
  static bool groups_in_lanes(const MatrixStack& stack) {
    return stack.band_rows == 1 && 32 % stack.group_k == 0 && stack.k % stack.group_k == 0;
  }

  /// Codes in the canonical layout, row_bytes a row; values become exactly what these decode to.
  void encode(const MatrixStack& stack, int row_bytes, float* values, std::byte* codes) const;
};

}  // namespace gatefold::cuda
