#include <algorithm>
#include <cstddef>

#include "cuda/quantize.h"
#include "cuda/rounding.cuh"

namespace gatefold::cuda {
namespace {

/// Numbers that a thread holds of one row: kVectors times kCount, which become 8 bytes.
constexpr int kShare = 32;
template <class Activation>
struct Share {
  static constexpr int kCount = 64 / Activation::operand.value.bits;
  static constexpr int kVectors = kShare / kCount;
};
constexpr int kMostThreads = 512;

/// Blocks of kMostThreads that registers shall leave room for (0: the compiler decides), as measured.
template <class Activation, class Input>
constexpr int least_blocks() {
  constexpr Operand o = Activation::operand;
  if (Input::format.bits != 16 || o.group.n == 0 || o.tensor_scale.stored()) return 0;
  return o.group.k == 0 ? 3 : 2;
}

/// Threads of a row in x, rows in y; a row longer than their shares is read in several chunks.
dim3 block_for(int k) {
  const int warps = (k - 1) / (32 * kShare) + 1;
  const int threads = std::min(warps * 32, kMostThreads);
  return dim3(static_cast<unsigned>(threads), static_cast<unsigned>(std::max(1, 256 / threads)));
}

__device__ __forceinline__ std::int64_t rows_of(const QuantizeArgs& args) {
  return args.row_count != nullptr ? min(static_cast<std::int64_t>(*args.row_count), args.rows) : args.rows;
}

__device__ __forceinline__ const std::byte* input_row(const QuantizeArgs& args, std::int64_t row,
                                                      int element_bytes) {
  const std::int64_t from = args.gather != nullptr ? args.gather[row] / args.gather_divisor : row;
  return args.x + from * args.k * element_bytes;
}

/// First pass of one scale per tensor: the largest magnitude of some rows, one result per block. It goes
/// backwards: the second pass then finds what was read last in the L2 cache.
template <class Input>
__global__ void __launch_bounds__(kMostThreads) tensor_amax(const QuantizeArgs args) {
  using Vector = Elements<Input::format, 8>;
  typename Vector::Range range{0, true};
  for (std::int64_t row = rows_of(args) - 1 - blockIdx.x; row >= 0; row -= gridDim.x) {
    const std::byte* x = input_row(args, row, Input::format.bits / 8);
#pragma unroll 4
    for (int begin = threadIdx.x * 8; begin < args.k; begin += blockDim.x * 8) {
      Vector elements;
      elements.template load<Reads::read_only>(x, begin, args.k, args.wide);
      range.include(elements.range());
    }
  }
  const float largest = row_max(range.amax);
  if (threadIdx.x == 0) args.partials[blockIdx.x] = largest;
}

__device__ __forceinline__ float largest_partial(const float* partials, std::int64_t rows) {
  const auto count = static_cast<unsigned>(rows < kPartials ? rows : kPartials);
  float largest = 0;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) largest = fmaxf(largest, partials[i]);
  return row_max(largest);
}

template <Format F>
__device__ __forceinline__ void store_scale(std::byte* scales, std::int64_t at, std::uint32_t code) {
  using Code = std::conditional_t<F.bits == 32, std::uint32_t,
                                  std::conditional_t<F.bits == 16, std::uint16_t, std::uint8_t>>;
  reinterpret_cast<Code*>(scales)[at] = static_cast<Code>(code);
}

/// kCount codes of a row from number `begin` on, those before k.
template <int kBits, int kCount>
__device__ __forceinline__ void store_codes(std::byte* row, int begin, int k, bool wide,
                                            const std::uint32_t (&packed)[kCount * kBits / 32]) {
  static_assert(kCount * kBits == 64);
  std::byte* to = row + static_cast<std::int64_t>(begin) * kBits / 8;
  if (wide) {
    *reinterpret_cast<uint2*>(to) = {packed[0], packed[1]};
    return;
  }
  const int bytes = min(kCount, k - begin) * kBits / 8;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < bytes) to[i] = static_cast<std::byte>(packed[i / 4] >> (i % 4 * 8));
}

/// A scale's code, and what the codes of its group are multiplied by.
struct GroupScaleCode {
  std::uint32_t code;
  float real;
};
template <class Activation>
__device__ __forceinline__ GroupScaleCode group_scale_code(float amax, const TensorScale& two_level) {
  constexpr Operand kOperand = Activation::operand;
  if constexpr (kOperand.scale == formats::ue4m3) {  // the hardware's e4m3
    const std::uint32_t code = encode_pair<formats::e4m3>(block_scale(kOperand, amax, two_level), 0);
    return {code, two_level.apply(decode_e4m3(code))};
  } else {
    const float scale = group_scale<kOperand.scale>(kOperand, {0, amax}, two_level).scale;
    return {encode<kOperand.scale>(scale), scale};
  }
}

