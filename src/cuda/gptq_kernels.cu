#include <algorithm>

#include "cuda/elements.cuh"
#include "cuda/gptq_kernels.h"
#include "format/scale_rule.h"

namespace gatefold::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = kGptqBlock / 32;  // of a lane: lane, lane + 32, ...

/// The weight operand of a row of the table, as a type.
template <SchemeId kScheme>
struct WeightTag {
  static constexpr Operand operand = scheme(kScheme).weight;
};

constexpr bool alike(const Operand& a, const Operand& b) {
  return a.value == b.value && a.scale == b.scale && a.tensor_scale == b.tensor_scale;
}

/// Several rows of the table store weights alike, whatever their groups: the first of them has the kernels.
constexpr SchemeId first_alike(const Operand& weight) {
  for (std::size_t i = 0;; ++i)
    if (alike(operands::table[i].weight, weight)) return static_cast<SchemeId>(i);
}

/// Calls f with the WeightTag of a scheme's weights.
template <class Function>
void with_weight(SchemeId id, Function&& f) {
  for_each_scheme([&]<class Row>() {
    if constexpr (Row::scheme.weight.quantized() && first_alike(Row::scheme.weight) == Row::id)
      if (alike(scheme(id).weight, Row::scheme.weight)) f.template operator()<WeightTag<Row::id>>();
  });
}

template <class Weight>
__device__ __forceinline__ float real_scale(const MatrixStack& stack, float stored) {
  return Weight::operand.tensor_scale.stored() ? stack.tensor_scale.apply(stored) : stored;
}

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/// Magnitudes have the order of their bits, so that the order of threads does not matter.
__global__ void largest_magnitude(const float* x, std::int64_t count, std::uint32_t* bits) {
  std::uint32_t most = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x)
    most = max(most, __float_as_uint(fabsf(x[i])));
  atomicMax(bits, __reduce_max_sync(0xffffffffu, most));
}

/// The range of each group of each row: a warp each.
__global__ void row_ranges(const MatrixStack stack, const float* weights, float2* ranges) {
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (item >= static_cast<std::int64_t>(stack.rows()) * stack.groups) return;
  const std::int64_t row = item / stack.groups;
  const int first = static_cast<int>(item % stack.groups) * stack.group_k;
  float low = 0, high = 0;
  for (int j = first + static_cast<int>(threadIdx.x); j < min(first + stack.group_k, stack.k); j += 32) {
    const float w = weights[row * stack.k + j];
    low = fminf(low, w), high = fmaxf(high, w);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffffu, low, step));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
  }
  if (threadIdx.x == 0) ranges[item] = {low, high};
}

/// Item `index` of all bands' groups: the first row, how many rows, and the group.
struct BandGroup {
  int row, rows, group;
  __device__ BandGroup(const MatrixStack& stack, int index) : group(index % stack.groups) {
    const int band = index / stack.groups, matrix = band / stack.bands;
    const int begin = band % stack.bands * stack.band_rows;
    row = matrix * stack.n + begin;
    rows = min(stack.band_rows, stack.n - begin);
  }
};

/// Rows of a band get the range of all of them. A warp for each band's group.
__global__ void band_ranges(const MatrixStack stack, float2* ranges) {
  const int index = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.y);
  if (index >= stack.count * stack.bands * stack.groups) return;
  const BandGroup band(stack, index);
  const auto at = [&](int row) -> float2& {
    return ranges[static_cast<std::int64_t>(band.row + row) * stack.groups + band.group];
  };
  float2 all{0, 0};
  for (int row = static_cast<int>(threadIdx.x); row < band.rows; row += 32)
    all = {fminf(all.x, at(row).x), fmaxf(all.y, at(row).y)};
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    all.x = fminf(all.x, __shfl_xor_sync(0xffffffffu, all.x, step));
    all.y = fmaxf(all.y, __shfl_xor_sync(0xffffffffu, all.y, step));
  }
  for (int row = static_cast<int>(threadIdx.x); row < band.rows; row += 32) at(row) = all;
}

template <class Weight>
__device__ __forceinline__ GroupScale candidate(const MatrixStack& stack, float2 range, int step) {
  constexpr Operand kOperand = Weight::operand;
  constexpr Format kScale = kOperand.scale;
  const float factor = search_factor(step);
  return group_scale<kScale>(kOperand, {range.x * factor, range.y * factor}, stack.tensor_scale);
}

