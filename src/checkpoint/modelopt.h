#pragma once
/// \file
/// The algorithms of ModelOpt as operands, for its reader and writer.

#include <span>
#include <string_view>

#include "gatefold/scheme.h"

namespace gatefold::modelopt {

struct Algorithm {
  std::string_view name;  ///< quant_algo
  Operand weight, activation;
  bool static_input = false;  ///< there is an input_scale
};

std::span<const Algorithm> algorithms();

}  // namespace gatefold::modelopt
