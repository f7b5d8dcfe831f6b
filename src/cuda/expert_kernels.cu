#include "cuda/expert_kernels.h"

#include "gatefold/codec.h"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256;

/// Calls f(i, row) for each of rows * k numbers: a thread for each.
template <class Function>
__global__ void each_number(std::int64_t count, std::int64_t k, Function f) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) f(i, i / k);
}

template <class Function>
void for_each_number(std::int64_t rows, std::int64_t k, cudaStream_t stream, const Function& f) {
  if (rows * k == 0) return;
  each_number<<<static_cast<unsigned>((rows * k + kThreads - 1) / kThreads), kThreads, 0, stream>>>(rows * k,
                                                                                                    k, f);
}

struct Widen16 {
  const std::uint16_t* in;
  bool is_f16;
  float* out;
  __device__ void operator()(std::int64_t i, std::int64_t) const {
    out[i] = is_f16 ? decode<formats::f16>(in[i]) : decode<formats::bf16>(in[i]);
  }
};
struct Widen32 {
  const float* in;
  float* out;
  __device__ void operator()(std::int64_t i, std::int64_t) const { out[i] = in[i]; }
};

struct Gather {
  const float* x;
  const std::int32_t* tokens;
  std::int64_t k;
  float* out;
  __device__ void operator()(std::int64_t i, std::int64_t row) const {
    out[i] = x[tokens[row] * k + i - row * k];
  }
};

struct Add {
  const float* x;
  const std::int32_t* tokens;
  std::int64_t k;
  float* to;
  __device__ void operator()(std::int64_t i, std::int64_t row) const {
    to[tokens[row] * k + i - row * k] += x[i];
  }
};

struct Scale {
  const float* factors;
  bool root;
  float* x;
  __device__ void operator()(std::int64_t i, std::int64_t row) const {
    x[i] *= root ? sqrtf(factors[row]) : factors[row];
  }
};

struct ScaleColumns {
  const float* factors;
  bool divide;
  std::int64_t k;
  const float* x;
  float* out;
  __device__ void operator()(std::int64_t i, std::int64_t row) const {
    const float factor = factors[i - row * k];
    out[i] = divide ? x[i] / factor : x[i] * factor;
  }
};

struct ColumnMagnitude {
  const float* x;
  std::int64_t rows, k;
  bool maxima;
  float* out;
  __device__ void operator()(std::int64_t column, std::int64_t) const {
    double sum = 0, most = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const double magnitude = fabsf(x[row * k + column]);
      sum += magnitude;
      most = fmax(most, magnitude);
    }
    out[column] = static_cast<float>(maxima ? most : sum / static_cast<double>(rows));
  }
};

/// A warp a row.
__global__ void row_loss(const float* y, const float* wanted, std::int64_t k, double* out) {
  const std::int64_t row = blockIdx.x;
  double error = 0, whole = 0;
  for (std::int64_t i = row * k + threadIdx.x; i < (row + 1) * k; i += 32) {
    const double want = wanted[i], difference = y[i] - want;
    error += difference * difference;
    whole += want * want;
  }
  for (int step = 16; step > 0; step /= 2) {
    error += __shfl_xor_sync(0xffffffffu, error, step);
    whole += __shfl_xor_sync(0xffffffffu, whole, step);
  }
  if (threadIdx.x == 0) out[row] = error / (whole + 1e-20);
}

struct Activate {
  const float* gate_up;
  std::int64_t k;
  float* y;
  __device__ void operator()(std::int64_t i, std::int64_t row) const {
    const float gate = gate_up[i + row * k], up = gate_up[i + row * k + k];
    y[i] = gate / (1.0f + expf(-gate)) * up;
  }
};

/// The activation operand of a row of the table, as a type.
template <SchemeId kScheme>
struct ActivationTag {
  static constexpr Operand operand = scheme(kScheme).activation;
};

