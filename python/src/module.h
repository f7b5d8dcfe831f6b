#pragma once
/// \file
/// The parts of the module; each adds its classes and functions.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "errors.h"
#include "gatefold/moe.h"

namespace gatefold::python {

void add_schemes(nanobind::module_& m);      // schemes, Scheme
void add_quantize(nanobind::module_& m);     // QuantizedMatrix, quantize, quantize_activation, scaled_mm, ...
void add_linear(nanobind::module_& m);       // LinearWeights, LinearPlan
void add_experts(nanobind::module_& m);      // MoeSpec and its parts, ExpertWeights, pack, load_experts
void add_plan(nanobind::module_& m);         // MoePlan
void add_checkpoints(nanobind::module_& m);  // quantize_checkpoint
void add_torch(nanobind::module_& m);        // what gatefold.torch needs

/// By name; throws InvalidArgument with the names there are.
SchemeId to_scheme(const std::string& name);
Device to_device(const std::string& text);
Precision to_precision(const std::string& name);
/// One QuantizedMatrix, or those of a sequence, which `held` keeps: it need not hold what it gives.
std::vector<const QuantizedMatrix*> to_matrices(nanobind::handle object, const char* name,
                                                std::vector<nanobind::object>& held);
/// Lets Ctrl-C and other signals through; throws what their handlers raise. Needs the GIL.
inline void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

}  // namespace gatefold::python
