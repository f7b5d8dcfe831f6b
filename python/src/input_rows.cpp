#include "input_rows.h"

#include <fmt/format.h>

#include "errors.h"
#include "gatefold/linear.h"

namespace gatefold::python {

InputRows::InputRows(const Tensor& x, SchemeId id, std::int64_t k, const Argument& scales,
                     const Argument& token_scales) {
  if (scales.object.is_none() && token_scales.object.is_none()) {
    x_ = x.matrix();
    x.expect_shape({-1, k}, "[rows, columns]");
    return;
  }
  const ActivationRow row = value(activation_row(id, k));
  x.expect_shape({-1, -1}, "[rows, bytes]");
  const std::int64_t rows = x.size(0);
  x.expect_bytes(rows, row.value_bytes, row.value_type);
  x_ = {x.data(), row.value_type, rows, k};
  scales_.emplace(scales.object, scales.name);
  scales_->expect_device(x.device());
  scales_->expect_bytes(rows, row.scale_bytes, row.scale_type);
  const bool two_levels = scheme(id).activation.tensor_scale.stored();
  if (two_levels && token_scales.object.is_none())
    invalid(fmt::format("{} is missing: the activations of {} have one per row", token_scales.name,
                        scheme(id).name));
  if (token_scales.object.is_none()) return;
  token_scales_.emplace(token_scales.object, token_scales.name);
  const float* first = token_scales_->elements<float>({two_levels ? rows : 0}, "[rows]", x.device());
  if (two_levels) first_token_scale_ = first;
}

}  // namespace gatefold::python
