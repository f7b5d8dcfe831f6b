#pragma once
/// \file
/// The layers that a calibration has done, on disk: what lets an interrupted run go on.

#include <filesystem>
#include <map>
#include <string>

#include "checkpoint/mapped_file.h"
#include "checkpoint/safetensors.h"
#include "model/calibrate_layer.h"

namespace gatefold {

/// A layer that is done, mapped.
class LayerFile {
 public:
  static Result<LayerFile> open(const std::filesystem::path& path, const std::string& job);

  /// Errors, here and below: what is there has another size than it should.
  Result<QuantizedMatrix> matrix(SchemeId id, const MoeSpec& spec, int expert, Projection projection) const;
  Result<QuantizedLayer> layer(SchemeId id, const MoeSpec& spec) const;

 private:
  LayerFile(std::string path, MappedFile file) : path_(std::move(path)), file_(std::move(file)) {}
  bool has(const std::string& name) const { return entries_.count(name) != 0; }
  std::string text(const std::string& name) const;
  template <class T>
  Status read(const std::string& name, std::vector<T>& out, std::size_t count) const;
  Status read(const std::string& name, TensorScale& out) const;

  std::string path_;
  MappedFile file_;
  std::map<std::string, TensorEntry> entries_;
};

/// A hidden directory beside the destination, with one safetensors file for each layer that is done. Every
/// file holds the description of the job, so that the layers of two jobs never mix.
class CalibrationFiles {
 public:
  /// Errors: layers of a former run are there and `resume` is not set.
  static Result<CalibrationFiles> open(const std::filesystem::path& destination, std::string job,
                                       bool resume);

  bool has(int layer) const;
  /// Errors: not a layer of this job; a damaged file.
  Result<LayerFile> load(int layer) const;
  /// The file appears when it is whole.
  Status save(int layer, const QuantizedLayer& quantized) const;
  void remove() const;
  const std::filesystem::path& directory() const { return directory_; }

 private:
  CalibrationFiles(std::filesystem::path directory, std::string job)
      : directory_(std::move(directory)), job_(std::move(job)) {}
  std::filesystem::path folder(int layer) const;

  std::filesystem::path directory_;
  std::string job_;
};

}  // namespace gatefold
