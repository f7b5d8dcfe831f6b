#pragma once
/// \file
/// Instructions that CUDA C++ has no name for. PTX ISA 9.0.

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/decode.h"
#include "cuda/wait_limit.cuh"

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

/// 1 / x, off by one in the last place; for large x it is 0.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// One of two f16 numbers; half: 0, the low one, or 1.
__device__ __forceinline__ float f32_of_f16(std::uint32_t pair, int half) {
  float low, high;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}\n"
      : "=f"(low), "=f"(high)
      : "r"(pair));
  return half == 0 ? low : high;
}
/// To bf16 or f16.
__device__ __forceinline__ std::uint16_t narrow(float x, bool bf16) {
  std::uint16_t y;
  if (bf16)
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ std::uint32_t narrow_pair(float low, float high, bool bf16) {
  std::uint32_t pair;
  if (bf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ float load_f32(std::uint32_t shared) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared));
  return x;
}
__device__ __forceinline__ float2 load_two_f32(std::uint32_t shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared));
  return x;
}

/// A value that is neither computed nor loaded again.
template <class T>
__device__ __forceinline__ T kept(T value) {
  if constexpr (sizeof(T) == 8) {
    auto bits = __builtin_bit_cast(std::uint64_t, value);
    asm volatile("" : "+l"(bits));
    return __builtin_bit_cast(T, bits);
  } else if constexpr (sizeof(T) == 4) {
    auto bits = __builtin_bit_cast(std::uint32_t, value);
    asm volatile("" : "+r"(bits));
    return __builtin_bit_cast(T, bits);
  } else {
    return static_cast<T>(kept(static_cast<std::uint32_t>(value)));
  }
}

/// What all lanes have, so that the compiler knows: it then is in a register of the warp, from which
/// descriptors of multiplies and places of copies are taken. (Of places in registers of lanes each copy is a
/// loop over the lanes, of some 90 clocks.)
__device__ __forceinline__ int same_in_warp(int value) {
  return __shfl_sync(~0u, value, 0);
}
/// The same by the reducer, whose result is in such a register: that of a shuffle is copied there for each
/// use, as a descriptor for each multiply. What is kept in a loop is copied back unless the compiler knows
/// that the warp's lanes are together: after a barrier of whole warps.
__device__ __forceinline__ std::uint32_t reduced_in_warp(std::uint32_t value) {
  return __reduce_or_sync(~0u, value);
}
__device__ __forceinline__ int reduced_in_warp(int value) {
  return static_cast<int>(reduced_in_warp(static_cast<std::uint32_t>(value)));
}
/// True for one lane of a warp, all of which come here.
__device__ __forceinline__ bool one_of_warp() {
  std::uint32_t one;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}\n" : "=r"(one));
  return one != 0;
}

