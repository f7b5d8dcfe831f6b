#include "model/calibration_files.h"

#include <fmt/format.h>

#include <cstring>
#include <span>

#include "checkpoint/safetensors_writer.h"
#include "checkpoint/staging.h"
#include "format/matrix.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

struct Blob {
  std::string name;
  std::vector<std::byte> bytes;
};

template <class T>
std::vector<std::byte> bytes_of(std::span<const T> values) {
  const auto bytes = std::as_bytes(values);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> bytes_of(const TensorScale& scale) {
  const float pair[] = {scale.value, scale.divides ? 1.0f : 0.0f};
  return bytes_of(std::span<const float>(pair));
}

/// Empty parts are left out.
void put(std::vector<Blob>& blobs, std::string name, std::vector<std::byte> bytes) {
  if (!bytes.empty()) blobs.push_back({std::move(name), std::move(bytes)});
}

void put_matrix(std::vector<Blob>& blobs, const std::string& name, const QuantizedMatrix& matrix) {
  put(blobs, name + ".values", matrix.values);
  put(blobs, name + ".scales", matrix.scales);
  put(blobs, name + ".zero_points", matrix.zero_points);
  put(blobs, name + ".tensor_scale", bytes_of(matrix.tensor_scale));
  if (matrix.input_scale) put(blobs, name + ".input_scale", bytes_of(*matrix.input_scale));
}

std::string matrix_name(std::size_t expert, Projection projection) {
  return fmt::format("{}.{}", expert, name(projection));
}

}  // namespace

Result<LayerFile> LayerFile::open(const fs::path& path, const std::string& job) {
  Result<MappedFile> file = MappedFile::open(path);
  if (!file) return file.status();
  const auto header = parse_safetensors_header(file->bytes(), file->bytes().size(), path.string());
  if (!header) return header.status();
  LayerFile layer(path.string(), std::move(*file));
  for (const TensorEntry& entry : header->tensors) layer.entries_[entry.name] = entry;
  if (layer.text("job") != job)
    return Status(Code::invalid_argument, fmt::format("{}: is of another run ({}); this one is {}",
                                                      path.string(), layer.text("job"), job));
  return layer;
}

std::string LayerFile::text(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return {};
  return {reinterpret_cast<const char*>(file_.bytes().data() + found->second.begin), found->second.bytes()};
}

template <class T>
Status LayerFile::read(const std::string& name, std::vector<T>& out, std::size_t count) const {
  if (count == 0) return {};
  const auto found = entries_.find(name);
  const std::uint64_t bytes = found == entries_.end() ? 0 : found->second.bytes();
  if (bytes != count * sizeof(T))
    return {Code::bad_file,
            fmt::format("{}: {} has {} bytes, expected {}", path_, name, bytes, count * sizeof(T))};
  out.resize(count);
  std::memcpy(out.data(), file_.bytes().data() + found->second.begin, bytes);
  return {};
}

Status LayerFile::read(const std::string& name, TensorScale& out) const {
  std::vector<float> pair;
  if (Status status = read(name, pair, 2); !status.ok()) return status;
  out = {pair[0], pair[1] != 0.0f};
  return {};
}

Result<QuantizedMatrix> LayerFile::matrix(SchemeId id, const MoeSpec& spec, int expert,
                                          Projection projection) const {
  const bool down = projection == Projection::down;
  QuantizedMatrix out =
      make_matrix(id, down ? spec.hidden : spec.intermediate, down ? spec.intermediate : spec.hidden);
  const std::string name = matrix_name(static_cast<std::size_t>(expert), projection);
  if (Status s = read(name + ".values", out.values, out.values.size()); !s.ok()) return s;
  if (Status s = read(name + ".scales", out.scales, out.scales.size()); !s.ok()) return s;
  if (Status s = read(name + ".zero_points", out.zero_points, out.zero_points.size()); !s.ok()) return s;
  if (Status s = read(name + ".tensor_scale", out.tensor_scale); !s.ok()) return s;
  if (!has(name + ".input_scale")) return out;
  out.input_scale.emplace();
  if (Status s = read(name + ".input_scale", *out.input_scale); !s.ok()) return s;
  return out;
}

