#pragma once
/// \file
/// wgmma: multiplies by warpgroups, four warps from a multiple of four on. PTX ISA 9.0.

#include <cstdint>

#include "cuda/ptx.cuh"

namespace gatefold::cuda {

/// A multiply's B operand in shared memory: [columns] rows of 128 bytes (64 numbers, neighbours in k), whose
/// 16 bytes i are at i ^ row % 8; from a multiple of 1024 bytes on. This is the lower half of its descriptor;
/// the upper one says that 8 rows take 1024 bytes, and how they are swizzled.
__device__ __forceinline__ std::uint32_t swizzled_rows(std::uint32_t shared_address) {
  return 1 << 16 | (shared_address & 0x3ffff) >> 4;
}
/// The same from other columns of the rows on, or from other rows.
__device__ __forceinline__ std::uint32_t add_bytes(std::uint32_t rows, int bytes) {
  return rows + (bytes >> 4);
}

/// A whole descriptor, for one of a few multiplies. From one to the next it is one addition of 64 bits; put
/// together from halves for each, three instructions.
using Descriptor = std::uint64_t;
__device__ __forceinline__ Descriptor descriptor(std::uint32_t rows) {
  return Descriptor{0x40000040} << 32 | rows;
}
__device__ __forceinline__ Descriptor add_bytes(Descriptor rows, int bytes) {
  return rows + (bytes >> 4);
}

/// Before the first multiply, and after registers of the next ones were written.
__device__ __forceinline__ void begin_multiplies() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Ends a group of multiplies.
__device__ __forceinline__ void commit_multiplies() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until all but so many of the last groups are done.
template <int kGroups>
__device__ __forceinline__ void wait_for_multiplies() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
/// Sums of multiplies that are done: they are not read before. (Statements of one sum each take the compiler
/// longer.)
template <int kCount>
__device__ __forceinline__ void take_sums(float (&sums)[kCount]) {
  static_assert(kCount % 4 == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    asm volatile("" : "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])::"memory");
}
template <int kCount>
__device__ __forceinline__ void take_sums(std::int32_t (&sums)[kCount]) {
  static_assert(kCount % 4 == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    asm volatile("" : "+r"(sums[i]), "+r"(sums[i + 1]), "+r"(sums[i + 2]), "+r"(sums[i + 3])::"memory");
}

/// More or fewer registers for each thread of this warpgroup.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// d += a * b: m64nNk16, f32 sums. Each warp has 16 of the rows, as in mma (ptx.cuh): a as
/// there, d[4 i ..] columns 8 i + 2 (lane % 4) and + 1 of both rows; b is of swizzled_rows.
template <int N, Format M>
struct Wgmma;

/// Sums 16 i and on: their registers, and the operands.
#define GATEFOLD_R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GATEFOLD_R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GATEFOLD_R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define GATEFOLD_R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GATEFOLD_R4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define GATEFOLD_R5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define GATEFOLD_R6 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define GATEFOLD_R7 \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GATEFOLD_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GATEFOLD_D(i) \
  GATEFOLD_D4(16 * i), GATEFOLD_D4(16 * i + 4), GATEFOLD_D4(16 * i + 8), GATEFOLD_D4(16 * i + 12)
/// The numbers of its other operands follow those of the sums.
#define GATEFOLD_WGMMA(n, a0, a1, a2, a3, b, registers, ...)                                             \
  template <Format M>                                                                                    \
  struct Wgmma<n, M> {                                                                                   \
    static __device__ __forceinline__ void run(float (&d)[n / 2], const Pair (&a)[4], Descriptor rows) { \
      if constexpr (M == formats::bf16)                                                                  \
        GATEFOLD_WGMMA_OF("bf16", #n, a0, a1, a2, a3, b, registers, __VA_ARGS__);                        \
      else                                                                                               \
        GATEFOLD_WGMMA_OF("f16", #n, a0, a1, a2, a3, b, registers, __VA_ARGS__);                         \
    }                                                                                                    \
  };
#define GATEFOLD_WGMMA_OF(type, n, a0, a1, a2, a3, b, registers, ...)                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers "}, {%" #a0 \
               ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", 1, 1, 1, 0;\n"                                 \
               : __VA_ARGS__                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows))

GATEFOLD_WGMMA(16, 8, 9, 10, 11, 12, "%0, %1, %2, %3, %4, %5, %6, %7", GATEFOLD_D4(0), GATEFOLD_D4(4))
GATEFOLD_WGMMA(24, 12, 13, 14, 15, 16, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11", GATEFOLD_D4(0),
               GATEFOLD_D4(4), GATEFOLD_D4(8))
GATEFOLD_WGMMA(32, 16, 17, 18, 19, 20, GATEFOLD_R0, GATEFOLD_D(0))
GATEFOLD_WGMMA(40, 20, 21, 22, 23, 24, GATEFOLD_R0 ", %16, %17, %18, %19", GATEFOLD_D(0), GATEFOLD_D4(16))
GATEFOLD_WGMMA(48, 24, 25, 26, 27, 28,
               GATEFOLD_R0
               ", "
               "%16, %17, %18, %19, %20, %21, %22, %23",
               GATEFOLD_D(0), GATEFOLD_D4(16), GATEFOLD_D4(20))
GATEFOLD_WGMMA(64, 32, 33, 34, 35, 36, GATEFOLD_R0 ", " GATEFOLD_R1, GATEFOLD_D(0), GATEFOLD_D(1))
GATEFOLD_WGMMA(80, 40, 41, 42, 43, 44,
               GATEFOLD_R0 ", " GATEFOLD_R1
                           ", "
                           "%32, %33, %34, %35, %36, %37, %38, %39",
               GATEFOLD_D(0), GATEFOLD_D(1), GATEFOLD_D4(32), GATEFOLD_D4(36))
GATEFOLD_WGMMA(96, 48, 49, 50, 51, 52, GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2, GATEFOLD_D(0),
               GATEFOLD_D(1), GATEFOLD_D(2))
GATEFOLD_WGMMA(128, 64, 65, 66, 67, 68, GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3,
               GATEFOLD_D(0), GATEFOLD_D(1), GATEFOLD_D(2), GATEFOLD_D(3))
GATEFOLD_WGMMA(144, 72, 73, 74, 75, 76,
               GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3
                           ", "
                           "%64, %65, %66, %67, %68, %69, %70, %71",
               GATEFOLD_D(0), GATEFOLD_D(1), GATEFOLD_D(2), GATEFOLD_D(3), GATEFOLD_D4(64), GATEFOLD_D4(68))
GATEFOLD_WGMMA(160, 80, 81, 82, 83, 84,
               GATEFOLD_R0 ", " GATEFOLD_R1 ", " GATEFOLD_R2 ", " GATEFOLD_R3 ", " GATEFOLD_R4, GATEFOLD_D(0),
               GATEFOLD_D(1), GATEFOLD_D(2), GATEFOLD_D(3), GATEFOLD_D(4))
#undef GATEFOLD_WGMMA
#undef GATEFOLD_WGMMA_OF

}  // namespace gatefold::cuda
