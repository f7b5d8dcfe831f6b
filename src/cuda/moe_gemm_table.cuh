#pragma once
/// \file
/// Makes the kernels of moe_gemm.cuh that the table of schemes asks for. Schemes with the same weights share
/// kernels.

#include "cuda/moe_gemm.cuh"

namespace gatefold::cuda {

/// The first scheme of the table with these weights.
constexpr SchemeId first_with_weights_of(SchemeId id) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(id); ++i)
    if (packed_format(operands::table[i]) == packed_format(scheme(id))) return static_cast<SchemeId>(i);
  return id;
}

/// Whether a scheme with these weights has activations that `which` accepts.
template <class Which>
constexpr bool any_activation(SchemeId id, const Which& which) {
  for (std::size_t i = 0; i < all_schemes().size(); ++i)
    if (first_with_weights_of(static_cast<SchemeId>(i)) == id && which(operands::table[i].activation))
      return true;
  return false;
}
/// Activations whose f32 scales belong to records.
constexpr bool has_record_scales(SchemeId id) {
  return any_activation(id, [](const Operand& a) { return a.group.k != 0 && a.scale == formats::f32; });
}

template <class S, InputKind kInput, int kTiles>
GemmKernel gemm_kernel() {
  using T = GemmTraits<S, kInput, kTiles>;
  return {.function = reinterpret_cast<const void*>(&moe_gemm<T>),
          .threads = T::threads,
          .shared_bytes = T::table_bytes,
          .teams = T::teams,
          .team_bytes = T::team_bytes,
          .tokens = T::tokens,
          .step_bytes = T::step_bytes,
          .team_groups = T::warps / T::full_slices};
}

template <class S, class Make>
GemmKernel make_for(InputKind input, const Make& make) {
  if (input == InputKind::bf16) return make.template operator()<S, InputKind::bf16>();
  if (input == InputKind::f16) return make.template operator()<S, InputKind::f16>();
  if constexpr (has_record_scales(S::id)) return make.template operator()<S, InputKind::bf16_record_scales>();
  return {};
}

/// What `make` makes of a scheme whose values are of the kind that `Which` accepts.
template <auto Which, class Make>
GemmKernel make_among(SchemeId id, InputKind input, const Make& make) {
  GemmKernel found;
  for_each_scheme([&]<class S>() {
    constexpr Operand w = S::scheme.weight;
    if constexpr (Which(w.value) && can_pack(w) && first_with_weights_of(S::id) == S::id)
      if (S::id == first_with_weights_of(id)) found = make_for<S>(input, make);
  });
  return found;
}

/// From more than a tile of tokens on warpgroups are faster, where they can multiply.
template <auto Which>
GemmKernel find_among(SchemeId id, InputKind input, int tokens) {
  return make_among<Which>(id, input, [&]<class S, InputKind kInput>() {
    using Few = GemmTraits<S, kInput, 1>;
    if constexpr (Few::split_inputs || Few::split_weights)
      if (tokens > kTileTokens) return gemm_kernel<S, kInput, 4>();
    return gemm_kernel<S, kInput, 1>();
  });
}

}  // namespace gatefold::cuda