/// A barrier in shared memory: a phase ends after so many arrivals, and the bytes that they expect.
__device__ __forceinline__ void init_barrier(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
/// Makes this thread's initialized barriers visible to copies.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive(std::uint64_t* barrier) {
  arrive(shared_address(barrier));
}
/// Arrives, and expects so many bytes to be copied.
__device__ __forceinline__ void expect_bytes(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
/// Waits until the phase with this parity (0, 1, 0, ...) has ended.
__device__ __forceinline__ void wait_barrier(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  for (WaitLimit limit; done == 0; limit.check())
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void wait_barrier(std::uint64_t* barrier, std::uint32_t parity) {
  wait_barrier(shared_address(barrier), parity);
}
/// Whether the phase with this parity ends within so many ns.
__device__ __forceinline__ int ends_within(std::uint32_t ns, std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity), "r"(ns)
      : "memory");
  return static_cast<int>(done);
}
/// Bytes, a multiple of 16, from global to shared memory, counted by a barrier. For one thread.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, std::uint32_t bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// The same of what is not read again: it is the first to leave the L2 cache, so that activations, routing,
/// and the code of a layer's kernels stay there.
__device__ __forceinline__ void copy_bulk_once(void* shared, const void* global, std::uint32_t bytes,
                                               std::uint64_t* barrier) {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

/// A box of a tensor of two dimensions, by its first column and row.
__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap& tensor, int column, int row,
                                         std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
      "l"(&tensor), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

/// Bytes, a multiple of 16, from memory to the L2 cache. For one thread.
__device__ __forceinline__ void prefetch_bulk(const void* global, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

/// copy_bulk to both blocks of a pair: to the same place of their shared memory, counted by each one's
/// barrier.
__device__ __forceinline__ void copy_bulk_to_pair(void* shared, const void* global, std::uint32_t bytes,
                                                  std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(static_cast<std::uint16_t>(3))
      : "memory");
}
/// Which block of its cluster this one is.
__device__ __forceinline__ int rank_in_cluster() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Arrives at the barrier at this address of a block of the cluster. (Without `.cluster`, which would wait
/// for all of this thread's writes.)
__device__ __forceinline__ void arrive_in_cluster(std::uint32_t barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
/// Waits for all threads of a cluster.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
/// What is at this place of shared memory in a block of the cluster.
template <class T>
__device__ __forceinline__ T* in_block_of_cluster(T* shared, int rank) {
  return static_cast<T*>(__cluster_map_shared_rank(shared, static_cast<unsigned>(rank)));
}
/// sync_cluster in two halves, where threads have only read since the last one: no block ends while others
/// read its memory.
__device__ __forceinline__ void arrive_after_reads_in_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void wait_for_reads_in_cluster() {
  asm volatile("barrier.cluster.wait;" ::: "memory");
}

/// 16 bytes from global to shared memory, past L1.
__device__ __forceinline__ void copy_16_bytes(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}
/// 4 bytes from global to shared memory.
__device__ __forceinline__ void copy_4_bytes(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}
/// The same where `there`, without a branch.
__device__ __forceinline__ void copy_4_bytes_if(bool there, void* shared, const void* global) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.ca.shared.global [%0], [%1], 4;\n}\n" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(static_cast<int>(there))
      : "memory");
}
/// Waits for this thread's copies of 4 and of 16 bytes.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
/// Four matrices of 8 by 8 numbers of 16 bits, as multiplies leave sums (two neighbours of row lane / 4 a
/// lane): lane 8 i + j says where row j of matrix i goes, 16 bytes of shared memory.
__device__ __forceinline__ void store_matrices(void* row, const std::uint32_t (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}
/// The same from shared memory to registers.
__device__ __forceinline__ void load_matrices(const void* row, std::uint32_t (&pairs)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(shared_address(row))
               : "memory");
}
/// store_matrices transposed: lane 8 i + j says where column j of matrix i goes.
__device__ __forceinline__ void store_transposed(void* column, const std::uint32_t (&pairs)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(column)),
      "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
      : "memory");
}
/// Arrives when all copies of 4 or 16 bytes that this thread has begun are done.
__device__ __forceinline__ void arrive_after_copies(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// 16 bytes of shared memory for all lanes, read by lane 0. It also arrives at barriers for the warp, so that
/// no other thread's reads have to be ordered before that.
template <class Value>
__device__ __forceinline__ Value read_by_lane_0(const Value& shared) {
  static_assert(sizeof(Value) == 16);
  int4 words{};
  if (threadIdx.x % 32 == 0) words = reinterpret_cast<const int4&>(shared);
  for (int* word : {&words.x, &words.y, &words.z, &words.w}) *word = reduced_in_warp(*word);
  return reinterpret_cast<const Value&>(words);
}

/// A barrier, one of 15, for some warps of a block.
template <int kThreads>
__device__ __forceinline__ void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

/// What this thread did to shared memory comes before later copies in bulk.
__device__ __forceinline__ void shared_memory_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// What this thread sees of global memory comes before its later copies in bulk.
__device__ __forceinline__ void global_memory_to_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// threadIdx.x, read again: what comes of it takes no registers before.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// What another block has added up, and what it did before.
__device__ __forceinline__ std::int32_t load_acquire(const std::int32_t* from) {
  std::int32_t value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
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
