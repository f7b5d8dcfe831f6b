#include "format/code_rows.h"

#include <fmt/format.h>

namespace gatefold {

DType dtype_of_codes(Format value) {
  if (value == formats::int8) return DType::i8;
  return value.bits == 4 ? DType::f4 : DType::f8_e4m3;
}

DType dtype_of_scales(Format scale) {
  if (scale == formats::f32) return DType::f32;
  return scale == formats::ue8m0 ? DType::f8_e8m0 : DType::f8_e4m3;
}

std::string refuses_codes(const Scheme& scheme, const Operand& activation, const MatrixView& x,
                          const float* token_scales) {
  if (!activation.quantized())
    return fmt::format("x has scales, but {} leaves activations in 16 bits here", scheme.name);
  if (x.dtype != dtype_of_codes(activation.value))
    return fmt::format("x is {} with scales, the activations of {} are {}", name(x.dtype), scheme.name,
                       name(dtype_of_codes(activation.value)));
  if (activation.value.bits == 4 && x.cols % 2 != 0)
    return fmt::format("k = {} is odd: the activations of {} are pairs of 4-bit codes", x.cols, scheme.name);
  if (activation.tensor_scale.stored() && token_scales == nullptr) return "token_scales is a null pointer";
  return {};
}

}  // namespace gatefold
