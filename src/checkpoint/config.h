#pragma once
/// \file
/// config.json.

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "checkpoint/families.h"
#include "gatefold/checkpoint.h"
#include "gatefold/status.h"

namespace gatefold {

/// Bounds of every size in a config: a product of any three stays below 2^63.
inline constexpr int max_size = (1 << 21) - 1;
inline constexpr int max_layers = 4096;
inline constexpr int max_experts = 1 << 16;

/// Of a quantization_config: GPTQ's patterns, of which the first that matches decides.
inline constexpr const char* ordered_key = "dynamic";

struct ParsedConfig {
  ModelConfig model;
  const Family* family = nullptr;
  bool has_dtype = false;       ///< else model.dtype is a guess
  nlohmann::json quantization;  ///< quantization_config; null if there is none
};

/// Puts another quantization_config in the place of all that a config may have for one.
void replace_quantization(nlohmann::ordered_json& config, nlohmann::ordered_json quantization);

/// Sets the dtype and all that follows from it.
void set_dtype(ModelConfig& config, DType dtype);

/// `file` begins every message.
Result<ParsedConfig> parse_config(std::string_view text, const std::string& file);

}  // namespace gatefold
