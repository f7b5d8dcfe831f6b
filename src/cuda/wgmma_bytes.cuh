#pragma once
/// \file
/// wgmma of bytes: e4m3 products with f32 sums, or int8 products with int32 sums, which are exact. Sums of
/// e4m3 products keep about 14 bits of the largest number that is added, so that few of them should be added
/// before they become part of others.

#include "cuda/wgmma.cuh"

namespace gatefold::cuda {

#define GATEFOLD_SUMS_4(c, i) "+" c(d[i]), "+" c(d[i + 1]), "+" c(d[i + 2]), "+" c(d[i + 3])
#define GATEFOLD_SUMS_16(c, i)                                                                \
  GATEFOLD_SUMS_4(c, 16 * i), GATEFOLD_SUMS_4(c, 16 * i + 4), GATEFOLD_SUMS_4(c, 16 * i + 8), \
      GATEFOLD_SUMS_4(c, 16 * i + 12)
#define GATEFOLD_SUMS_OF_8(c) GATEFOLD_SUMS_4(c, 0)
#define GATEFOLD_SUMS_OF_16(c) GATEFOLD_SUMS_4(c, 0), GATEFOLD_SUMS_4(c, 4)
#define GATEFOLD_SUMS_OF_24(c) GATEFOLD_SUMS_4(c, 0), GATEFOLD_SUMS_4(c, 4), GATEFOLD_SUMS_4(c, 8)
#define GATEFOLD_SUMS_OF_32(c) GATEFOLD_SUMS_16(c, 0)
#define GATEFOLD_SUMS_OF_48(c) GATEFOLD_SUMS_16(c, 0), GATEFOLD_SUMS_4(c, 16), GATEFOLD_SUMS_4(c, 20)
#define GATEFOLD_SUMS_OF_64(c) GATEFOLD_SUMS_16(c, 0), GATEFOLD_SUMS_16(c, 1)
#define GATEFOLD_SUMS_OF_80(c) \
  GATEFOLD_SUMS_16(c, 0), GATEFOLD_SUMS_16(c, 1), GATEFOLD_SUMS_4(c, 32), GATEFOLD_SUMS_4(c, 36)
#define GATEFOLD_SUMS_OF_96(c) GATEFOLD_SUMS_16(c, 0), GATEFOLD_SUMS_16(c, 1), GATEFOLD_SUMS_16(c, 2)
#define GATEFOLD_SUMS_OF_112(c) GATEFOLD_SUMS_OF_96(c), GATEFOLD_SUMS_4(c, 48), GATEFOLD_SUMS_4(c, 52)
#define GATEFOLD_SUMS_OF_120(c) GATEFOLD_SUMS_OF_112(c), GATEFOLD_SUMS_4(c, 56)
#define GATEFOLD_SUMS_OF_128(c) GATEFOLD_SUMS_OF_96(c), GATEFOLD_SUMS_16(c, 3)
#define GATEFOLD_SUMS_OF_136(c) GATEFOLD_SUMS_OF_128(c), GATEFOLD_SUMS_4(c, 64)
#define GATEFOLD_SUMS_OF_144(c) GATEFOLD_SUMS_OF_136(c), GATEFOLD_SUMS_4(c, 68)
#define GATEFOLD_SUMS_OF_160(c) GATEFOLD_SUMS_OF_128(c), GATEFOLD_SUMS_16(c, 4)
#define GATEFOLD_SUMS_OF_176(c) GATEFOLD_SUMS_OF_160(c), GATEFOLD_SUMS_4(c, 80), GATEFOLD_SUMS_4(c, 84)
#define GATEFOLD_SUMS_OF_192(c) GATEFOLD_SUMS_OF_160(c), GATEFOLD_SUMS_16(c, 5)
#define GATEFOLD_SUMS_OF_224(c) GATEFOLD_SUMS_OF_192(c), GATEFOLD_SUMS_16(c, 6)
#define GATEFOLD_SUMS_OF_256(c) GATEFOLD_SUMS_OF_224(c), GATEFOLD_SUMS_16(c, 7)

/// d = a * b, or d += a * b: m64nNk32. Sums and b are those of Wgmma. Of a, word 0 has row lane / 4 and k
/// indices 4 (lane % 4) .., word 1 row + 8, words 2 and 3 the same rows and k indices 16 + 4 (lane % 4) ..
template <int N>
struct ByteWgmma;

#define GATEFOLD_BYTE_WGMMA_OF(n, types, tail, a0, a1, a2, a3, b, add, registers, ...)                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n   \
               "k32." types " {" registers "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", add" tail \
               ";\n}\n"                                                                                     \
               : __VA_ARGS__                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "n"(kAdd ? 1 : 0))
