#include "cuda/moe_gemm_table.cuh"
#include "cuda/moe_wgmma_bytes.cuh"
#include "cuda/moe_wgmma_rows.cuh"
#include "cuda/moe_wgmma_tokens.cuh"

namespace gatefold::cuda {
namespace {

/// Whether a scheme with these weights has activations whose codes are inputs of this kind.
constexpr bool has_kind(SchemeId id, InputKind kind) {
  return any_activation(id, [&](const Operand& a) { return byte_kind(a) == kind; });
}

/// The same kernel, for two multiplies in one launch: what is rounded in between takes registers as well.
/// (Those that are left do not do for warps that find tiles by themselves.)
template <class T>
struct Chained : T {
  static constexpr int registers = 112, fill_registers = 32;
  static_assert(registers * T::warps + fill_registers * 4 == T::registers * T::warps + T::fill_registers * 4);
};

/// For few tokens, where weights are decoded, a launch of one multiply has a kernel of its own: by the one
/// for two, layers take up to 2 % longer.
template <class T>
GemmKernel kernel_of() {
  using Alone = std::conditional_t<T::few && !T::from_memory, InTurn<T>, T>;
  const void* chain = nullptr;
  if constexpr (chains<T> && !T::some)
    chain = reinterpret_cast<const void*>(&moe_wgmma<std::conditional_t<T::P.for_bytes, Chained<T>, T>>);
  return {.function = reinterpret_cast<const void*>(&moe_wgmma<Alone>),
          .threads = T::threads,
          .shared_bytes = T::shared_bytes,
          .tokens = T::tokens,
          .token_step = T::token_step,
          .loops = T::loops,
          .step_bytes = T::step_bytes,
          .tile_groups = T::groups,
          .may_share = T::may_share,
          .tiled = true,
          .rounds = T::rounds_channels,
          .rounds_static = leaves_codes<T>,
          .narrow_rows = leaves_narrow_rows<T>,
          .finds_amax = T::of_tensors,
          .reads_codes = T::reads_codes,
          .counts = T::counts && !T::few,
          .chain = chain,
          .byte_order = byte_order(T::P)};
}

template <class S>
GemmKernel kernel_for(InputKind input, int tokens) {
  GemmKernel found;
  const auto make = [&]<InputKind kInput>() {
    using Few = ByteTraits<S, kInput, TileSize::few>;
    using Some = ByteTraits<S, kInput, TileSize::some>;
    using Many = ByteTraits<S, kInput, TileSize::many>;
    using Most = ByteTraits<S, kInput, TileSize::most>;
    if constexpr (has_kind(S::id, kInput == InputKind::e4m3_fast ? InputKind::e4m3 : kInput) &&
                  Most::possible) {
      if (input != kInput) return;
      if constexpr (!Many::possible) {
        if (tokens > kTokensOfTwoUnits) found = kernel_of<Most>();
      } else {
        if constexpr (Some::possible)
          if (tokens > Few::tokens && tokens <= Some::tokens) found = kernel_of<Some>();
        if (found.function == nullptr)
          found = tokens <= Few::tokens    ? kernel_of<Few>()
                  : tokens <= Many::tokens ? kernel_of<Many>()
                                           : kernel_of<Most>();
      }
    }
  };
  make.template operator()<InputKind::e4m3>();
  make.template operator()<InputKind::e4m3_fast>();
  make.template operator()<InputKind::e4m3_record_scales>();
  make.template operator()<InputKind::int8>();
  return found;
}

}  // namespace

GemmKernel find_warpgroup_gemm_bytes(SchemeId scheme, InputKind input, int tokens) {
  GemmKernel found;
  for_each_scheme([&]<class S>() {
    if constexpr (can_pack(S::scheme.weight) && first_with_weights_of(S::id) == S::id) {
      if (S::id != first_with_weights_of(scheme)) return;
      found = kernel_for<S>(input, tokens);
    }
  });
  return found;
}

}  // namespace gatefold::cuda
