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
/// Sums of multiplies that are done: they are not read before.
template <int kCount>
__device__ __forceinline__ void take_sums(float (&sums)[kCount]) {
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
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

/// d = a * b, or d += a * b: m64nNk16, f32 sums. Each warp has 16 of the rows, as in mma (ptx.cuh): a as
/// there, d[4 i ..] columns 8 i + 2 (lane % 4) and + 1 of both rows; b is swizzled_rows.
template <int N, Format M>
struct Wgmma;

/// The numbers of its operands follow the sums.
#define GATEFOLD_WGMMA(n, a0, a1, a2, a3, b, add, registers, ...)                                           \
  template <Format M>                                                                                       \
  struct Wgmma<n, M> {                                                                                      \
    template <bool kAdd>                                                                                    \
    static __device__ __forceinline__ void run(float (&d)[n / 2], const Pair (&a)[4], std::uint32_t rows) { \
      if constexpr (M == formats::bf16)                                                                     \
        GATEFOLD_WGMMA_OF("bf16", #n, a0, a1, a2, a3, b, add, registers, __VA_ARGS__);                      \
      else                                                                                                  \
        GATEFOLD_WGMMA_OF("f16", #n, a0, a1, a2, a3, b, add, registers, __VA_ARGS__);                       \
    }                                                                                                       \
  };
#define GATEFOLD_WGMMA_OF(type, n, a0, a1, a2, a3, b, add, registers, ...)                                   \
  asm volatile("{\n.reg .pred add;\n.reg .b64 rows;\nsetp.ne.b32 add, %" #add ", 0;\nmov.b64 rows, {%" #b    \
               ", 0x40000040};\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers \
               "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, rows, add, 1, 1, 0;\n}\n"                       \
               : __VA_ARGS__                                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(rows), "n"(kAdd ? 1 : 0))

GATEFOLD_WGMMA(32, 16, 17, 18, 19, 20, 21,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "+f"(d[0]), "+f"(d[1]),
               "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
               "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]))
GATEFOLD_WGMMA(56, 28, 29, 30, 31, 32, 33,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
               "%20, %21, %22, %23, %24, %25, %26, %27",
               "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
               "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
               "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
               "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]))
GATEFOLD_WGMMA(64, 32, 33, 34, 35, 36, 37,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
               "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
               "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
               "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
               "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
               "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
               "+f"(d[29]), "+f"(d[30]), "+f"(d[31]))
GATEFOLD_WGMMA(104, 52, 53, 54, 55, 56, 57,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
               "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
               "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51",
               "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
               "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
               "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
               "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
               "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
               "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
               "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
               "+f"(d[50]), "+f"(d[51]))
GATEFOLD_WGMMA(128, 64, 65, 66, 67, 68, 69,
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
               "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
               "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
               "%56, %57, %58, %59, %60, %61, %62, %63",
               "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
               "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
               "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
               "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
               "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
               "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
               "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
               "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
               "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]))
#undef GATEFOLD_WGMMA
#undef GATEFOLD_WGMMA_OF

}  // namespace gatefold::cuda