/// The error of each group of each row under each scale that is tried: a warp for a row's group.
template <class Weight>
__global__ void row_errors(const MatrixStack stack, const float* weights, const float* importance, int steps,
                           const float2* ranges, float* errors) {
  constexpr Format kValue = Weight::operand.value;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  const std::int64_t items = static_cast<std::int64_t>(stack.rows()) * stack.groups;
  if (item >= items) return;
  const std::int64_t row = item / stack.groups;
  const int first = static_cast<int>(item % stack.groups) * stack.group_k;
  const float2 range = ranges[item];
  for (int step = 0; step < steps; ++step) {
    const GroupScale tried = candidate<Weight>(stack, range, step);
    const float scale = real_scale<Weight>(stack, tried.scale);
    double sum = 0;
    for (int j = first + static_cast<int>(threadIdx.x); j < min(first + stack.group_k, stack.k); j += 32) {
      const float w = weights[row * stack.k + j];
      const float error = w - nearest<kValue>(w, scale, tried.zero);
      sum += static_cast<double>(error) * error * importance[j];
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) errors[step * items + item] = static_cast<float>(sum);
  }
}

/// The best of the scales that were tried, the first of several. A warp for each band's group.
template <class Weight>
__global__ void choose_scales(const MatrixStack stack, int steps, const float2* ranges, const float* errors) {
  const int index = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.y);
  if (index >= stack.count * stack.bands * stack.groups) return;
  const BandGroup band(stack, index);
  const std::int64_t items = static_cast<std::int64_t>(stack.rows()) * stack.groups;
  const std::int64_t first = static_cast<std::int64_t>(band.row) * stack.groups + band.group;
  double least = 0;
  int best = -1;
  for (int step = 0; step < steps; ++step) {
    double sum = 0;
    for (int row = static_cast<int>(threadIdx.x); row < band.rows; row += 32)
      sum += errors[step * items + first + static_cast<std::int64_t>(row) * stack.groups];
    sum = warp_sum(sum);
    if (best < 0 || sum < least) least = sum, best = step;
  }
  if (threadIdx.x != 0) return;
  const GroupScale chosen = candidate<Weight>(stack, ranges[first], best);
  stack.scales[index] = chosen.scale;
  stack.zeros[index] = chosen.zero;
}

__global__ void permute(const float* x, const int* order, int k, float* out) {
  const int i = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const std::int64_t row = blockIdx.x;
  if (i < k) out[row * k + i] = x[row * k + order[i]];
}

/// What a lane holds of a row's block of columns: number i is column lane + 32 i.
struct LaneColumns {
  float x[kColumns], scale[kColumns], zero[kColumns];
};

template <class Weight>
__device__ __forceinline__ void load_scales(const MatrixStack& stack, int row, int column, float& scale,
                                            float& zero) {
  const int at = stack.group_at(row, column / stack.group_k);
  scale = real_scale<Weight>(stack, stack.scales[at]);
  zero = stack.zeros[at];
}

