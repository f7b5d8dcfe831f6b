#pragma once
/// \file
/// The kernel of moe_gemm.h. Weights are the A operand of m16n8k16 multiplies, tokens the B operand.
///
/// All records of all items form one sequence. Each thread block takes an equal run of whole units, each of
/// its warps an equal run of the block's records: a stream of memory that it copies through a ring of its
/// own, decodes and multiplies, without a barrier. A unit whose records several warps have is added up, in
/// the order of k, by the warp that has its first ones.

#include "cuda/moe_gemm.h"
#include "cuda/ptx.cuh"

namespace gatefold::cuda {

/// What a kernel is made for.
template <class SchemeTag, bool kWide, InputKind kInput, int kTileCount>
struct GemmTraits {
  static constexpr PackedFormat P = packed_format(SchemeTag::scheme.weight, kWide);
  static constexpr InputKind input = kInput;
  static constexpr int tiles = kTileCount;
  /// The multiply's type. bf16 with f16: the f16 operand becomes two bf16.
  static constexpr bool f16_inputs = kInput == InputKind::f16;
  static constexpr Format M = f16_inputs && P.value != formats::bf16 ? formats::f16 : formats::bf16;
  static constexpr bool split_inputs = f16_inputs && M == formats::bf16;
  static constexpr bool split_weights = P.value == formats::f16 && M == formats::bf16;
  static constexpr bool record_scales = kInput == InputKind::bf16_record_scales;
  static constexpr bool scaled_groups = (P.scale.stored() && !P.folded) || record_scales;

  static constexpr int warps = kGemmThreads / 32;
  static constexpr int record_bytes = P.record_bytes();
  static constexpr int chunk = record_bytes < 2048 ? 4 : record_bytes < 4096 ? 2 : 1;  // records
  static constexpr int chunk_bytes = chunk * record_bytes;
  static constexpr int partial_bytes = tiles * 4 * 32 * static_cast<int>(sizeof(float));
  static constexpr int stages = (232448 / warps - partial_bytes) / chunk_bytes >= 3 ? 3 : 2;
  static constexpr int shared_bytes = warps * (partial_bytes + stages * chunk_bytes);
};

/// Sums of a unit: of each tile the rows lane / 4 and + 8 by two columns.
template <class T>
using Sums = float[T::tiles][4];

/// The records that a warp multiplies: a run of the sequence of all items' units' records.
struct Share {
  int item = 0, unit = 0, record = 0;  ///< where it begins
  int records = 0;
};

__device__ __forceinline__ int split(int total, int parts, int part) {
  const int each = total / parts, rest = total % parts;
  return part * each + min(part, rest);
}

__device__ __forceinline__ Share share_of_warp(const GemmArgs& args, int warp, int warps,
                                               int* block_records) {
  const int units = *args.item_count * args.units;
  const int first = split(units, gridDim.x, blockIdx.x), last = split(units, gridDim.x, blockIdx.x + 1);
  *block_records = (last - first) * args.records;
  const int begin = split(*block_records, warps, warp);
  const int unit = first + begin / args.records;
  return {unit / args.units, unit % args.units, begin % args.records,
          split(*block_records, warps, warp + 1) - begin};
}

/// A warp's records on their way through shared memory: chunks of some KB, so that reads of DRAM are long.
template <class T>
class Ring {
 public:
  __device__ Ring(const GemmArgs& args, const Share& share, std::byte* memory, int lane)
      : args_(args), memory_(memory), lane_(lane), left_(share.records), item_(share.item) {
    if (left_ > 0) enter(share.unit * args.records + share.record);
    for (int i = 0; i < T::stages - 1; ++i) load(i);
    loading_ = T::stages - 1;
  }

