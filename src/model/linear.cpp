#include "model/linear.h"

#include <cblas.h>

#include <algorithm>

#include "format/row_kernels.h"
#include "model/blas.h"
#include "model/smoothing.h"

namespace gatefold {
namespace {

// Every product is [token_block, k_block] x [panel, k_block]^T. BLAS libraries choose their kernels, and so
// the order of the sum over k, by shape, and treat the last rows of an operand differently from the first.
// With one shape, and with blocks that begin at fixed positions of the sequence, a token's bits cannot depend
// on how a sequence is split into calls. The sizes keep a panel in the L2 cache and below the bound where
// OpenBLAS begins to copy its operands.
constexpr std::int64_t token_block = 8;
constexpr std::int64_t panel = 64;
constexpr std::int64_t k_block = 256;
constexpr std::int64_t token_chunk = 256;  // tokens that share one widened panel

struct Scratch {
  alignas(64) float weights[panel * k_block];
  alignas(64) float sums[token_chunk * panel];
  alignas(64) float partial[token_block * k_block];  // a block of which the call has not all tokens
  std::vector<float> rows;                           // of quantized weights, [panel, k]
};

// Tokens [begin, end) of a call that has tokens [0, tokens); those outside count as zeros.
struct Chunk {
  const float* x;
  float* y;
  std::int64_t tokens, begin, end;
};

// One panel of outputs, `first_row` on, for one chunk of tokens.
void multiply(const DenseLayer& layer, const Chunk& chunk, std::int64_t first_row, Scratch& scratch) {
  const auto [data, dtype, n, k] = layer.weight;
  const RowKernels& kernels = row_kernels();
  const std::int64_t rows = std::min(panel, n - first_row);
  const bool quantized = data == nullptr;
  if (quantized) {
    scratch.rows.resize(static_cast<std::size_t>(panel * k));
    dequantize_rows(layer.quantized, first_row, rows, scratch.rows.data());
  }
  for (std::int64_t k0 = 0; k0 < k; k0 += k_block) {
    const std::int64_t depth = std::min(k_block, k - k0);
    for (std::int64_t row = 0; row < rows; ++row)
      if (quantized)
        std::copy_n(scratch.rows.data() + row * k + k0, depth, scratch.weights + row * k_block);
      else
        kernels.widen(dtype, data, (first_row + row) * k + k0, depth, scratch.weights + row * k_block);
    for (std::int64_t t = chunk.begin; t < chunk.end; t += token_block) {
      const bool whole = t >= 0 && t + token_block <= chunk.tokens;
      if (!whole) std::fill_n(scratch.partial, token_block * k_block, 0.0f);
      for (std::int64_t i = 0; !whole && i < token_block; ++i)
        if (t + i >= 0 && t + i < chunk.tokens)
          std::copy_n(chunk.x + (t + i) * k + k0, depth, scratch.partial + i * k_block);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, token_block, static_cast<int>(rows),
                  static_cast<int>(depth), 1.0f, whole ? chunk.x + t * k + k0 : scratch.partial,
                  static_cast<int>(whole ? k : k_block), scratch.weights, k_block, k0 == 0 ? 0.0f : 1.0f,
                  scratch.sums + (t - chunk.begin) * panel, panel);
    }
  }
  for (std::int64_t t = std::max<std::int64_t>(chunk.begin, 0); t < std::min(chunk.end, chunk.tokens); ++t) {
    float* out = chunk.y + t * n + first_row;
    std::copy_n(scratch.sums + (t - chunk.begin) * panel, rows, out);
    if (!layer.bias.empty())
      for (std::int64_t i = 0; i < rows; ++i) out[i] += layer.bias[first_row + i];
  }
}

/// A(x). Rows are rounded by all threads where each has scales of its own.
std::vector<float> rounded(const DenseLayer& layer, const float* x, std::int64_t tokens, int threads) {
  const std::int64_t k = layer.weight.cols;
  const auto& fixed = layer.quantized.input_scale;
  const TensorScale* scale = fixed ? &*fixed : nullptr;
  std::vector<float> out(x, x + tokens * k);
  if (scale == nullptr && layer.activation.group.n == 0) {
    round_activations(layer.activation, scale, k, out);
    return out;
  }
#pragma omp parallel for num_threads(threads)
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<float> row(x + t * k, x + (t + 1) * k);
    round_activations(layer.activation, scale, k, row);
    std::copy(row.begin(), row.end(), out.begin() + t * k);
  }
  return out;
}

}  // namespace

void apply(const DenseLayer& layer, const float* x, std::int64_t first, std::int64_t tokens, float* y,
           int threads) {
  std::vector<float> inputs;
  if (layer.activation.quantized()) {
    inputs = rounded(layer, x, tokens, threads);
    x = inputs.data();
  }
  const std::int64_t before = first % token_block;  // tokens of the first block that came earlier
  const std::int64_t panels = (layer.weight.rows + panel - 1) / panel;
  const std::int64_t chunks = tokens == 0 ? 0 : (before + tokens + token_chunk - 1) / token_chunk;
#pragma omp parallel num_threads(threads)
  {
    const SerialBlas serial;
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (std::int64_t task = 0; task < panels * chunks; ++task) {
      const std::int64_t begin = task / panels * token_chunk - before;
      multiply(layer, {x, y, tokens, begin, std::min(begin + token_chunk, tokens)}, task % panels * panel,
               scratch);
    }
  }
}

}  // namespace gatefold
