#pragma once
/// \file
/// Writes the safetensors files of a checkpoint directory: the plan first, then the data, in any order and
/// from any thread.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "gatefold/status.h"
#include "gatefold/tensor.h"

namespace gatefold {

struct PlannedTensor {
  std::string name;
  DType dtype = DType::u8;
  std::vector<std::int64_t> shape;
  std::uint64_t bytes() const;
};

class SafetensorsWriter {
 public:
  /// Lays the tensors out in files of at most `shard_bytes` of data (a larger tensor gets a file of its own)
  /// and creates these in `directory`, at full size, so that a full disk shows before the work is done.
  /// One file is called model.safetensors, several model-00001-of-00003.safetensors.
  static Result<SafetensorsWriter> create(std::filesystem::path directory, std::vector<PlannedTensor> tensors,
                                          std::uint64_t shard_bytes);

  /// Writes a part of the data of tensor number `tensor` of the plan. Thread-safe.
  Status write(std::size_t tensor, std::span<const std::byte> data, std::uint64_t offset = 0) const;

  /// After all data: makes the files valid, writes the index if there are several, and waits for the disk.
  Status finish() const;

  int shards() const { return static_cast<int>(shards_.size()); }
  /// Of all files.
  std::uint64_t file_bytes() const;

 private:
  struct Shard {
    std::filesystem::path path;
    std::vector<std::size_t> tensors;  ///< in file order
    std::uint64_t header_bytes = 0, data_bytes = 0;
  };
  struct Place {
    std::size_t shard = 0;
    std::uint64_t begin = 0;  ///< in the shard's data
  };

  void assign(std::uint64_t shard_bytes);
  Status create_file(Shard& shard) const;
  std::string header(const Shard& shard) const;
  Status write_index() const;

  std::filesystem::path directory_;
  std::vector<PlannedTensor> tensors_;
  std::vector<Place> places_;  // parallel to tensors_
  std::vector<Shard> shards_;
};

/// Writes a new file and waits for the disk.
Status write_file(const std::filesystem::path& path, std::string_view text);
/// Waits for the disk: a file's content, or a directory's entries.
Status sync_path(const std::filesystem::path& path);

}  // namespace gatefold