template <Format F>
__device__ __forceinline__ float load_code(const std::byte* codes, std::int64_t at) {
  if constexpr (F.bits == 32)
    return reinterpret_cast<const float*>(codes)[at];
  else if constexpr (F.bits == 8)
    return decode<F>(static_cast<std::uint32_t>(codes[at]));
  else
    return decode<F>(static_cast<std::uint32_t>(codes[at / 2]) >> (at % 2 * 4));
}

template <class Activation>
struct Decode {
  const std::byte *values, *scales;
  const float* token_scales;
  std::int64_t k, row_bytes, scale_cols;
  float* x;
  __device__ void operator()(std::int64_t i, std::int64_t row) const {
    constexpr Operand kOperand = Activation::operand;
    constexpr Format kValue = kOperand.value, kScale = kOperand.scale;
    const std::int64_t column = i - row * k;
    const std::int64_t group = kOperand.group.k == 0 ? 0 : column / kOperand.group.k;
    float scale = load_code<kScale>(scales, row * scale_cols + group);
    if constexpr (kOperand.tensor_scale.stored()) scale *= token_scales[row];
    x[i] = load_code<kValue>(values + row * row_bytes, column) * scale;
  }
};

constexpr SchemeId first_alike(const Operand& activation) {
  for (std::size_t i = 0;; ++i)
    if (operands::table[i].activation == activation) return static_cast<SchemeId>(i);
}

}  // namespace

void widen(DType dtype, const void* in, std::int64_t count, float* out, cudaStream_t stream) {
  if (dtype == DType::f32)
    for_each_number(1, count, stream, Widen32{static_cast<const float*>(in), out});
  else
    for_each_number(1, count, stream,
                    Widen16{static_cast<const std::uint16_t*>(in), dtype == DType::f16, out});
}

void gather_rows(const float* x, const std::int32_t* tokens, std::int64_t rows, std::int64_t k, float* out,
                 cudaStream_t stream) {
  for_each_number(rows, k, stream, Gather{x, tokens, k, out});
}

void add_rows(const float* x, const std::int32_t* tokens, std::int64_t rows, std::int64_t k, float* to,
              cudaStream_t stream) {
  for_each_number(rows, k, stream, Add{x, tokens, k, to});
}

void scale_rows(const float* factors, bool root, std::int64_t rows, std::int64_t k, float* x,
                cudaStream_t stream) {
  for_each_number(rows, k, stream, Scale{factors, root, x});
}

void scale_columns(const float* factors, bool divide, std::int64_t rows, std::int64_t k, const float* x,
                   float* out, cudaStream_t stream) {
  for_each_number(rows, k, stream, ScaleColumns{factors, divide, k, x, out});
}

void column_magnitudes(const float* x, std::int64_t rows, std::int64_t k, bool maxima, float* out,
                       cudaStream_t stream) {
  for_each_number(1, k, stream, ColumnMagnitude{x, rows, k, maxima, out});
}

void row_losses(const float* y, const float* wanted, std::int64_t rows, std::int64_t k, double* out,
                cudaStream_t stream) {
  if (rows > 0) row_loss<<<static_cast<unsigned>(rows), 32, 0, stream>>>(y, wanted, k, out);
}

void activate(const float* gate_up, std::int64_t rows, std::int64_t k, float* y, cudaStream_t stream) {
  for_each_number(rows, k, stream, Activate{gate_up, k, y});
}

void decode_activations(SchemeId id, const QuantizeOutputs& codes, const ActivationLayout& layout,
                        std::int64_t rows, std::int64_t k, float* x, cudaStream_t stream) {
  for_each_scheme([&]<class Row>() {
    if constexpr (Row::scheme.activation.quantized() && first_alike(Row::scheme.activation) == Row::id)
      if (scheme(id).activation == Row::scheme.activation)
        for_each_number(
            rows, k, stream,
            Decode<ActivationTag<Row::id>>{static_cast<const std::byte*>(codes.values),
                                           static_cast<const std::byte*>(codes.scales), codes.token_scales, k,
                                           layout.row_bytes, layout.scale_cols, x});
  });
}

}  // namespace gatefold::cuda