/// GPTQ's inner loop: a warp has a row.
template <class Weight>
__global__ void __launch_bounds__(kThreads)
    round_block(const MatrixStack stack, const float* columns, const int* order, const float* factor,
                int begin, float* values, float* errors) {
  constexpr Format kValue = Weight::operand.value;
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.y), k = stack.k;
  if (row >= stack.rows()) return;
  const int lane = static_cast<int>(threadIdx.x), count = min(kGptqBlock, k - begin);
  LaneColumns mine{};
  float rounded[kColumns] = {}, error[kColumns] = {}, diagonal[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int c = lane + 32 * i;
    diagonal[i] = 1;
    if (c >= count) continue;
    mine.x[i] = columns[static_cast<std::int64_t>(row) * k + begin + c];
    diagonal[i] = factor[static_cast<std::int64_t>(begin + c) * (k + 1)];
    load_scales<Weight>(stack, row, order[begin + c], mine.scale[i], mine.zero[i]);
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    for (int owner = 0; owner < min(32, count - 32 * i); ++owner) {
      // The owner's column is final; it alone is rounded, and its error is everyone's.
      const float value = nearest<kValue>(mine.x[i], mine.scale[i], mine.zero[i]);
      const float own = (mine.x[i] - value) / diagonal[i];
      if (lane == owner) rounded[i] = value, error[i] = own;
      const float passed = __shfl_sync(0xffffffffu, own, owner);
      const float* line = factor + static_cast<std::int64_t>(begin + 32 * i + owner) * k + begin;
#pragma unroll
      for (int other = i; other < kColumns; ++other) {
        const int c = lane + 32 * other;
        if (c > 32 * i + owner && c < count) mine.x[other] = fmaf(-passed, line[c], mine.x[other]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int c = lane + 32 * i;
    errors[static_cast<std::int64_t>(row) * kGptqBlock + c] = error[i];
    if (c < count) values[static_cast<std::int64_t>(row) * k + order[begin + c]] = rounded[i];
  }
}

__global__ void difference(const float* a, const float* b, std::int64_t count, float* out) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = a[i] - b[i];
}

/// Each code of a block to its best with all others fixed, one after the other: a warp has a row.
template <class Weight>
__global__ void __launch_bounds__(kThreads)
    move_block(const MatrixStack stack, const float* hessian, const float* gradient, int begin, float* values,
               float* changes) {
  constexpr Format kValue = Weight::operand.value;
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.y), k = stack.k;
  if (row >= stack.rows()) return;
  const int lane = static_cast<int>(threadIdx.x), count = min(kGptqBlock, k - begin);
  const std::int64_t at = static_cast<std::int64_t>(row) * k + begin;
  LaneColumns mine{};
  float value[kColumns] = {}, change[kColumns] = {}, diagonal[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int c = lane + 32 * i;
    diagonal[i] = 1;
    if (c >= count) continue;
    mine.x[i] = gradient[at + c];
    value[i] = values[at + c];
    diagonal[i] = hessian[static_cast<std::int64_t>(begin + c) * (k + 1)];
    load_scales<Weight>(stack, row, begin + c, mine.scale[i], mine.zero[i]);
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    for (int owner = 0; owner < min(32, count - 32 * i); ++owner) {
      const float better = nearest<kValue>(value[i] + mine.x[i] / diagonal[i], mine.scale[i], mine.zero[i]);
      const float own = better - value[i];
      const float passed = __shfl_sync(0xffffffffu, own, owner);
      if (passed == 0) continue;
      if (lane == owner) value[i] = better, change[i] = own;
      const float* line = hessian + static_cast<std::int64_t>(begin + 32 * i + owner) * k + begin;
#pragma unroll
      for (int other = 0; other < kColumns; ++other) {
        const int c = lane + 32 * other;
        if (c < count) mine.x[other] = fmaf(-passed, line[c], mine.x[other]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int c = lane + 32 * i;
    changes[static_cast<std::int64_t>(row) * kGptqBlock + c] = change[i];
    if (c < count) values[at + c] = value[i];
  }
}

/// A band's scale of one group: Q' = (1 + d) Q changes the error by -2 d a + d^2 b, a = <gradient, Q>, b =
/// <Q, Q H>. The best that can be stored, if it is better than `stored`.
template <class Weight>
__device__ __forceinline__ float better_scale(const MatrixStack& stack, float stored, double a, double b) {
  constexpr Operand kOperand = Weight::operand;
  constexpr Format kScale = kOperand.scale;
  if (!(b > 0)) return stored;
  const float before = real_scale<Weight>(stack, stored);
  float wanted = static_cast<float>(before * (1 + a / b));
  if (!(wanted > 0 && wanted < INFINITY)) return stored;
  if constexpr (kOperand.tensor_scale.stored())
    wanted =
        stack.tensor_scale.divides ? wanted * stack.tensor_scale.value : wanted / stack.tensor_scale.value;
  const float rounded = round_to<kScale>(wanted);
  if (!(rounded > 0 && rounded < INFINITY)) return stored;
  const double d = static_cast<double>(real_scale<Weight>(stack, rounded)) / before - 1;
  return -2 * d * a + d * d * b < 0 ? rounded : stored;
}

/// Scales of one group. A thread block for each band.
template <class Weight>
__global__ void move_scale(const MatrixStack stack, const float* gradient, int group, float* values,
                           float* curved) {
  __shared__ double sums[2][32];
  __shared__ float moved[2];  // the real scale before and after
  const BandGroup band(stack, static_cast<int>(blockIdx.x) * stack.groups + group);
  const int first = group * stack.group_k, count = min(stack.group_k, stack.k - first);
  const std::int64_t items = static_cast<std::int64_t>(band.rows) * count;
  const auto place = [&](std::int64_t item) {
    return (band.row + item / count) * stack.k + first + item % count;
  };
  float* const curve = curved + static_cast<std::int64_t>(band.row) * count;
  double a = 0, b = 0;
  for (std::int64_t item = threadIdx.x; item < items; item += blockDim.x) {
    const double value = values[place(item)];
    a += value * gradient[place(item)];
    b += value * curve[item];
  }
  a = warp_sum(a), b = warp_sum(b);
  if (threadIdx.x % 32 == 0) sums[0][threadIdx.x / 32] = a, sums[1][threadIdx.x / 32] = b;
  __syncthreads();
  if (threadIdx.x == 0) {
    a = b = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) a += sums[0][warp], b += sums[1][warp];
    float& stored = stack.scales[stack.group_at(band.row, group)];
    moved[0] = real_scale<Weight>(stack, stored);
    stored = better_scale<Weight>(stack, stored, a, b);
    moved[1] = real_scale<Weight>(stack, stored);
  }
  __syncthreads();
  const float before = moved[0], after = moved[1];
  for (std::int64_t item = threadIdx.x; item < items; item += blockDim.x) {
    const float value = values[place(item)];
    const float scaled = before == after ? value : value / before * after;
    values[place(item)] = scaled;
    curve[item] = scaled - value;
  }
}

/// The same for all groups of a block of columns, none wider than a warp, which has a row.
template <class Weight>
__global__ void __launch_bounds__(kThreads)
    move_block_scales(const MatrixStack stack, const float* hessian, const float* gradient, int begin,
                      float* values, float* changes) {
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.y), k = stack.k;
  if (row >= stack.rows()) return;
  const int lane = static_cast<int>(threadIdx.x), count = min(kGptqBlock, k - begin);
  const std::int64_t at = static_cast<std::int64_t>(row) * k + begin;
  float x[kColumns] = {}, value[kColumns] = {}, stored[kColumns] = {}, change[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int c = lane + 32 * i;
    if (c >= count) continue;
    x[i] = gradient[at + c];
    value[i] = values[at + c];
    stored[i] = stack.scales[stack.group_at(row, (begin + c) / stack.group_k)];
  }
  const auto line = [&](int column) {
    return hessian + static_cast<std::int64_t>(begin + column) * k + begin;
  };
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
#pragma unroll 1
    for (int first = 0; first < min(32, count - 32 * i); first += stack.group_k) {
      const bool mine = lane >= first && lane < first + stack.group_k;
      float curve = 0;
      for (int owner = first; owner < first + stack.group_k; ++owner) {
        const float other = __shfl_sync(0xffffffffu, value[i], owner);
        if (mine) curve = fmaf(other, line(32 * i + owner)[32 * i + lane], curve);
      }
      const double own = mine ? value[i] : 0.0;
      const double a = warp_sum(own * x[i]), b = warp_sum(own * curve);
      const float old = __shfl_sync(0xffffffffu, stored[i], first);
      const float found = better_scale<Weight>(stack, old, a, b);
      if (found == old) continue;
      if (mine) {
        const float scaled = value[i] / real_scale<Weight>(stack, old) * real_scale<Weight>(stack, found);
        change[i] = scaled - value[i];
        value[i] = scaled;
      }
      if (lane == first) stack.scales[stack.group_at(row, (begin + 32 * i + first) / stack.group_k)] = found;
#pragma unroll 1
      for (int owner = first; owner < first + stack.group_k; ++owner) {
        const float passed = __shfl_sync(0xffffffffu, change[i], owner);
#pragma unroll
        for (int other = 0; other < kColumns; ++other)
          if (lane + 32 * other < count)
            x[other] = fmaf(-passed, line(32 * i + owner)[lane + 32 * other], x[other]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int c = lane + 32 * i;
    changes[static_cast<std::int64_t>(row) * kGptqBlock + c] = change[i];
    if (c < count) values[at + c] = value[i];
  }
}

template <Format F>
__device__ __forceinline__ std::uint32_t code_of(float value, float scale, float zero) {
  if (!(scale > 0)) return F.kind == Kind::unsigned_integer ? encode<F>(zero) : 0;
  const float scaled = value / scale;
  return encode<F>(F.kind == Kind::unsigned_integer ? detail::round_to_integer(scaled) + zero : scaled);
}

/// A thread for each byte.
template <class Weight>
__global__ void encode_values(const MatrixStack stack, int row_bytes, float* values, std::byte* codes) {
  constexpr Format kValue = Weight::operand.value;
  constexpr int kEach = 8 / kValue.bits;
  const int byte = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x),
            row = static_cast<int>(blockIdx.x);
  if (byte >= row_bytes) return;
  std::uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int column = byte * kEach + i;
    if (column >= stack.k) break;
    float scale = 0, zero = 0;
    load_scales<Weight>(stack, row, column, scale, zero);
    float& value = values[static_cast<std::int64_t>(row) * stack.k + column];
    const std::uint32_t code = code_of<kValue>(value, scale, zero);
    packed |= code << (kValue.bits * i);
    const float decoded = decode<kValue>(code);
    value = (kValue.kind == Kind::unsigned_integer ? decoded - zero : decoded) * scale;
  }
  codes[static_cast<std::int64_t>(row) * row_bytes + byte] = static_cast<std::byte>(packed);
}

const dim3 kWarpRows(32, kWarps);

}  // namespace

