#include "checkpoint/staging.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <stdlib.h>

#include <cerrno>
#include <cstring>

#include "checkpoint/safetensors_writer.h"

namespace gatefold {
namespace fs = std::filesystem;

namespace {

Status already_there(const fs::path& destination) {
  return {Code::invalid_argument, fmt::format("{} already exists", destination.string())};
}

}  // namespace

Status rename_new(const fs::path& from, const fs::path& to) {
  // rename() would replace a file or an empty directory.
  bool renamed = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0;
  if (!renamed && (errno == EINVAL || errno == ENOSYS)) {  // not on this file system
    std::error_code error;
    if (fs::symlink_status(to, error).type() != fs::file_type::not_found) return already_there(to);
    renamed = ::rename(from.c_str(), to.c_str()) == 0;
  }
  if (!renamed && errno == EEXIST) return already_there(to);
  if (!renamed)
    return {Code::io_error,
            fmt::format("{}: cannot rename to {}: {}", from.string(), to.string(), std::strerror(errno))};
  return {};
}

StagingDirectory::StagingDirectory(fs::path path, fs::path destination)
    : path_(std::move(path)), destination_(std::move(destination)) {}

StagingDirectory::StagingDirectory(StagingDirectory&& other) noexcept
    : path_(std::exchange(other.path_, {})), destination_(std::move(other.destination_)) {}

StagingDirectory::~StagingDirectory() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

Result<StagingDirectory> StagingDirectory::create(const fs::path& destination) {
  std::error_code error;
  fs::path target = fs::absolute(destination, error).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();  // "out/"
  if (fs::symlink_status(target, error).type() != fs::file_type::not_found) return already_there(target);
  std::string path = (target.parent_path() / fmt::format(".{}.XXXXXX", target.filename().string())).string();
  if (::mkdtemp(path.data()) == nullptr)
    return Status(Code::io_error, fmt::format("{}: cannot create a directory here: {}",
                                              target.parent_path().string(), std::strerror(errno)));
  StagingDirectory staging(path, std::move(target));
  fs::permissions(path, fs::perms(0755), error);  // mkdtemp's is 0700
  return staging;
}

Status StagingDirectory::publish() {
  if (Status status = sync_path(path_); !status.ok()) return status;
  if (Status status = rename_new(path_, destination_); !status.ok()) return status;
  path_.clear();
  return sync_path(destination_.parent_path());
}

}  // namespace gatefold