/// The numbers of the operands follow those of the sums.
#define GATEFOLD_BYTE_WGMMA(n, a0, a1, a2, a3, b, add, registers, sums)                                   \
  template <>                                                                                             \
  struct ByteWgmma<n> {                                                                                   \
    template <bool kAdd>                                                                                  \
    static __device__ __forceinline__ void run(float (&d)[n / 2], const std::uint32_t (&a)[4],            \
                                               Descriptor rows) {                                         \
      GATEFOLD_BYTE_WGMMA_OF(n, "f32.e4m3.e4m3", ", 1, 1", a0, a1, a2, a3, b, add, registers, sums("f")); \
    }                                                                                                     \
    template <bool kAdd>                                                                                  \
    static __device__ __forceinline__ void run(std::int32_t (&d)[n / 2], const std::uint32_t (&a)[4],     \
                                               Descriptor rows) {                                         \
      GATEFOLD_BYTE_WGMMA_OF(n, "s32.s8.s8", "", a0, a1, a2, a3, b, add, registers, sums("r"));           \
    }                                                                                                     \
  };

GATEFOLD_BYTE_WGMMA(8, 4, 5, 6, 7, 8, 9, "%0, %1, %2, %3", GATEFOLD_SUMS_OF_8)
GATEFOLD_BYTE_WGMMA(16, 8, 9, 10, 11, 12, 13, "%0, %1, %2, %3, %4, %5, %6, %7", GATEFOLD_SUMS_OF_16)
GATEFOLD_BYTE_WGMMA(24, 12, 13, 14, 15, 16, 17, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11",
                    GATEFOLD_SUMS_OF_24)
GATEFOLD_BYTE_WGMMA(32, 16, 17, 18, 19, 20, 21, GATEFOLD_R0, GATEFOLD_SUMS_OF_32)
GATEFOLD_BYTE_WGMMA(48, 24, 25, 26, 27, 28, 29,
                    GATEFOLD_R0
                    ", "
                    "%16, %17, %18, %19, %20, %21, %22, %23",
                    GATEFOLD_SUMS_OF_48)
GATEFOLD_BYTE_WGMMA(64, 32, 33, 34, 35, 36, 37, GATEFOLD_R0 ", " GATEFOLD_R1, GATEFOLD_SUMS_OF_64)
GATEFOLD_BYTE_WGMMA(80, 40, 41, 42, 43, 44, 45,
                    GATEFOLD_R0 ", " GATEFOLD_R1
                                ", "
                                "%32, %33, %34, %35, %36, %37, %38, %39",
                    GATEFOLD_SUMS_OF_80)
GATEFOLD_BYTE_WGMMA(96, 48, 49, 50, 51, 52, 53, GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2,
                    GATEFOLD_SUMS_OF_96)
GATEFOLD_BYTE_WGMMA(112, 56, 57, 58, 59, 60, 61,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2
                                ", "
                                "%48, %49, %50, %51, %52, %53, %54, %55",
                    GATEFOLD_SUMS_OF_112)
GATEFOLD_BYTE_WGMMA(128, 64, 65, 66, 67, 68, 69,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3, GATEFOLD_SUMS_OF_128)
GATEFOLD_BYTE_WGMMA(144, 72, 73, 74, 75, 76, 77,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3
                                ", "
                                "%64, %65, %66, %67, %68, %69, %70, %71",
                    GATEFOLD_SUMS_OF_144)
GATEFOLD_BYTE_WGMMA(160, 80, 81, 82, 83, 84, 85,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4,
                    GATEFOLD_SUMS_OF_160)
GATEFOLD_BYTE_WGMMA(176, 88, 89, 90, 91, 92, 93,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4
                                ", "
                                "%80, %81, %82, %83, %84, %85, %86, %87",
                    GATEFOLD_SUMS_OF_176)
GATEFOLD_BYTE_WGMMA(192, 96, 97, 98, 99, 100, 101,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4
                                ", " GATEFOLD_R5,
                    GATEFOLD_SUMS_OF_192)
GATEFOLD_BYTE_WGMMA(224, 112, 113, 114, 115, 116, 117,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4
                                ", " GATEFOLD_R5 ", " GATEFOLD_R6,
                    GATEFOLD_SUMS_OF_224)
GATEFOLD_BYTE_WGMMA(256, 128, 129, 130, 131, 132, 133,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4
                                ", " GATEFOLD_R5 ", " GATEFOLD_R6 ", " GATEFOLD_R7,
                    GATEFOLD_SUMS_OF_256)
#undef GATEFOLD_BYTE_WGMMA
#undef GATEFOLD_BYTE_WGMMA_OF