void GptqKernels::largest(const float* x, std::int64_t count, std::uint32_t* bits) const {
  largest_magnitude<<<std::min(256u, blocks_for(count, kThreads)), kThreads, 0, stream>>>(x, count, bits);
}

void GptqKernels::search_scales(const MatrixStack& stack, const float* weights, const float* importance,
                                int steps, float2* ranges, float* errors) const {
  const unsigned of_rows = blocks_for(static_cast<std::int64_t>(stack.rows()) * stack.groups, kWarps);
  const unsigned of_bands =
      blocks_for(static_cast<std::int64_t>(stack.count) * stack.bands * stack.groups, kWarps);
  row_ranges<<<of_rows, kWarpRows, 0, stream>>>(stack, weights, ranges);
  if (stack.band_rows > 1) band_ranges<<<of_bands, kWarpRows, 0, stream>>>(stack, ranges);
  with_weight(scheme, [&]<class Weight>() {
    row_errors<Weight><<<of_rows, kWarpRows, 0, stream>>>(stack, weights, importance, steps, ranges, errors);
    choose_scales<Weight><<<of_bands, kWarpRows, 0, stream>>>(stack, steps, ranges, errors);
  });
}

void GptqKernels::permute_columns(const float* x, const int* order, int rows, int k, float* out) const {
  permute<<<dim3(static_cast<unsigned>(rows), blocks_for(k, kThreads)), kThreads, 0, stream>>>(x, order, k,
                                                                                               out);
}

