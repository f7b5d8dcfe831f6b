#pragma once
/// \file
/// The safetensors files of a directory, mapped, and all their tensors under one roof.

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/mapped_file.h"
#include "gatefold/checkpoint.h"
#include "gatefold/status.h"
#include "gatefold/tensor.h"

namespace gatefold {

/// Immutable after `open`.
class Source {
 public:
  /// Which files hold the weights: those that model.safetensors.index.json names, else model.safetensors,
  /// else model-*-of-*.safetensors, of which none may be missing. Other files are not looked at.
  static Result<Source> open(const std::filesystem::path& directory);
  /// The tensors of one file, of any name.
  static Result<Source> open_file(const std::filesystem::path& path);

  std::span<const std::filesystem::path> files() const { return paths_; }
  std::span<const TensorEntry> tensors() const { return tensors_; }  ///< sorted by name

  /// nullptr if there is none.
  const TensorEntry* find(std::string_view name) const;
  TensorView view(const TensorEntry& entry) const;
  void release(const TensorEntry& entry) const;

  /// "/models/x/model.safetensors: tensor 'lm_head.weight'", to begin an error message with.
  std::string where(const TensorEntry& entry) const;

 private:
  Status add(const std::filesystem::path& path);
  /// To be called after the last `add`. Error: a tensor in two files.
  Status sort();

  std::vector<std::filesystem::path> paths_;
  std::vector<MappedFile> files_;  // parallel to paths_
  std::vector<TensorEntry> tensors_;
};

}  // namespace gatefold
