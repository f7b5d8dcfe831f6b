#pragma once
/// \file
/// Instructions that CUDA C++ has no name for. PTX ISA 9.0.

#include <cstddef>
#include <cstdint>

#include "cuda/decode.h"

namespace gatefold::cuda {

/// d += a * b: m16n8k16, f32 sums. a: rows lane / 4 and + 8, k pairs lane % 4 and + 4 (two registers each,
/// rows first); b: column lane / 4, the same k pairs; d: those rows, columns 2 (lane % 4) and + 1.
template <Format M>
__device__ __forceinline__ void mma(float (&d)[4], const Pair (&a)[4], Pair b0, Pair b1) {
  if constexpr (M == formats::bf16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 16 bytes from global to shared memory, past L1.
__device__ __forceinline__ void copy16_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Until at most `kPending` of this thread's groups of copies are under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Programmatic dependent launch: waits until the kernels before this one are done and their writes visible.
/// Every thread block must, before it ends.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
/// The next kernel may start, as far as there is room, up to its own wait.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace gatefold::cuda
