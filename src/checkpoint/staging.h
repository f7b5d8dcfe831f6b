#pragma once
/// \file
/// A directory that comes into being whole or not at all.

#include <filesystem>

#include "gatefold/status.h"

namespace gatefold {

/// Renames a file or directory. Error: there is something of that name (invalid_argument), which stays.
Status rename_new(const std::filesystem::path& from, const std::filesystem::path& to);

/// A temporary directory beside its destination. Unless publish() has succeeded it is removed with all it
/// holds. Nothing that exists is ever replaced.
class StagingDirectory {
 public:
  /// Errors: the destination exists, or its parent does not or is not writable.
  static Result<StagingDirectory> create(const std::filesystem::path& destination);

  StagingDirectory(StagingDirectory&& other) noexcept;
  StagingDirectory& operator=(StagingDirectory&&) = delete;
  ~StagingDirectory();

  const std::filesystem::path& path() const { return path_; }
  /// Renames it to its destination, and waits for the disk.
  Status publish();

 private:
  StagingDirectory(std::filesystem::path path, std::filesystem::path destination);
  std::filesystem::path path_, destination_;
};

}  // namespace gatefold
