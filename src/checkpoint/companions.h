#pragma once
/// \file
/// What a model needs beside its weights and config.

#include <filesystem>

#include "gatefold/status.h"

namespace gatefold {

/// Copies tokenizer, generation settings, templates, code and licence; not what describes another
/// quantization.
Status copy_companions(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace gatefold
