#include <cstddef>

#include "cuda/elements.cuh"
#include "cuda/encode.cuh"
#include "cuda/quantize.h"
#include "format/scale_rule.h"

namespace gatefold::cuda {
namespace {

/// The activation operand of a row of the table, as a type.
template <SchemeId kScheme>
struct ActivationTag {
  static constexpr Operand operand = scheme(kScheme).activation;
};

/// Numbers that a thread holds of one row: kVectors times kCount.
template <class Activation>
struct Share {
  static constexpr int kCount = Activation::operand.value.bits == 4 ? 16 : 8;
  static constexpr int kVectors = 32 / kCount;
};

/// threads x share numbers of a row; longer rows are read in several chunks.
struct Block {
  int threads;  ///< per row: whole warps
  int rows;
};

template <int kShare>
constexpr Block block_for(std::int64_t k) {
  const std::int64_t warps = (k + 32 * kShare - 1) / (32 * kShare);
  const int threads = warps < 16 ? static_cast<int>(warps) * 32 : 512;
  return {threads, threads < 256 ? 256 / threads : 1};
}

/// The largest of a number >= 0 over the threads of a row, for all of them. All threads of the block must
/// come.
__device__ __forceinline__ float row_max(float x) {
  const std::uint32_t warp = __reduce_max_sync(0xffffffffu, __float_as_uint(x));
  if (blockDim.x == 32) return __uint_as_float(warp);
  __shared__ std::uint32_t warps[32];
  const unsigned per_row = blockDim.x / 32, first = threadIdx.y * per_row;
  if (threadIdx.x % 32 == 0) warps[first + threadIdx.x / 32] = warp;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  return __uint_as_float(__reduce_max_sync(0xffffffffu, lane < per_row ? warps[first + lane] : 0u));
}

/// The largest of a number >= 0 over aligned groups of kLanes lanes.
template <int kLanes>
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

__device__ __forceinline__ const std::byte* input_row(const QuantizeArgs& args, std::int64_t row,
                                                      int element_bytes) {
  const std::int64_t from = args.gather != nullptr ? args.gather[row] / args.gather_divisor : row;
  return args.x + from * args.k * element_bytes;
}

/// First pass of one scale per tensor: the largest magnitude of some rows, one result per block. It goes
/// backwards: the second pass then finds what was read last in the L2 cache.
template <class Input>
__global__ void __launch_bounds__(512) tensor_amax(const QuantizeArgs args) {
  constexpr int kCount = 8;
  float largest = 0;
  const std::int64_t vectors = (args.k + kCount - 1) / kCount;
  for (std::int64_t row = args.rows - 1 - blockIdx.x; row >= 0; row -= gridDim.x) {
    const std::byte* x = input_row(args, row, Input::format.bits / 8);
#pragma unroll 4
    for (std::int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      Elements<Input::format, kCount> elements;
      bool finite = true;
      elements.load(x, v * kCount, args.k, args.wide);
      largest = fmaxf(largest, elements.amax(finite));
    }
  }
  largest = row_max(largest);
  if (threadIdx.x == 0) args.partials[blockIdx.x] = largest;
}

__device__ __forceinline__ float largest_partial(const float* partials, std::int64_t rows) {
  const auto count = static_cast<unsigned>(rows < kPartials ? rows : kPartials);
  float largest = 0;
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) largest = fmaxf(largest, partials[i]);
  return row_max(largest);
}

template <Format F>
__device__ __forceinline__ void store_scale(std::byte* scales, std::int64_t at, float scale) {
  using Code = std::conditional_t<F.bits == 32, std::uint32_t,
                                  std::conditional_t<F.bits == 16, std::uint16_t, std::uint8_t>>;
  reinterpret_cast<Code*>(scales)[at] = static_cast<Code>(encode<F>(scale));
}

/// kCount codes of a row from number `begin` on, those before k.
template <int kBits, int kCount>
__device__ __forceinline__ void store_codes(std::byte* row, std::int64_t begin, std::int64_t k, bool wide,
                                            const std::uint32_t (&packed)[kCount * kBits / 32]) {
  static_assert(kCount * kBits == 64);
  std::byte* to = row + begin * kBits / 8;
  if (wide) {
    *reinterpret_cast<uint2*>(to) = {packed[0], packed[1]};
    return;
  }
  const std::int64_t bytes = min(static_cast<std::int64_t>(8), (k - begin) * kBits / 8);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < bytes) to[i] = static_cast<std::byte>(packed[i / 4] >> (i % 4 * 8));
}

/// x / scale as codes of F.
template <Format F, Format kInput, int kCount>
__device__ __forceinline__ void encode_elements(const Elements<kInput, kCount>& x, float scale, float amax,
                                                bool finite, std::uint32_t (&packed)[kCount * F.bits / 32]) {
  const Divider divider(scale);
  float quotients[kCount];
  if (kInput.bits == 16 && finite && divider.fits(amax)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) quotients[i] = divider.quotient(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) quotients[i] = divider.any_quotient(x[i]);
  }
  encode_packed<F, kCount>(quotients, packed);
}