void GptqKernels::round_columns(const MatrixStack& stack, const float* columns, const int* order,
                                const float* factor, int begin, float* values, float* errors) const {
  with_weight(scheme, [&]<class Weight>() {
    round_block<Weight><<<blocks_for(stack.rows(), kWarps), kWarpRows, 0, stream>>>(
        stack, columns, order, factor, begin, values, errors);
  });
}

void GptqKernels::subtract(const float* a, const float* b, std::int64_t count, float* out) const {
  difference<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(a, b, count, out);
}

void GptqKernels::move_codes(const MatrixStack& stack, const float* hessian, const float* gradient, int begin,
                             float* values, float* changes) const {
  with_weight(scheme, [&]<class Weight>() {
    move_block<Weight><<<blocks_for(stack.rows(), kWarps), kWarpRows, 0, stream>>>(stack, hessian, gradient,
                                                                                   begin, values, changes);
  });
}

void GptqKernels::move_scales_of_block(const MatrixStack& stack, const float* hessian, const float* gradient,
                                       int begin, float* values, float* changes) const {
  with_weight(scheme, [&]<class Weight>() {
    move_block_scales<Weight><<<blocks_for(stack.rows(), kWarps), kWarpRows, 0, stream>>>(
        stack, hessian, gradient, begin, values, changes);
  });
}

void GptqKernels::move_scales(const MatrixStack& stack, const float* gradient, int group, float* values,
                              float* curved) const {
  const std::int64_t items = static_cast<std::int64_t>(stack.band_rows) * stack.group_k;
  const int threads = items <= 64 ? 32 : items <= 4096 ? 128 : 1024;
  with_weight(scheme, [&]<class Weight>() {
    move_scale<Weight><<<static_cast<unsigned>(stack.count * stack.bands), threads, 0, stream>>>(
        stack, gradient, group, values, curved);
  });
}

void GptqKernels::encode(const MatrixStack& stack, int row_bytes, float* values, std::byte* codes) const {
  with_weight(scheme, [&]<class Weight>() {
    encode_values<Weight>
        <<<dim3(static_cast<unsigned>(stack.rows()), blocks_for(row_bytes, kThreads)), kThreads, 0, stream>>>(
            stack, row_bytes, values, codes);
  });
}

}  // namespace gatefold::cuda
