#include "tools/tensors.h"

#include <fmt/format.h>
#include <stdio.h>
#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "checkpoint/convention.h"
#include "checkpoint/staging.h"
#include "gatefold/codec.h"
#include "tools/interrupt.h"

namespace gatefold::cli {
namespace {

namespace fs = std::filesystem;

Result<TensorView> find(const Source& source, const std::string& name, std::int64_t rows, std::int64_t cols,
                        std::span<const DType> dtypes) {
  const std::int64_t shape[] = {rows, cols};
  const Result<const TensorEntry*> entry = require_tensor(source, name, shape, dtypes);
  if (!entry) return entry.status();
  return source.view(**entry);
}

template <class T>
T load(const TensorView& view, std::size_t i) {
  T value;
  std::memcpy(&value, view.data + i * sizeof(T), sizeof(T));
  return value;
}

/// A new directory beside `file`, removed with all that is in it.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const fs::path& file) : path_(file.string() + ".tmp-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) error_ = errno;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    if (error_ == 0) fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  fs::path path() const { return path_; }
  int error() const { return error_; }

 private:
  std::string path_;
  int error_ = 0;
};

Status system_error(const fs::path& file, int error) {
  return {Code::io_error, fmt::format("{}: {}", file.string(), std::strerror(error))};
}

}  // namespace

Result<std::vector<float>> read_floats(const Source& source, const std::string& name, std::int64_t rows,
                                       std::int64_t cols) {
  const DType dtypes[] = {DType::f32, DType::f16, DType::bf16};
  const Result<TensorView> view = find(source, name, rows, cols, dtypes);
  if (!view) return view.status();
  std::vector<float> values(static_cast<std::size_t>(rows * cols));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = view->dtype == DType::f32   ? load<float>(*view, i)
                : view->dtype == DType::f16 ? decode<formats::f16>(load<std::uint16_t>(*view, i))
                                            : decode<formats::bf16>(load<std::uint16_t>(*view, i));
  return values;
}

Result<std::vector<std::int32_t>> read_ids(const Source& source, const std::string& name, std::int64_t rows,
                                           std::int64_t cols) {
  const DType dtypes[] = {DType::i32, DType::i64};
  const Result<TensorView> view = find(source, name, rows, cols, dtypes);
  if (!view) return view.status();
  std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * cols));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t id =
        view->dtype == DType::i32 ? load<std::int32_t>(*view, i) : load<std::int64_t>(*view, i);
    if (id < 0 || id > std::numeric_limits<std::int32_t>::max())
      return Status(
          Code::bad_file,
          fmt::format("{}: tensor '{}': {} at [{}, {}] is not an expert's id", source.files()[0].string(),
                      name, id, static_cast<std::int64_t>(i) / cols, static_cast<std::int64_t>(i) % cols));
    ids[i] = static_cast<std::int32_t>(id);
  }
  return ids;
}

Status write_tensors(const fs::path& file, std::span<const OutputTensor> tensors, bool replace) {
  const DeferInterrupts defer;
  const TemporaryFolder folder(file);
  if (folder.error() != 0) return system_error(file, folder.error());
  std::vector<PlannedTensor> plan;
  for (const OutputTensor& tensor : tensors) plan.push_back(tensor.plan);
  const auto writer =
      SafetensorsWriter::create(folder.path(), plan, std::numeric_limits<std::uint64_t>::max());
  if (!writer) return writer.status();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::span data(static_cast<const std::byte*>(tensors[i].data), plan[i].bytes());
    if (Status written = writer->write(i, data); !written.ok()) return written;
  }
  if (Status finished = writer->finish(); !finished.ok()) return finished;
  if (DeferInterrupts::pending()) return {Code::io_error, fmt::format("{}: interrupted", file.string())};
  const fs::path whole = folder.path() / "model.safetensors";
  if (!replace) return rename_new(whole, file);
  if (rename(whole.c_str(), file.c_str()) != 0) return system_error(file, errno);
  return {};
}

}  // namespace gatefold::cli
