#pragma once
/// \file
/// A whole file, mapped read-only; and small text files.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "gatefold/status.h"

namespace gatefold {

/// Movable, not copyable.
class MappedFile {
 public:
  /// Errors: missing, not a regular file, not readable.
  static Result<MappedFile> open(const std::filesystem::path& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }

  /// Gives the pages that lie wholly within [begin, end) back to the system; they are read again on demand.
  void release(std::uint64_t begin, std::uint64_t end) const;

 private:
  MappedFile(const std::byte* data, std::size_t size) : data_(data), size_(size) {}
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// The content of a file of at most `limit` bytes.
Result<std::string> read_text(const std::filesystem::path& path, std::uint64_t limit);

}  // namespace gatefold
