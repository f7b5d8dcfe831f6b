#pragma once
/// \file
/// Unquantized expert matrices, whether they lie in a file as they are wanted or had to be copied.

#include <optional>

#include "gatefold/checkpoint.h"

namespace gatefold {

/// The weights of an unquantized matrix, which must outlive the view; none of a quantized one.
inline std::optional<MatrixView> plain_view(const ExpertMatrix& matrix) {
  if (const auto* view = std::get_if<MatrixView>(&matrix)) return *view;
  const auto& copy = std::get<QuantizedMatrix>(matrix);
  const Operand& weight = scheme(copy.scheme).weight;
  if (weight.quantized()) return std::nullopt;
  return MatrixView{copy.values.data(), weight.value == formats::f16 ? DType::f16 : DType::bf16, copy.n,
                    copy.k};
}

}  // namespace gatefold
