#include "input_rows.h"

#include <fmt/format.h>

#include "errors.h"
#include "gatefold/linear.h"

namespace gatefold::python {

InputRows::InputRows(const Tensor& x, const Device& device, SchemeId id, std::int64_t k,
                     std::optional<Tensor> scales, std::optional<Tensor> token_scales)
    : scales_(std::move(scales)), token_scales_(std::move(token_scales)) {
  x.expect_device(device);
  if (!scales_) {
    if (token_scales_) invalid(fmt::format("{} is given without scales", token_scales_->name()));
    x_ = x.matrix();
    x.expect_shape({-1, k}, "[rows, columns]");
    return;
  }
  const ActivationRow row = value(activation_row(id, k));
  x.expect_shape({-1, -1}, "[rows, bytes]");
  const std::int64_t rows = x.size(0);
  x.expect_bytes(rows, row.value_bytes, row.value_type);
  x_ = {x.data(), row.value_type, rows, k};
  scales_->expect_device(device);
  scales_->expect_bytes(rows, row.scale_bytes, row.scale_type);
  const bool two_levels = scheme(id).activation.tensor_scale.stored();
  if (two_levels && !token_scales_)
    invalid(fmt::format("{} is given without token scales, which the activations of {} have", scales_->name(),
                        scheme(id).name));
  if (!token_scales_) return;
  const float* first = token_scales_->floats({two_levels ? rows : 0}, "[rows]", device);
  if (two_levels) first_token_scale_ = first;
}

}  // namespace gatefold::python
