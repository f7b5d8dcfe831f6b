#pragma once
/// \file
/// Makes the kernels of moe_wgmma.cuh that the table of schemes asks for.

#include "cuda/moe_gemm_table.cuh"
#include "cuda/moe_wgmma.cuh"

namespace gatefold::cuda {

template <class S, InputKind kInput, bool kMany>
GemmKernel warpgroup_kernel() {
  using T = WarpgroupTraits<S, kInput, kMany>;
  if constexpr (T::possible)
    return {.function = reinterpret_cast<const void*>(&moe_wgmma<T>),
            .threads = T::threads,
            .shared_bytes = T::shared_bytes,
            .tokens = T::tokens,
            .token_step = T::token_step,
            .loops = T::loops,
            .step_bytes = T::step_bytes,
            .tile_groups = T::groups,
            .may_share = T::may_share,
            .tiled = true,
            .counts = !T::few,
            .chain = T::few ? reinterpret_cast<const void*>(&moe_wgmma<T>) : nullptr,
            .input_scale = input_scale<T::P, T::M>()};
  return {};
}

template <auto Which>
GemmKernel find_warpgroup_among(SchemeId id, InputKind input, int tokens) {
  return make_among<Which>(id, input, [&]<class S, InputKind kInput>() {
    // Registers of four warpgroups do not hold sums beside those of a group of columns.
    constexpr bool many = kInput == InputKind::bf16_record_scales;
    return tokens <= kFewTokensOfTile ? warpgroup_kernel<S, kInput, many>()
                                      : warpgroup_kernel<S, kInput, true>();
  });
}

}  // namespace gatefold::cuda
