#pragma once
/// \file
/// The rows that a layer or a product takes (MoeInputs, cuda::LinearInputs), out of a caller's tensors.

#include <optional>

#include "gatefold/scheme.h"
#include "tensor.h"

namespace gatefold::python {

/// Numbers, or codes of a scheme's activations with their scales. Keeps the tensors of scales.
class InputRows {
 public:
  /// x [rows, k] f32, f16 or bf16; or, if there are scales, codes and scales in the layout of
  /// quantize_activation, as bytes or as what they are (token_scales: none, or without elements, where the
  /// scheme has none).
  InputRows(const Tensor& x, const Device& device, SchemeId scheme, std::int64_t k,
            std::optional<Tensor> scales, std::optional<Tensor> token_scales);

  const MatrixView& x() const { return x_; }
  const void* scales() const { return scales_ ? scales_->data() : nullptr; }
  const float* token_scales() const { return first_token_scale_; }
  /// Of results, unless the caller gives a tensor for them.
  DType result_type(DType of_codes) const { return scales_ ? of_codes : x_.dtype; }

 private:
  MatrixView x_;
  std::optional<Tensor> scales_, token_scales_;
  const float* first_token_scale_ = nullptr;
};

}  // namespace gatefold::python