/// One row per blockDim.x threads.
template <class Activation, class Input>
__global__ void __launch_bounds__(512) quantize_rows(const QuantizeArgs args) {
  constexpr Operand kOperand = Activation::operand;
  constexpr Format kValue = kOperand.value, kScale = kOperand.scale;
  constexpr int kCount = Share<Activation>::kCount, kVectors = Share<Activation>::kVectors;
  constexpr bool kPerTensor = kOperand.group.n == 0, kWhole = kOperand.group.k == 0;
  constexpr bool kTwoLevel = kOperand.tensor_scale.stored();

  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool mine = row < args.rows;  // the others of the block come along to the barriers
  const std::int64_t k = mine ? args.k : 0;
  const std::byte* x = mine ? input_row(args, row, Input::format.bits / 8) : nullptr;
  const auto begin = [&](std::int64_t chunk, int v) {
    return ((chunk * kVectors + v) * blockDim.x + threadIdx.x) * kCount;
  };
  Elements<Input::format, kCount> elements[kVectors];
  const auto load = [&](std::int64_t chunk) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) elements[v].load(x, begin(chunk, v), k, args.wide);
  };

  // What holds for the whole row. Chunks are read from the last to the first, which stays in registers.
  const TensorScale* fixed = nullptr;
  if constexpr (kPerTensor || kTwoLevel)
    if (args.static_scales != nullptr && mine)
      fixed = args.static_scales + (args.static_index != nullptr ? args.static_index[row] : 0);
  const std::int64_t chunk_size = static_cast<std::int64_t>(blockDim.x) * kVectors * kCount;
  const std::int64_t chunks = (args.k + chunk_size - 1) / chunk_size;
  float amax = 0;
  if constexpr (kPerTensor) {
    load(0);
    if (args.static_scales == nullptr) amax = largest_partial(args.partials, args.rows);
  } else if (kWhole || (kTwoLevel && args.static_scales == nullptr)) {
    for (std::int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      load(chunk);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        bool finite = true;
        amax = fmaxf(amax, elements[v].amax(finite));
      }
    }
    amax = row_max(amax);
  } else {
    load(0);
  }
  if (!mine) return;  // whole warps

  float scale = 0;
  TensorScale two_level;
  if constexpr (kWhole) {
    scale = fixed != nullptr ? fixed->apply(1.0f) : whole_scale<kScale>(kOperand, amax);
    if (threadIdx.x == 0) store_scale<kScale>(args.scales, row, scale);
  } else if constexpr (kTwoLevel) {
    two_level = fixed != nullptr ? *fixed : TensorScale{tensor_scale(kOperand, amax), false};
    if (threadIdx.x == 0)
      args.token_scales[row] = two_level.divides ? 1.0f / two_level.value : two_level.value;
  }

  std::byte* values = args.values + row * args.row_bytes;
  for (std::int64_t chunk = 0;;) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      bool finite = true;
      float largest = elements[v].amax(finite);
      if constexpr (!kWhole) {
        constexpr int group = kOperand.group.k;
        static_assert(group % kCount == 0 && 32 % (group / kCount) == 0, "a group is some lanes of a warp");
        const float stored =
            group_scale<kScale>(kOperand, {0, group_max<group / kCount>(largest)}, two_level).scale;
        if (begin(chunk, v) % group == 0 && begin(chunk, v) < k)
          store_scale<kScale>(args.scales, row * args.scale_cols + begin(chunk, v) / group, stored);
        scale = two_level.apply(stored);
      }
      std::uint32_t packed[kCount * kValue.bits / 32];
      encode_elements<kValue>(elements[v], scale, largest, finite, packed);
      if (begin(chunk, v) < k)
        store_codes<kValue.bits, kCount>(values, begin(chunk, v), k, args.wide, packed);
    }
    if (++chunk == chunks) break;
    load(chunk);
  }
}

template <class Activation, class Input>
void launch(const QuantizeArgs& args, cudaStream_t stream) {
  if (Activation::operand.group.n == 0 && args.static_scales == nullptr) {
    const auto blocks = static_cast<unsigned>(args.rows < kPartials ? args.rows : kPartials);
    tensor_amax<Input><<<blocks, 512, 0, stream>>>(args);
  }
  const Block block = block_for<Share<Activation>::kCount * Share<Activation>::kVectors>(args.k);
  const auto blocks = static_cast<unsigned>((args.rows + block.rows - 1) / block.rows);
  quantize_rows<Activation, Input>
      <<<blocks, dim3(static_cast<unsigned>(block.threads), static_cast<unsigned>(block.rows)), 0, stream>>>(
          args);
}

/// Several rows of the table round activations alike: the first of them has the kernel.
constexpr SchemeId first_alike(const Operand& activation) {
  for (std::size_t i = 0;; ++i)
    if (operands::table[i].activation == activation) return static_cast<SchemeId>(i);
}

}  // namespace

cudaError_t launch_quantize(const Operand& operand, Format input, const QuantizeArgs& args,
                            cudaStream_t stream) {
  for_each_scheme([&]<class Row>() {
    if constexpr (Row::scheme.activation.quantized() && first_alike(Row::scheme.activation) == Row::id) {
      if (!(operand == Row::scheme.activation)) return;
      using Activation = ActivationTag<Row::id>;
      if (input == formats::bf16) return launch<Activation, FormatTag<formats::bf16>>(args, stream);
      if (input == formats::f16) return launch<Activation, FormatTag<formats::f16>>(args, stream);
      launch<Activation, FormatTag<formats::f32>>(args, stream);
    }
  });
  return cudaGetLastError();
}

}  // namespace gatefold::cuda
