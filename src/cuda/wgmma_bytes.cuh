#pragma once
/// \file
/// wgmma of bytes: e4m3 products with f32 sums, or int8 products with int32 sums, which are exact. Sums of
/// e4m3 products keep about 14 bits of the largest number that is added, so that few of them should be added
/// before they become part of others.

#include "cuda/wgmma.cuh"

namespace gatefold::cuda {

#define GATEFOLD_SUMS_4(c, i) "+" c(d[i]), "+" c(d[i + 1]), "+" c(d[i + 2]), "+" c(d[i + 3])
/// The numbers of its operands follow the sums.
#define GATEFOLD_BYTE_WGMMA(types, c, tail)                                                               \
  asm volatile(                                                                                           \
      "{\n.reg .pred add;\n.reg .b64 rows;\nsetp.ne.b32 add, %21, 0;\nmov.b64 rows, {%20, 0x40000040};\n" \
      "wgmma.mma_async.sync.aligned.m64n32k32." types                                                     \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, "   \
      "rows, "                                                                                            \
      "add" tail ";\n}\n"                                                                                 \
      : GATEFOLD_SUMS_4(c, 0), GATEFOLD_SUMS_4(c, 4), GATEFOLD_SUMS_4(c, 8), GATEFOLD_SUMS_4(c, 12)       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(rows), "n"(kAdd ? 1 : 0))

/// d = a * b, or d += a * b: m64n32k32. Sums and b are those of Wgmma. Of a, word 0 has row lane / 4 and k
/// indices 4 (lane % 4) .., word 1 row + 8, words 2 and 3 the same rows and k indices 16 + 4 (lane % 4) ..
template <bool kAdd>
__device__ __forceinline__ void multiply_bytes(float (&d)[16], const std::uint32_t (&a)[4],
                                               std::uint32_t rows) {
  GATEFOLD_BYTE_WGMMA("f32.e4m3.e4m3", "f", ", 1, 1");
}
template <bool kAdd>
__device__ __forceinline__ void multiply_bytes(std::int32_t (&d)[16], const std::uint32_t (&a)[4],
                                               std::uint32_t rows) {
  GATEFOLD_BYTE_WGMMA("s32.s8.s8", "r", "");
}
#undef GATEFOLD_BYTE_WGMMA
#undef GATEFOLD_SUMS_4

}  // namespace gatefold::cuda
