#include "checkpoint/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace gatefold {
namespace {

Status system_error(const std::filesystem::path& path, const char* what) {
  return {Code::io_error, fmt::format("{}: cannot {}: {}", path.string(), what,
                                      std::error_code(errno, std::generic_category()).message())};
}

/// A descriptor that closes itself, of a regular file.
class Descriptor {
 public:
  explicit Descriptor(const std::filesystem::path& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}  // non-blocking: a FIFO must not hang
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

  Result<std::size_t> size(const std::filesystem::path& path) const {
    struct stat info {};
    if (fd_ < 0) return system_error(path, "open");
    if (::fstat(fd_, &info) != 0) return system_error(path, "examine");
    if (!S_ISREG(info.st_mode)) return Status{Code::io_error, path.string() + ": not a regular file"};
    return static_cast<std::size_t>(info.st_size);
  }

 private:
  int fd_;
};

}  // namespace

Result<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const Descriptor file(path);
  const auto size = file.size(path);
  if (!size) return size.status();
  if (*size == 0) return MappedFile(nullptr, 0);  // which mmap refuses
  void* data = ::mmap(nullptr, *size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) return system_error(path, "map");
  return MappedFile(static_cast<const std::byte*>(data), *size);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::release(std::uint64_t begin, std::uint64_t end) const {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t first = (begin + page - 1) / page * page;
  // The last page of the file may be given back although the file ends within it.
  const std::uint64_t last = end == size_ ? end : end / page * page;
  if (first < last) ::madvise(const_cast<std::byte*>(data_) + first, last - first, MADV_DONTNEED);
}

Result<std::string> read_text(const std::filesystem::path& path, std::uint64_t limit) {
  const Descriptor file(path);
  const auto size = file.size(path);
  if (!size) return size.status();
  if (*size > limit)
    return Status{Code::bad_file,
                  fmt::format("{}: {} bytes; at most {} are read", path.string(), *size, limit)};
  std::string text(*size, '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::read(file.get(), text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return system_error(path, "read");
    if (count == 0) break;
    done += static_cast<std::size_t>(count);
  }
  text.resize(done);
  return text;
}

}  // namespace gatefold
