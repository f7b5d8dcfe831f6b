#pragma once
/// \file
/// A thread's share of a row of f32, f16 or bf16: consecutive numbers in registers.

#include <cstdint>

#include "gatefold/codec.h"

namespace gatefold::cuda {

/// Kernels take types, not values: a format as one.
template <Format F>
struct FormatTag {
  static constexpr Format format = F;
};
/// The same with names that are short in those of kernels, of which device code has fourteen copies.
struct F32 : FormatTag<formats::f32> {};
struct F16 : FormatTag<formats::f16> {};
struct Bf16 : FormatTag<formats::bf16> {};

/// How memory is read. read_only: nothing writes it while the kernel runs, or before that waits for the one
/// before it. once: it leaves the caches first.
enum class Reads { any, read_only, once };

template <Format F, int kCount>
struct Elements {
  static constexpr int kWords = kCount * F.bits / 32;
  std::uint32_t words[kWords];

  /// Numbers `begin` .. `begin + kCount` of a row of k, those from k on as 0. `wide`: the row is aligned to
  /// 16 bytes, and k a multiple of kCount.
  template <Reads kReads>
  __device__ __forceinline__ void load(const std::byte* row, int begin, int k, bool wide) {
#pragma unroll
    for (std::uint32_t& word : words) word = 0;
    if (begin >= k) return;
    const std::byte* from = row + static_cast<std::int64_t>(begin) * (F.bits / 8);
    const auto read = []<class T>(const T* at) {
      return kReads == Reads::read_only ? __ldg(at) : kReads == Reads::once ? __ldcs(at) : *at;
    };
    if (wide) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = read(reinterpret_cast<const uint4*>(from) + i / 4);
        words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (begin + i >= k) break;
        if constexpr (F.bits == 32)
          words[i] = read(reinterpret_cast<const std::uint32_t*>(from) + i);
        else
          words[i / 2] |= static_cast<std::uint32_t>(read(reinterpret_cast<const std::uint16_t*>(from) + i))
                          << (i % 2 * 16);
      }
    }
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (F.bits == 32) {
      return __uint_as_float(words[i]);
    } else if constexpr (F == formats::bf16) {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    } else {
      float value;
      asm("cvt.f32.f16 %0, %1;"
          : "=f"(value)
          : "h"(static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16))));
      return value;
    }
  }

  /// The largest finite magnitude, and whether there is a NaN or Inf.
  struct Range {
    float amax;
    bool finite;
    __device__ __forceinline__ void include(const Range& other) {
      amax = fmaxf(amax, other.amax);
      finite = finite && other.finite;
    }
  };
  __device__ __forceinline__ Range range() const {
    constexpr std::uint32_t inf = ((1u << F.exponent_bits) - 1) << F.mantissa_bits;
    std::uint32_t largest = 0;
    if constexpr (F.bits == 32) {
#pragma unroll
      for (const std::uint32_t word : words) largest = max(largest, word & 0x7fffffffu);
    } else {
      std::uint32_t both = 0;
#pragma unroll
      for (const std::uint32_t word : words) both = __vmaxu2(both, word & 0x7fff7fffu);
      largest = max(both & 0xffffu, both >> 16);
    }
    if (largest < inf) return {value(largest), true};
    largest = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
#pragma unroll
      for (int half = 0; half < 32 / F.bits; ++half) {
        const std::uint32_t magnitude = words[i] >> (F.bits % 32 * half) & ((1u << (F.bits - 1)) - 1);
        if (magnitude < inf) largest = max(largest, magnitude);
      }
    return {value(largest), false};
  }

 private:
  /// Of a code in the low bits.
  static __device__ __forceinline__ float value(std::uint32_t code) {
    Elements<F, 32 / F.bits> one;
    one.words[0] = code;
    return one[0];
  }
};

}  // namespace gatefold::cuda