Result<QuantizedLayer> LayerFile::layer(SchemeId id, const MoeSpec& spec) const {
  QuantizedLayer out;
  const auto experts = static_cast<std::size_t>(spec.experts);
  if (Status s = read("samples", out.samples, experts); !s.ok()) return s;
  if (has("fold"))
    if (Status s = read("fold", out.fold, static_cast<std::size_t>(spec.hidden)); !s.ok()) return s;
  for (int e = 0; e < spec.experts; ++e) {
    QuantizedExpert expert;
    QuantizedMatrix* const parts[] = {&expert.gate, &expert.up, &expert.down};
    for (const Projection p : {Projection::gate, Projection::up, Projection::down}) {
      auto part = matrix(id, spec, e, p);
      if (!part) return part.status();
      *parts[static_cast<int>(p)] = std::move(*part);
    }
    out.experts.push_back(std::move(expert));
  }
  return out;
}

Result<CalibrationFiles> CalibrationFiles::open(const fs::path& destination, std::string job, bool resume) {
  fs::path name = destination.has_filename() ? destination : destination.parent_path();
  CalibrationFiles files(name.parent_path() / fmt::format(".{}.calibration", name.filename().string()),
                         std::move(job));
  std::error_code error;
  if (fs::exists(destination, error))
    return Status(Code::invalid_argument, fmt::format("{} already exists", destination.string()));
  if (fs::exists(files.directory_, error) && !resume)
    return Status(Code::invalid_argument,
                  fmt::format("{} holds the layers of an interrupted run: resume it, or remove them",
                              files.directory_.string()));
  fs::create_directory(files.directory_, error);
  if (error) return Status(Code::io_error, fmt::format("{}: {}", files.directory_.string(), error.message()));
  return files;
}

fs::path CalibrationFiles::folder(int layer) const {
  return directory_ / fmt::format("layer-{}", layer);
}

bool CalibrationFiles::has(int layer) const {
  std::error_code error;
  return fs::exists(folder(layer), error);
}

Result<LayerFile> CalibrationFiles::load(int layer) const {
  return LayerFile::open(folder(layer) / "model.safetensors", job_);
}

Status CalibrationFiles::save(int layer, const QuantizedLayer& quantized) const {
  std::vector<Blob> blobs;
  put(blobs, "job", bytes_of(std::span<const char>(job_)));
  put(blobs, "samples", bytes_of(std::span<const std::int64_t>(quantized.samples)));
  put(blobs, "fold", bytes_of(std::span<const float>(quantized.fold)));
  for (std::size_t e = 0; e < quantized.experts.size(); ++e) {
    put_matrix(blobs, matrix_name(e, Projection::gate), quantized.experts[e].gate);
    put_matrix(blobs, matrix_name(e, Projection::up), quantized.experts[e].up);
    put_matrix(blobs, matrix_name(e, Projection::down), quantized.experts[e].down);
  }
  Result<StagingDirectory> staging = StagingDirectory::create(folder(layer));
  if (!staging) return staging.status();
  std::vector<PlannedTensor> plan;
  plan.reserve(blobs.size());
  for (const Blob& blob : blobs)
    plan.push_back({blob.name, DType::u8, {static_cast<std::int64_t>(blob.bytes.size())}});
  const auto writer = SafetensorsWriter::create(staging->path(), plan, ~std::uint64_t{0} >> 1);
  if (!writer) return writer.status();
  for (std::size_t i = 0; i < blobs.size(); ++i)
    if (Status status = writer->write(i, blobs[i].bytes); !status.ok()) return status;
  if (Status status = writer->finish(); !status.ok()) return status;
  return staging->publish();
}

void CalibrationFiles::remove() const {
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
}

}  // namespace gatefold
