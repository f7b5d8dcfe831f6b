#pragma once
/// \file
/// Channels that gate and up leave as codes of e4m3 by a static scale: a tile's end rounds what its lanes
/// have (moe_wgmma_finish.cuh), as launch_inputs does it, bit for bit.

#include "cuda/moe_wgmma_ring.cuh"

namespace gatefold::cuda {

/// Whether a kernel's ends do: weights of e4m3 lie in the order of activations (column_of_byte). For few
/// tokens registers lack room beside the ends of two multiplies.
template <class T>
inline constexpr bool leaves_codes =
    !T::few && T::bytes && T::M == formats::e4m3 && T::P.value == formats::e4m3 && !T::record_scales;

/// Lanes q, q + 4, .. have codes of a channel each, of tokens 0 to 7. Of these each gets one, its own of
/// them, with all channels, in the order of a record of 8 bits: 0, 2, 1, 3, and 4, 6, 5, 7.
__device__ __forceinline__ uint2 codes_of_token(const std::uint32_t (&words)[2]) {
  const unsigned own = threadIdx.x % 32 / 4;
  const bool upper = own & 4, second = own & 2, odd = own & 1;
  const auto exchange = [](std::uint32_t given, int lanes) { return __shfl_xor_sync(~0u, given, lanes); };
  // Four tokens of channels c and c + 4, where c is own % 4.
  const std::uint32_t four = exchange(upper ? words[0] : words[1], 16), low = upper ? four : words[0],
                      high = upper ? words[1] : four;
  // Two tokens of channels c and c + 4, where c is own % 2, and then c + 2 and c + 6.
  const std::uint32_t kept = __byte_perm(low, high, second ? 0x7632 : 0x5410),
                      two = exchange(__byte_perm(low, high, second ? 0x5410 : 0x7632), 8),
                      first_two = second ? two : kept, other_two = second ? kept : two;
  // One token of channels 0, 4, 2, 6, and 1, 5, 3, 7.
  const std::uint32_t alone = __byte_perm(first_two, other_two, odd ? 0x7531 : 0x6420),
                      one = exchange(__byte_perm(first_two, other_two, odd ? 0x6420 : 0x7531), 4),
                      even_channels = odd ? one : alone, odd_channels = odd ? alone : one;
  return {__byte_perm(even_channels, odd_channels, 0x6420), __byte_perm(even_channels, odd_channels, 0x7531)};
}

}  // namespace gatefold::cuda
