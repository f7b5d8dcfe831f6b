#include "cuda/encode.cuh"
#include "cuda/inputs.h"
#include "cuda/launch.cuh"
#include "format/scale_rule.h"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kPerLane = kRecordColumns / 32;  // neighbours in k

struct Row {
  const InputArgs& args;
  std::int64_t row, from;  // of the result, of x

  __device__ Row(const InputArgs& a, std::int64_t i) : args(a), row(i), from(i / a.divisor) {}

  /// Numbers k .. k + 3; those from K on are 0.
  __device__ __forceinline__ void load(std::int64_t k, float (&x)[kPerLane]) const {
    const std::int64_t at = from * args.x.cols + k;
    if (args.x.cols % kPerLane != 0 || reinterpret_cast<std::uintptr_t>(args.x.data) % 16 != 0) {
      for (int i = 0; i < kPerLane; ++i) x[i] = k + i < args.x.cols ? load(k + i) : 0.0f;
    } else if (k >= args.x.cols) {
      for (float& number : x) number = 0;
    } else if (args.x.dtype == DType::f32) {
      *reinterpret_cast<float4*>(x) =
          *reinterpret_cast<const float4*>(static_cast<const float*>(args.x.data) + at);
    } else {
      const auto codes =
          *reinterpret_cast<const ushort4*>(static_cast<const std::uint16_t*>(args.x.data) + at);
      const std::uint32_t each[kPerLane] = {codes.x, codes.y, codes.z, codes.w};
      for (int i = 0; i < kPerLane; ++i) x[i] = decode_16bit(each[i]);
    }
  }

 private:
  __device__ float load(std::int64_t k) const {
    const std::int64_t at = from * args.x.cols + k;
    if (args.x.dtype == DType::f32) return static_cast<const float*>(args.x.data)[at];
    return decode_16bit(static_cast<const std::uint16_t*>(args.x.data)[at]);
  }
  __device__ __forceinline__ float decode_16bit(std::uint32_t code) const {
    return args.x.dtype == DType::bf16 ? __uint_as_float(code << 16) : decode<formats::f16>(code);
  }
};

