#pragma once
/// \file
/// Makes the kernels of moe_wgmma.cuh that the table of schemes asks for.

#include "cuda/moe_gemm_table.cuh"
#include "cuda/moe_wgmma.cuh"

namespace gatefold::cuda {

template <class S, bool kWide, InputKind kInput, bool kMany>
GemmKernel warpgroup_kernel() {
  using T = WarpgroupTraits<S, kWide, kInput, kMany>;
  if constexpr (T::possible)
    return {.function = reinterpret_cast<const void*>(&moe_wgmma<T>),
            .threads = T::threads,
            .shared_bytes = T::shared_bytes,
            .tokens = T::tokens,
            .per_core = 1,
            .step_bytes = T::step_bytes,
            .permuted = true};
  return {};
}

template <class S, bool kWide>
GemmKernel find_warpgroup_for(InputKind input, int tokens) {
  const auto of = [&]<InputKind kInput>() {
    return tokens <= kFewTokensOfTile ? warpgroup_kernel<S, kWide, kInput, false>()
                                      : warpgroup_kernel<S, kWide, kInput, true>();
  };
  if (input == InputKind::bf16) return of.template operator()<InputKind::bf16>();
  if (input == InputKind::f16) return of.template operator()<InputKind::f16>();
  if constexpr (has_record_scales(S::id)) return of.template operator()<InputKind::bf16_record_scales>();
  return {};
}

/// The kernel of a scheme whose values are of the kind that `Which` accepts.
template <auto Which>
GemmKernel find_warpgroup_among(SchemeId id, bool wide, InputKind input, int tokens) {
  GemmKernel found;
  for_each_scheme([&]<class S>() {
    constexpr Operand w = S::scheme.weight;
    if constexpr (Which(w.value) && can_pack(w) && first_with_weights_of(S::id) == S::id) {
      if (S::id != first_with_weights_of(id)) return;
      if constexpr (may_be_wide(w))
        found =
            wide ? find_warpgroup_for<S, true>(input, tokens) : find_warpgroup_for<S, false>(input, tokens);
      else
        found = find_warpgroup_for<S, false>(input, tokens);
    }
  });
  return found;
}

}  // namespace gatefold::cuda