  /// The next chunk, as soon as it is there; starts to copy another one into the place of the last.
  __device__ const std::byte* next() {
    wait_copies<T::stages - 2>();
    __syncwarp();
    load(loading_);
    const std::byte* chunk = memory_ + reading_ * T::chunk_bytes;
    loading_ = loading_ + 1 == T::stages ? 0 : loading_ + 1;
    reading_ = reading_ + 1 == T::stages ? 0 : reading_ + 1;
    return chunk;
  }

 private:
  __device__ void enter(int record) {
    const int all = args_.units * args_.records;
    const std::int64_t begin = T::P.row_scale ? args_.units * kUnitRows * 4 : 0;
    from_ = args_.weights + args_.items[item_].expert * args_.expert_stride + begin +
            static_cast<std::int64_t>(record) * T::record_bytes;
    item_left_ = all - record;
  }

  __device__ void load(int stage) {
    constexpr int bytes = T::record_bytes;
    std::byte* to = memory_ + stage * T::chunk_bytes;
    for (int i = 0; i < T::chunk && left_ > 0; ++i, --left_) {
      if (item_left_ == 0) {
        ++item_;
        enter(0);
      }
#pragma unroll
      for (int at = 0; at < bytes; at += kLineBytes)
        if (at + kLineBytes <= bytes || lane_ * 16 < bytes - at)
          copy16_async(to + at + lane_ * 16, from_ + at + lane_ * 16);
      to += bytes;
      from_ += bytes;
      --item_left_;
    }
    commit_copies();
  }

  const GemmArgs& args_;
  std::byte* memory_;
  const std::byte* from_ = nullptr;
  int lane_, left_, item_, item_left_ = 0;
  int loading_ = 0, reading_ = 0;
};

/// The tokens of an item, as this lane needs them: as columns lane / 4 of B, and 2 (lane % 4) and + 1 of the
/// sums.
template <class T>
struct Columns {
  Item item{};
  const std::uint16_t* rows[T::tiles];  // nullptr: there is no such token
  const float* scales[T::record_scales ? T::tiles : 1][2];

  static __device__ std::int64_t input_row(const GemmInputs& in, int position) {
    return in.slots == nullptr ? position : in.slots[position] / in.top_k;
  }

  __device__ void set(const GemmArgs& args, int index, int lane) {
    item = args.items[index];
    const GemmInputs& in = args.inputs;
#pragma unroll
    for (int t = 0; t < T::tiles; ++t) {
      const int column = t * kTileTokens + lane / 4;
      rows[t] = column < item.count ? in.rows + input_row(in, item.first + column) * in.stride + lane % 4 * 8
                                    : nullptr;
      if constexpr (T::record_scales)
        for (int c = 0; c < 2; ++c) {
          const int token = min(t * kTileTokens + lane % 4 * 2 + c, item.count - 1);
          scales[t][c] = in.record_scales + input_row(in, item.first + token) * (in.stride / kRecordColumns);
        }
    }
  }
  __device__ uint4 load(int tile, int column) const {
    return rows[tile] == nullptr ? uint4{} : *reinterpret_cast<const uint4*>(rows[tile] + column);
  }
};

template <int kBytes>
__device__ __forceinline__ void load_words(const std::byte* from, std::uint32_t* words) {
  if constexpr (kBytes == 1)
    words[0] = *reinterpret_cast<const std::uint8_t*>(from);
  else if constexpr (kBytes == 2)
    words[0] = *reinterpret_cast<const std::uint16_t*>(from);
  else if constexpr (kBytes == 4)
    words[0] = *reinterpret_cast<const std::uint32_t*>(from);
  else if constexpr (kBytes == 8)
    *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(from);
  else
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(words)[i] = reinterpret_cast<const uint4*>(from)[i];
}

/// The words of 32 columns of rows lane / 4 and + 8. With 4 bits, two blocks share a line.
template <int kPerRow>
__device__ __forceinline__ void load_block(const std::byte* record, int block, int lane,
                                           std::uint32_t* words) {
  if constexpr (kPerRow == 1)
    load_words<8>(record + block / 2 * kLineBytes + lane * 16 + block % 2 * 8, words);
  else
    for (int i = 0; i < kPerRow / 2; ++i)
      load_words<16>(record + (block * kPerRow / 2 + i) * kLineBytes + lane * 16, words + 4 * i);
}

/// Scales and zero points of a record, for rows lane / 4 and + 8.
template <PackedFormat P>
struct RecordScales {
  static constexpr int groups = P.groups(), values = P.value_bytes(), zeros_at = P.zeros_at();
  static constexpr int bytes = !P.scale.stored() ? 0 : P.banded ? 8 : groups * 2 * P.scale.bits / 8;
  alignas(16) std::uint32_t words[bytes / 4 + 1];
  std::uint32_t zeros[1];

