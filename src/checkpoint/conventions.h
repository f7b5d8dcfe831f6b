#pragma once
/// \file
/// All conventions, and what those that read a quantization_config share.

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "checkpoint/convention.h"

namespace gatefold {

extern const Convention gptq_convention, awq_convention, fp8_convention, modelopt_convention,
    mxfp4_convention;

/// Whether quant_method is one of these.
bool has_method(const nlohmann::json& quantization, std::initializer_list<std::string_view> methods);

/// Of {k, hidden, intermediate}: what must be a multiple of a row's group. A routed expert's matrices share a
/// row, so that all three count; any other layer goes by its own k.
std::span<const std::int64_t> expert_sizes(std::span<const std::int64_t> sizes, const Linear& linear,
                                           const ModelConfig& model);

}  // namespace gatefold