/// Largest magnitude of finite numbers.
__device__ float amax_of(const float (&x)[kPerLane]) {
  float amax = 0;
  for (const float number : x)
    if (number - number == 0) amax = fmaxf(amax, fabsf(number));
  return amax;
}
__device__ float max_over(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ float max_over_block(float x) {
  __shared__ float warps[kThreads / 32];
  x = max_over(x, 32);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (const float warp : warps) x = fmaxf(x, warp);
  __syncthreads();
  return x;
}
__device__ float row_amax(const Row& row) {
  float amax = 0;
#pragma unroll 4
  for (std::int64_t k = threadIdx.x * kPerLane; k < row.args.x.cols; k += kThreads * kPerLane) {
    alignas(16) float x[kPerLane];
    row.load(k, x);
    amax = fmaxf(amax, amax_of(x));
  }
  return max_over_block(amax);
}

__device__ bool is_there(const InputArgs& args, std::int64_t row) {
  return args.ids == nullptr ||
         static_cast<std::uint32_t>(args.ids[row]) < static_cast<std::uint32_t>(args.experts);
}

__device__ __forceinline__ void wait_and_let_start(const InputArgs& args) {
  if (args.start_next_early) let_next_kernel_start();
  wait_for_previous_kernel();
  if (!args.start_next_early) let_next_kernel_start();
}

__global__ void __launch_bounds__(kThreads) row_amax_kernel(const InputArgs args) {
  wait_and_let_start(args);
  const float amax = is_there(args, blockIdx.x) ? row_amax(Row(args, blockIdx.x)) : 0.0f;
  if (threadIdx.x == 0) args.amax[blockIdx.x] = amax;
}

/// Scales for the row: `whole` for one scale a row or tensor, `two_level` beside block scales.
struct RowScales {
  float whole = 1.0f;
  TensorScale two_level;
};
template <class Activation>
__device__ RowScales scales_of(const Row& row) {
  constexpr Operand a = Activation::operand;
  const InputArgs& args = row.args;
  RowScales scales;
  if constexpr (!has_row_scales(a)) return scales;
  if ((a.group.n == 0 || a.tensor_scale.stored()) && args.static_scales != nullptr) {
    scales.two_level = args.static_scales[args.ids[row.row]];
    scales.whole = scales.two_level.apply(1.0f);
    return scales;
  }
  float amax = 0;
  if constexpr (a.group.n == 0) {
    for (std::int64_t i = threadIdx.x; i < args.x.rows; i += kThreads) amax = fmaxf(amax, args.amax[i]);
    amax = max_over_block(amax);
  } else {
    amax = row_amax(row);
  }
  if constexpr (a.tensor_scale.stored()) {
    scales.two_level = {tensor_scale(a, amax), false};
    scales.whole = scales.two_level.value;
  } else {
    scales.whole = whole_scale<formats::f32>(a, amax);
  }
  return scales;
}

/// What numbers are divided by before they become codes, and what a code's value is multiplied by.
struct GroupFactors {
  float divisor = 1.0f, fold = 1.0f, record = 1.0f;
};
template <class Activation>
__device__ GroupFactors group_factors(const RowScales& row, float amax) {
  constexpr Operand a = Activation::operand;
  if constexpr (!a.quantized()) {
    return {};
  } else if constexpr (a.group.k == 0) {
    return {row.whole, 1.0f, 1.0f};
  } else {
    const float block = group_scale<a.scale>(a, {0, amax}, row.two_level).scale;
    if constexpr (has_record_scales(a)) return {block, 1.0f, block};
    return {a.tensor_scale.stored() ? row.two_level.apply(block) : block, block, 1.0f};
  }
}

/// The value of x's code.
template <Format F>
__device__ __forceinline__ float round_fast(float x) {
  if constexpr (F == formats::e4m3) {
    if (fabsf(x) < 0x1p60f) return decode_e4m3(encode_pair<F>(x, 0) & 0xff);
  } else if constexpr (F == formats::int8) {
    if (fabsf(x) < 0x1p60f) return static_cast<float>(static_cast<std::int32_t>(encode_int8(x)));
  }
  return round_to<F>(x);
}

/// x as its operand has it: the value of its code, in 16 bits.
template <class Activation>
__device__ std::uint32_t encode_input(float x, const GroupFactors& factors) {
  constexpr Format value = Activation::operand.value;
  if constexpr (!Activation::operand.quantized()) {
    return encode<value>(x);
  } else {
    const float scaled = x / (factors.divisor > 0 ? factors.divisor : __int_as_float(0x7f800000));
    return encode<formats::bf16>(round_fast<value>(scaled) * factors.fold);
  }
}

template <class Activation>
__global__ void __launch_bounds__(kThreads) inputs_kernel(const InputArgs args) {
  wait_and_let_start(args);
  if (!is_there(args, blockIdx.x)) return;
  const Row row(args, blockIdx.x);
  constexpr Operand a = Activation::operand;
  constexpr bool with_row_scales = has_row_scales(a), with_record_scales = has_record_scales(a);
  const RowScales scales = scales_of<Activation>(row);
  if (threadIdx.x == 0 && with_row_scales) args.row_scales[row.row] = scales.whole;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
  for (std::int64_t record = warp; record < args.stride / kRecordColumns; record += kThreads / 32) {
    const std::int64_t k = record * kRecordColumns + lane * kPerLane;
    alignas(16) float x[kPerLane];
    row.load(k, x);
    constexpr int group = a.group.k == 0 ? kRecordColumns : a.group.k;
    const GroupFactors factors = group_factors<Activation>(scales, max_over(amax_of(x), group / kPerLane));
    if (lane == 0 && with_record_scales)
      args.record_scales[row.row * (args.stride / kRecordColumns) + record] = factors.record;
    std::uint32_t codes[kPerLane];
    for (int i = 0; i < kPerLane; ++i) codes[i] = encode_input<Activation>(x[i], factors);
    *reinterpret_cast<uint2*>(args.rows + row.row * args.stride + k) = {codes[0] | codes[1] << 16,
                                                                        codes[2] | codes[3] << 16};
  }
}

template <Format F>
struct Plain {
  static constexpr Operand operand = operands::plain(F);
};
template <SchemeId kScheme>
struct ActivationOf {
  static constexpr Operand operand = scheme(kScheme).activation;
};

/// The first scheme of the table with this activation.
constexpr SchemeId find_activation(const Operand& a) {
  std::size_t i = 0;
  while (!(operands::table[i].activation == a)) ++i;
  return static_cast<SchemeId>(i);
}

template <class Activation>
cudaError_t launch_rows(const InputArgs& args, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(args.x.rows);
  if (Activation::operand.quantized() && Activation::operand.group.n == 0 && args.static_scales == nullptr)
    if (const auto error = launch_dependent(row_amax_kernel, rows, kThreads, 0, stream, args);
        error != cudaSuccess)
      return error;
  return launch_dependent(inputs_kernel<Activation>, rows, kThreads, 0, stream, args);
}

}  // namespace

cudaError_t launch_inputs(const InputArgs& args, cudaStream_t stream) {
  if (args.activation == Plain<formats::bf16>::operand)
    return launch_rows<Plain<formats::bf16>>(args, stream);
  if (args.activation == Plain<formats::f16>::operand) return launch_rows<Plain<formats::f16>>(args, stream);
  cudaError_t error = cudaErrorInvalidValue;
  for_each_scheme([&]<class S>() {
    constexpr Operand a = S::scheme.activation;
    if constexpr (a.quantized() && can_multiply(a) && find_activation(a) == S::id)
      if (args.activation == a) error = launch_rows<ActivationOf<S::id>>(args, stream);
  });
  return error;
}

}  // namespace gatefold::cuda