/// One row per blockDim.x threads.
template <class Activation, class Input>
__global__ void __launch_bounds__(kMostThreads, least_blocks<Activation, Input>())
    quantize_rows(const QuantizeArgs args) {
  constexpr Operand kOperand = Activation::operand;
  constexpr Format kValue = kOperand.value, kScale = kOperand.scale;
  constexpr int kCount = Share<Activation>::kCount, kVectors = Share<Activation>::kVectors;
  constexpr bool kPerTensor = kOperand.group.n == 0, kWhole = kOperand.group.k == 0;
  constexpr bool kTwoLevel = kOperand.tensor_scale.stored();
  using Vector = Elements<Input::format, kCount>;

  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool mine = row < rows_of(args);  // the others of the block come along to the barriers
  const int k = mine ? args.k : 0;
  const std::byte* x = mine ? input_row(args, row, Input::format.bits / 8) : nullptr;
  Vector elements[kVectors];
  typename Vector::Range ranges[kVectors];
  const auto begin = [&](int chunk, int v) {
    return static_cast<int>((chunk * kVectors + v) * blockDim.x + threadIdx.x) * kCount;
  };
  const auto load = [&](int chunk) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      elements[v].template load<Reads::read_only>(x, begin(chunk, v), k, args.wide);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) ranges[v] = elements[v].range();
  };

  // What holds for the whole row. Chunks are read from the last to the first, which stays in registers.
  const bool dynamic = args.static_scales == nullptr;
  float amax = 0;
  if ((kWhole || kTwoLevel) && !kPerTensor && dynamic) {
    typename Vector::Range range{0, true};
    for (int chunk = args.chunks - 1; chunk >= 0; --chunk) {
      load(chunk);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) range.include(ranges[v]);
    }
    amax = row_max(range.amax);
  } else {
    load(0);
    if (kPerTensor && dynamic) amax = largest_partial(args.partials, args.rows);
  }
  if (!mine) return;  // whole warps

  float scale = 0;
  TensorScale two_level;
  if constexpr (kPerTensor || kTwoLevel)
    if (!dynamic) two_level = args.static_scales[args.static_index != nullptr ? args.static_index[row] : 0];
  if constexpr (kWhole) {
    scale = kPerTensor && !dynamic ? two_level.apply(1.0f) : whole_scale<kScale>(kOperand, amax);
    if (threadIdx.x == 0) store_scale<kScale>(args.scales, row, encode<kScale>(scale));
  } else if constexpr (kTwoLevel) {
    if (dynamic) two_level = {tensor_scale(kOperand, amax), false};
    if (threadIdx.x == 0)
      args.token_scales[row] = two_level.divides ? 1.0f / two_level.value : two_level.value;
  }

  std::byte* values = args.values + row * args.row_bytes;
  std::byte* scales = args.scales + row * args.scale_cols * (kScale.bits / 8);
  for (int chunk = 0;;) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = begin(chunk, v);
      if constexpr (!kWhole) {
        constexpr int group = kOperand.group.k;
        static_assert(group % kCount == 0 && 32 % (group / kCount) == 0, "a group is some lanes of a warp");
        const float largest = group_max<group / kCount>(ranges[v].amax);
        const GroupScaleCode stored = group_scale_code<Activation>(largest, two_level);
        if (first % group == 0 && first < k) store_scale<kScale>(scales, first / group, stored.code);
        scale = stored.real;
      }
      std::uint32_t packed[2];
      encode_elements<kValue>(elements[v], scale, ranges[v], false, packed);
      if (first < k) store_codes<kValue.bits, kCount>(values, first, k, args.wide, packed);
    }
    if (++chunk == args.chunks) break;
    load(chunk);
  }
}

template <class Activation, class Input>
void launch(QuantizeArgs args, cudaStream_t stream) {
  const dim3 block = block_for(args.k);
  args.chunks = (args.k - 1) / (static_cast<int>(block.x) * kShare) + 1;
  if (Activation::operand.group.n == 0 && args.static_scales == nullptr) {
    const auto blocks = static_cast<unsigned>(args.rows < kPartials ? args.rows : kPartials);
    tensor_amax<Input><<<blocks, kMostThreads, 0, stream>>>(args);
  }
  const auto blocks = static_cast<unsigned>((args.rows + block.y - 1) / block.y);
  quantize_rows<Activation, Input><<<blocks, block, 0, stream>>>(args);
}

}  // namespace

cudaError_t launch_quantize(const Operand& operand, Format input, const QuantizeArgs& args,
                            cudaStream_t stream) {
  for_each_scheme([&]<class Row>() {
    if constexpr (Row::scheme.activation.quantized() &&
                  first_with_activation(Row::scheme.activation) == Row::id) {
      if (!(operand == Row::scheme.activation)) return;
      using Activation = ActivationOf<Row::id>;
      if (input == formats::bf16) return launch<Activation, Bf16>(args, stream);
      if (input == formats::f16) return launch<Activation, F16>(args, stream);
      launch<Activation, F32>(args, stream);
    }
  });
  return cudaGetLastError();
}

}  // namespace gatefold::cuda