/// d = a * b, or d += a * b: m64nNk32, both operands in shared memory: 64 and N swizzled_rows (of 128 bytes).
template <int N>
struct RowsWgmma;

#define GATEFOLD_ROWS_WGMMA_OF(n, types, tail, a, b, add, registers, ...)                                 \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k32." types " {" registers "}, %" #a ", %" #b ", add" tail ";\n}\n"                       \
               : __VA_ARGS__                                                                              \
               : "l"(a_rows), "l"(b_rows), "n"(kAdd ? 1 : 0))
/// The numbers of the operands follow those of the sums.
#define GATEFOLD_ROWS_WGMMA(n, a, b, add, registers, sums)                                                \
  template <>                                                                                             \
  struct RowsWgmma<n> {                                                                                   \
    template <bool kAdd>                                                                                  \
    static __device__ __forceinline__ void run(float (&d)[n / 2], Descriptor a_rows, Descriptor b_rows) { \
      GATEFOLD_ROWS_WGMMA_OF(n, "f32.e4m3.e4m3", ", 1, 1", a, b, add, registers, sums("f"));              \
    }                                                                                                     \
    template <bool kAdd>                                                                                  \
    static __device__ __forceinline__ void run(std::int32_t (&d)[n / 2], Descriptor a_rows,               \
                                               Descriptor b_rows) {                                       \
      GATEFOLD_ROWS_WGMMA_OF(n, "s32.s8.s8", "", a, b, add, registers, sums("r"));                        \
    }                                                                                                     \
  };

GATEFOLD_ROWS_WGMMA(32, 16, 17, 18, GATEFOLD_R0, GATEFOLD_SUMS_OF_32)
GATEFOLD_ROWS_WGMMA(48, 24, 25, 26,
                    GATEFOLD_R0
                    ", "
                    "%16, %17, %18, %19, %20, %21, %22, %23",
                    GATEFOLD_SUMS_OF_48)
GATEFOLD_ROWS_WGMMA(64, 32, 33, 34, GATEFOLD_R0 ", " GATEFOLD_R1, GATEFOLD_SUMS_OF_64)
GATEFOLD_ROWS_WGMMA(80, 40, 41, 42,
                    GATEFOLD_R0 ", " GATEFOLD_R1
                                ", "
                                "%32, %33, %34, %35, %36, %37, %38, %39",
                    GATEFOLD_SUMS_OF_80)
GATEFOLD_ROWS_WGMMA(96, 48, 49, 50, GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2, GATEFOLD_SUMS_OF_96)
GATEFOLD_ROWS_WGMMA(112, 56, 57, 58,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2
                                ", "
                                "%48, %49, %50, %51, %52, %53, %54, %55",
                    GATEFOLD_SUMS_OF_112)
GATEFOLD_ROWS_WGMMA(120, 60, 61, 62,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2
                                ", "
                                "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59",
                    GATEFOLD_SUMS_OF_120)
GATEFOLD_ROWS_WGMMA(128, 64, 65, 66, GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3,
                    GATEFOLD_SUMS_OF_128)
GATEFOLD_ROWS_WGMMA(136, 68, 69, 70,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3
                                ", "
                                "%64, %65, %66, %67",
                    GATEFOLD_SUMS_OF_136)
GATEFOLD_ROWS_WGMMA(144, 72, 73, 74,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3
                                ", "
                                "%64, %65, %66, %67, %68, %69, %70, %71",
                    GATEFOLD_SUMS_OF_144)
GATEFOLD_ROWS_WGMMA(160, 80, 81, 82,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4,
                    GATEFOLD_SUMS_OF_160)
GATEFOLD_ROWS_WGMMA(176, 88, 89, 90,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4
                                ", "
                                "%80, %81, %82, %83, %84, %85, %86, %87",
                    GATEFOLD_SUMS_OF_176)
GATEFOLD_ROWS_WGMMA(192, 96, 97, 98,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4
                                ", " GATEFOLD_R5,
                    GATEFOLD_SUMS_OF_192)
GATEFOLD_ROWS_WGMMA(224, 112, 113, 114,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4
                                ", " GATEFOLD_R5 ", " GATEFOLD_R6,
                    GATEFOLD_SUMS_OF_224)
GATEFOLD_ROWS_WGMMA(256, 128, 129, 130,
                    GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4
                                ", " GATEFOLD_R5 ", " GATEFOLD_R6 ", " GATEFOLD_R7,
                    GATEFOLD_SUMS_OF_256)
#undef GATEFOLD_ROWS_WGMMA
#undef GATEFOLD_ROWS_WGMMA_OF

}  // namespace gatefold::cuda
