#include "checkpoint/linear_tensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "format/matrix.h"

namespace gatefold {

Format wide_format(DType dtype) {
  return dtype == DType::f32 ? formats::f32 : dtype == DType::f16 ? formats::f16 : formats::bf16;
}

const TensorEntry* TensorFinder::find(std::string_view suffix) const {
  return source_.find(linear_.module + std::string(suffix));
}

const TensorEntry* TensorFinder::require(std::string_view suffix, std::vector<std::int64_t> shape,
                                         std::span<const DType> dtypes) {
  if (!status_.ok()) return nullptr;
  const TensorEntry* entry = find(suffix);
  if (entry != nullptr && shape == std::vector<std::int64_t>{1} && entry->shape.size() <= 2 &&
      std::all_of(entry->shape.begin(), entry->shape.end(), [](std::int64_t d) { return d == 1; }))
    shape = entry->shape;
  const auto found = require_tensor(source_, linear_.module + std::string(suffix), shape, dtypes);
  if (found.ok()) return *found;
  status_ = {found.status().code(), fmt::format("{} (as {} asks for)", found.status().message(), asked_by_)};
  return nullptr;
}

void TensorFinder::refuse(std::string_view suffix, std::string_view why, Code code) {
  const TensorEntry* entry = find(suffix);
  if (status_.ok() && entry != nullptr)
    status_ = {code, fmt::format("{}: {}: {}", source_.where(*entry), asked_by_, why)};
}

void TensorFinder::fail(Code code, const std::string& what) {
  if (status_.ok()) status_ = {code, fmt::format("{}: {}: {}", asked_by_, linear_.module, what)};
}

void TensorFinder::check_ignored(const ModuleList& ignore) {
  if (ignore.names(linear_.module))
    fail(Code::bad_file, fmt::format("the layer is quantized, but {} names it", ignore.key()));
}

Result<float> read_single(const Source& source, const TensorEntry& entry) {
  float value = 0;
  load_scales(wide_format(entry.dtype), source.view(entry).data, 0, 1, &value);
  if (std::isfinite(value) && value > 0) return value;
  return Status(Code::bad_file, fmt::format("{}: {} is not a positive number", source.where(entry), value));
}

std::vector<std::byte> read_bytes(const Source& source, const TensorEntry& entry) {
  const TensorView view = source.view(entry);
  return {view.data, view.data + view.bytes};
}

std::vector<std::int32_t> read_i32(const Source& source, const TensorEntry& entry) {
  const TensorView view = source.view(entry);
  std::vector<std::int32_t> values(view.bytes / 4);
  if (!values.empty()) std::memcpy(values.data(), view.data, view.bytes);
  return values;
}

Status check_unsigned(const Source& source, const TensorEntry& entry) {
  const TensorView view = source.view(entry);
  for (std::size_t i = 0; i < view.bytes; ++i)
    if ((view.data[i] & std::byte{0x80}) != std::byte{0})
      return {Code::bad_file, fmt::format("{}: scale {} is negative", source.where(entry), i)};
  return {};
}

Status check_not_codes(const Source& source, const std::string& module,
                       std::span<const std::string_view> companions) {
  const TensorEntry* weight = source.find(module + ".weight");
  if (weight == nullptr || bits(weight->dtype) != 8) return {};
  return {Code::bad_file, fmt::format("{}: is {}, but there is no {}{}", source.where(*weight),
                                      name(weight->dtype), module, fmt::join(companions, " or "))};
}

std::vector<std::byte> transpose(const std::byte* data, std::int64_t rows, std::int64_t cols,
                                 std::int64_t size) {
  std::vector<std::byte> out(static_cast<std::size_t>(rows * cols * size));
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c)
      std::memcpy(&out[static_cast<std::size_t>((c * rows + r) * size)], data + (r * cols + c) * size,
                  static_cast<std::size_t>(size));
  return out;
}

}  // namespace gatefold
