#pragma once

#include "module.h"

namespace gatefold::python {

void add_spec(nanobind::module_& m);
DType to_act_dtype(const std::string& name);  ///< "bf16" or "f16"

}  // namespace gatefold::python
