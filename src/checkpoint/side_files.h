#pragma once
/// \file
/// Files beside config.json in which older checkpoints keep their quantization_config, and which newer ones
/// have as well: quantize_config.json (GPTQ), quant_config.json (AWQ), hf_quant_config.json (ModelOpt).

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "gatefold/status.h"

namespace gatefold {

/// If `quantization` is null, it becomes what such a file says. If not, what both say must agree.
Status read_side_files(const std::filesystem::path& directory, const std::string& config_path,
                       nlohmann::json& quantization);

}  // namespace gatefold
