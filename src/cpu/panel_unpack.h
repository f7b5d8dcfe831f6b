#pragma once
/// \file
/// The way back from panels (panel.h).

#include "cpu/panel.h"

namespace gatefold {

/// Fills values, scales and zero points of a matrix whose other members are set, from panels that pack_panels
/// has filled. Errors: a row that held NaN or Inf.
Status unpack_panels(const std::byte* panels, const PanelShape& shape, std::size_t stride,
                     QuantizedMatrix& matrix);

}  // namespace gatefold
