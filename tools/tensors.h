#pragma once
/// \file
/// Plain safetensors files: tensors in, tensors out.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors_writer.h"
#include "checkpoint/source.h"
#include "gatefold/status.h"

namespace gatefold::cli {

/// A tensor [rows, cols] of f32, f16 or bf16 as f32, or of i32 or i64 as i32. Error: no such tensor, another
/// dtype or shape, a number that does not fit.
Result<std::vector<float>> read_floats(const Source& source, const std::string& name, std::int64_t rows,
                                       std::int64_t cols);
Result<std::vector<std::int32_t>> read_ids(const Source& source, const std::string& name, std::int64_t rows,
                                           std::int64_t cols);

struct OutputTensor {
  PlannedTensor plan;
  const void* data = nullptr;
};
/// Writes `file` whole or not at all. Error: it exists and `replace` is false.
Status write_tensors(const std::filesystem::path& file, std::span<const OutputTensor> tensors, bool replace);

}  // namespace gatefold::cli