  __device__ RecordScales(const std::byte* record, int row) {
    if constexpr (bytes != 0) load_words<bytes>(record + values + (P.banded ? 0 : row * bytes), words);
    if constexpr (P.zeros) load_words<groups>(record + zeros_at + row * groups, zeros);
  }
  __device__ std::uint32_t code(int group, int half) const {
    constexpr int bits = P.scale.bits == 0 ? 32 : P.scale.bits;
    const int index = group * 2 + half;
    return words[index * bits / 32] >> (index * bits % 32) & (~0u >> (32 - bits));
  }
  __device__ float scale(int group, int half) const {
    if constexpr (!P.scale.stored() || P.folded)
      return 1.0f;
    else if constexpr (P.scale == formats::bf16)
      return __uint_as_float(half == 0 ? words[group] << 16 : words[group] & 0xffff0000u);
    else
      return decode<P.scale>(code(group, half));
  }
  /// decode8's term for the group of column k.
  template <Format M>
  __device__ Pair term(int k, int half) const {
    if constexpr (P.folded) return folded_term<P, M>(code(k / P.group, half));
    if constexpr (P.zeros) return zero_term<P, M>(zeros[0] >> (k / P.group * 8 + half * 4) & 15);
    return 0;
  }
};

/// The sums of one group become part of those of the unit.
template <class T>
__device__ __forceinline__ void add_group(const RecordScales<T::P>& scales, int group,
                                          const float (&x_scales)[2], float (&sums)[4], float (&part)[4]) {
  for (int i = 0; i < 4; ++i) {
    float scale = scales.scale(group, i / 2);
    if constexpr (T::record_scales) scale *= x_scales[i % 2];
    sums[i] = fmaf(part[i], scale, sums[i]);
    part[i] = 0;
  }
}

/// 16 columns of both rows, as two bf16 numbers each if need be, by one tile of tokens.
template <class T>
__device__ __forceinline__ void multiply_step(const Pair (&a)[4], Pair b0, Pair b1, float (&sums)[4]) {
  if constexpr (T::split_weights) {
    Pair high[4], low[4];
    for (int i = 0; i < 4; ++i) split_f16(a[i], high[i], low[i]);
    mma<T::M>(sums, low, b0, b1);
    mma<T::M>(sums, high, b0, b1);
  } else if constexpr (T::split_inputs) {
    Pair high[2], low[2];
    split_f16(b0, high[0], low[0]);
    split_f16(b1, high[1], low[1]);
    mma<T::M>(sums, a, low[0], low[1]);
    mma<T::M>(sums, a, high[0], high[1]);
  } else {
    mma<T::M>(sums, a, b0, b1);
  }
}

/// Record `index` of a unit by all tokens of the item.
template <class T>
__device__ __forceinline__ void multiply_record(const std::byte* record, int index, const Columns<T>& columns,
                                                int lane, Sums<T>& sums) {
  constexpr PackedFormat P = T::P;
  constexpr int per_row = P.value.bits / 4;  // words of 8 codes
  const RecordScales<P> scales(record, lane / 4);
  float x_scales[T::tiles][2];
  if constexpr (T::record_scales)
    for (int t = 0; t < T::tiles; ++t)
      for (int c = 0; c < 2; ++c) x_scales[t][c] = columns.scales[t][c][index];

  float parts[T::tiles][4] = {};  // sums of a group
#pragma unroll
  for (int block = 0; block < kRecordColumns / 32; ++block) {
    alignas(16) std::uint32_t words[2 * per_row];
    load_block<per_row>(record, block, lane, words);
    Pair rows[2][4];  // 8 columns of rows lane / 4 and + 8
    for (int half = 0; half < 2; ++half)
      decode8<P, T::M>(words + half * per_row, scales.template term<T::M>(block * 32 + lane % 4 * 8, half),
                       rows[half]);
#pragma unroll
    for (int t = 0; t < T::tiles; ++t) {
      if (t > 0 && t * kTileTokens >= columns.item.count) break;
      const uint4 x = columns.load(t, index * kRecordColumns + block * 32);
      float(&to)[4] = T::scaled_groups ? parts[t] : sums[t];
      multiply_step<T>({rows[0][0], rows[1][0], rows[0][1], rows[1][1]}, x.x, x.y, to);
      multiply_step<T>({rows[0][2], rows[1][2], rows[0][3], rows[1][3]}, x.z, x.w, to);
      if constexpr (T::scaled_groups)
        if ((block + 1) * 32 % P.group == 0)
          add_group<T>(scales, block * 32 / P.group, x_scales[t], sums[t], parts[t]);
    }
  }
}

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

__device__ __forceinline__ float activate(const Activation& a, float gate, float up) {
  const float g = fminf(gate, a.limit) + (gate - gate), u = fmaxf(fminf(up, a.limit), -a.limit) + (up - up);
  switch (a.kind) {
    case Activation::Kind::geglu:
      return 0.5f * g * (1.0f + erff(g * 0.70710678f)) * u;
    case Activation::Kind::geglu_tanh:
      return 0.5f * g * (1.0f + tanhf(0.79788456f * (g + 0.044715f * g * g * g))) * u;
    default:
      return g * sigmoid(a.alpha * g) * (u + a.beta);
  }
}

__device__ __forceinline__ void store(const GemmArgs& args, int position, int row, float value) {
  const std::int64_t at = position * args.out_stride + row;
  if (args.out_dtype == DType::f32)
    static_cast<float*>(args.out)[at] = value;
  else if (args.out_dtype == DType::bf16)
    static_cast<std::uint16_t*>(args.out)[at] = static_cast<std::uint16_t>(encode<formats::bf16>(value));
  else
    static_cast<std::uint16_t*>(args.out)[at] = static_cast<std::uint16_t>(encode<formats::f16>(value));
}

/// What follows the multiply, for the two rows and two columns a tile that this lane has of a unit.
template <class T>
__device__ void finish_unit(const GemmArgs& args, const Item& item, int unit, int lane, const Sums<T>& sums) {
  constexpr auto power = static_cast<float>(1 << decoded_power<T::P, T::M>());
  const int row = lane / 4;
  float low = power, high = power;
  if constexpr (T::P.row_scale) {
    const auto* scales =
        reinterpret_cast<const float*>(args.weights + item.expert * args.expert_stride) + unit * kUnitRows;
    low *= scales[row];
    high *= scales[row + 8];
  }
  const GemmInputs& in = args.inputs;
#pragma unroll
  for (int t = 0; t < T::tiles; ++t)
    for (int c = 0; c < 2; ++c) {
      const int column = t * kTileTokens + lane % 4 * 2 + c;
      if (column >= item.count) continue;
      const int position = item.first + column;
      const float scale =
          in.row_scales == nullptr ? 1.0f : in.row_scales[Columns<T>::input_row(in, position)];
      const float first = sums[t][c] * low * scale, second = sums[t][2 + c] * high * scale;
      const std::int64_t biases = static_cast<std::int64_t>(item.expert) * args.rows;
      if (args.kind == GemmKind::gate_up) {
        const int channel = unit * 8 + row;
        // The last unit's lanes fill rows up to their stride, which is a multiple of what down reads.
        const int end = unit + 1 == args.units ? static_cast<int>(args.out_stride) : 0;
        for (int pad = channel < args.rows ? channel + 8 : channel; pad < end; pad += 8)
          if (pad >= args.rows) store(args, position, pad, 0.0f);
        if (channel >= args.rows) continue;
        const float gate = first + (args.bias == nullptr ? 0.0f : args.bias[biases + channel]);
        const float up = second + (args.up_bias == nullptr ? 0.0f : args.up_bias[biases + channel]);
        store(args, position, channel, activate(args.activation, gate, up));
      } else {
        for (int half = 0; half < 2; ++half) {
          const int out = unit * kUnitRows + row + 8 * half;
          if (out >= args.rows) continue;
          store(args, position, out,
                (half == 0 ? first : second) + (args.bias == nullptr ? 0.0f : args.bias[biases + out]));
        }
      }
    }
}

/// Adds what the next warps have of the unit that a warp has begun and not ended: theirs are the first
/// records of their shares.
template <class T>
__device__ __forceinline__ void add_partials(const float* partials, int warp, int block_records, int missing,
                                             int lane, Sums<T>& sums) {
  for (int next = warp + 1; missing > 0; ++next) {
    const int theirs = split(block_records, T::warps, next + 1) - split(block_records, T::warps, next);
    if (theirs == 0) continue;
    for (int t = 0; t < T::tiles; ++t)
      for (int i = 0; i < 4; ++i) sums[t][i] += partials[((next * T::tiles + t) * 4 + i) * 32 + lane];
    missing -= theirs;
  }
}

template <class T>
__global__ void __launch_bounds__(kGemmThreads, 1) moe_gemm(const __grid_constant__ GemmArgs args) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto* partials = reinterpret_cast<float*>(shared);
  std::byte* memory = reinterpret_cast<std::byte*>(shared) + T::warps * T::partial_bytes;

  if (!args.items_are_old) wait_for_previous_kernel();
  int block_records = 0;
  const Share share = share_of_warp(args, warp, T::warps, &block_records);
  Ring<T> ring(args, share, memory + warp * T::stages * T::chunk_bytes, lane);
  if (args.items_are_old) wait_for_previous_kernel();
  let_next_kernel_start();

  int item = share.item, unit = share.unit, record = share.record;
  bool begun = record == 0;  // the unit, by this warp
  Columns<T> columns;
  if (share.records > 0) columns.set(args, item, lane);
  Sums<T> sums = {};
  const auto leave = [&] {  // for another warp to add
    for (int t = 0; t < T::tiles; ++t)
      for (int i = 0; i < 4; ++i) partials[((warp * T::tiles + t) * 4 + i) * 32 + lane] = sums[t][i];
  };
  for (int left = share.records; left > 0;) {
    const std::byte* chunk = ring.next();
    for (int i = 0; i < T::chunk && left > 0; ++i, --left) {
      multiply_record<T>(chunk + i * T::record_bytes, record, columns, lane, sums);
      if (++record < args.records) continue;
      if (begun)
        finish_unit<T>(args, columns.item, unit, lane, sums);
      else
        leave();
      for (auto& tile : sums)
        for (float& sum : tile) sum = 0;
      record = 0;
      begun = true;
      if (++unit == args.units) {
        unit = 0;
        ++item;
        if (left > 1) columns.set(args, item, lane);
      }
    }
  }
  const bool ended = record == 0;
  if (!ended && !begun) leave();  // all its records are of the middle of one unit
  wait_copies<0>();
  __syncthreads();
  if (ended || !begun) return;
  add_partials<T>(partials, warp, block_records, args.records - record, lane, sums);
  finish_unit<T>(args, columns.item, unit, lane, sums);
}

}  // namespace gatefold::cuda
