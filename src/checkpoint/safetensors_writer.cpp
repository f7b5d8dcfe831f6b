#include "checkpoint/safetensors_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/json.h"
#include "checkpoint/safetensors.h"

namespace gatefold {
namespace {

Status system_error(const std::filesystem::path& path, const char* what, int error) {
  return {Code::io_error, fmt::format("{}: {}: {}", path.string(), what, std::strerror(error))};
}

/// An open file.
class File {
 public:
  File(const std::filesystem::path& path, int flags)
      : path_(path), fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    if (fd_ < 0) fail("cannot open");
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { (void)close(); }

  void write(std::span<const std::byte> data, std::uint64_t offset) {
    while (status_.ok() && !data.empty()) {
      const ssize_t written = ::pwrite(fd_, data.data(), data.size(), static_cast<off_t>(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return fail("cannot write");
      data = data.subspan(static_cast<std::size_t>(written));
      offset += static_cast<std::uint64_t>(written);
    }
  }

  /// Reserves the space where the file system can; elsewhere a full disk shows when it is written.
  void resize(std::uint64_t size) {
    if (!status_.ok()) return;
    const auto length = static_cast<off_t>(size);
    if (::fallocate(fd_, 0, 0, length) == 0) return;
    if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINTR) return fail("cannot reserve its space");
    if (::ftruncate(fd_, length) != 0) fail("cannot resize");
  }

  void sync() {
    if (status_.ok() && ::fsync(fd_) != 0) fail("cannot sync");
  }

  Status close() {
    const int fd = std::exchange(fd_, -1);
    if (fd >= 0 && ::close(fd) != 0 && errno != EINTR) fail("cannot close");
    return status_;
  }

 private:
  void fail(const char* what) {
    if (status_.ok()) status_ = system_error(path_, what, errno);
  }

  const std::filesystem::path& path_;
  int fd_ = -1;
  Status status_;
};

constexpr std::uint64_t length_bytes = 8;

}  // namespace

std::uint64_t PlannedTensor::bytes() const {
  std::uint64_t count = 1;
  for (const std::int64_t extent : shape) count *= static_cast<std::uint64_t>(extent);
  return count * static_cast<std::uint64_t>(bits(dtype)) / 8;
}

Result<SafetensorsWriter> SafetensorsWriter::create(std::filesystem::path directory,
                                                    std::vector<PlannedTensor> tensors,
                                                    std::uint64_t shard_bytes) {
  std::set<std::string_view> names;
  for (const PlannedTensor& tensor : tensors)
    if (!names.insert(tensor.name).second)
      return Status(Code::invalid_argument, fmt::format("{}: tensor {} would be written twice",
                                                        directory.string(), quote(tensor.name)));
  SafetensorsWriter writer;
  writer.directory_ = std::move(directory);
  writer.tensors_ = std::move(tensors);
  writer.assign(shard_bytes);
  for (Shard& shard : writer.shards_)
    if (Status status = writer.create_file(shard); !status.ok()) return status;
  return writer;
}

void SafetensorsWriter::assign(std::uint64_t shard_bytes) {
  places_.resize(tensors_.size());
  shards_.emplace_back();
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const std::uint64_t bytes = tensors_[i].bytes();
    if (shards_.back().data_bytes != 0 && shards_.back().data_bytes + bytes > shard_bytes)
      shards_.emplace_back();
    shards_.back().tensors.push_back(i);
    shards_.back().data_bytes += bytes;
  }
  for (std::size_t s = 0; s < shards_.size(); ++s) {
    Shard& shard = shards_[s];
    shard.path = directory_ / (shards_.size() == 1
                                   ? std::string("model.safetensors")
                                   : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards_.size()));
    // The widest types first: then every tensor is aligned to its type.
    std::stable_sort(shard.tensors.begin(), shard.tensors.end(), [&](std::size_t a, std::size_t b) {
      return bits(tensors_[a].dtype) > bits(tensors_[b].dtype);
    });
    std::uint64_t at = 0;
    for (const std::size_t i : shard.tensors) {
      places_[i] = {s, at};
      at += tensors_[i].bytes();
    }
  }
}

std::string SafetensorsWriter::header(const Shard& shard) const {
  std::string text = R"({"__metadata__":{"format":"pt"})";
  for (const std::size_t i : shard.tensors) {
    const PlannedTensor& tensor = tensors_[i];
    fmt::format_to(std::back_inserter(text), R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                   nlohmann::json(tensor.name).dump(), name(tensor.dtype), fmt::join(tensor.shape, ","),
                   places_[i].begin, places_[i].begin + tensor.bytes());
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

Status SafetensorsWriter::create_file(Shard& shard) const {
  const std::string text = header(shard);
  if (text.size() > max_safetensors_header)
    return {Code::invalid_argument,
            fmt::format("{}: {} tensors need a header of {} bytes, the limit is {}: use smaller shards",
                        shard.path.string(), shard.tensors.size(), text.size(), max_safetensors_header)};
  shard.header_bytes = text.size();
  File file(shard.path, O_WRONLY | O_CREAT | O_EXCL);
  file.resize(length_bytes + shard.header_bytes + shard.data_bytes);
  // Not the length before it: until finish() nobody takes this for a whole file.
  file.write(std::as_bytes(std::span(text)), length_bytes);
  return file.close();
}

Status SafetensorsWriter::write(std::size_t tensor, std::span<const std::byte> data,
                                std::uint64_t offset) const {
  const Place& place = places_[tensor];
  const Shard& shard = shards_[place.shard];
  File file(shard.path, O_WRONLY);
  file.write(data, length_bytes + shard.header_bytes + place.begin + offset);
  return file.close();
}

Status SafetensorsWriter::finish() const {
  for (const Shard& shard : shards_) {
    File file(shard.path, O_WRONLY);
    file.sync();
    file.write(std::as_bytes(std::span(&shard.header_bytes, 1)), 0);
    file.sync();
    if (Status status = file.close(); !status.ok()) return status;
  }
  return shards_.size() == 1 ? Status() : write_index();
}

Status SafetensorsWriter::write_index() const {
  std::uint64_t total = 0;
  for (const Shard& shard : shards_) total += shard.data_bytes;
  std::string text = fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", total);
  for (std::size_t i = 0; i < tensors_.size(); ++i)
    fmt::format_to(std::back_inserter(text), "{}\n    {}: \"{}\"", i == 0 ? "" : ",",
                   nlohmann::json(tensors_[i].name).dump(),
                   shards_[places_[i].shard].path.filename().string());
  text += "\n  }\n}\n";
  return write_file(directory_ / "model.safetensors.index.json", text);
}

std::uint64_t SafetensorsWriter::file_bytes() const {
  std::uint64_t total = 0;
  for (const Shard& shard : shards_) total += length_bytes + shard.header_bytes + shard.data_bytes;
  return total;
}

Status write_file(const std::filesystem::path& path, std::string_view text) {
  File file(path, O_WRONLY | O_CREAT | O_EXCL);
  file.write(std::as_bytes(std::span(text)), 0);
  file.sync();
  return file.close();
}

Status sync_path(const std::filesystem::path& path) {
  File file(path, O_RDONLY);
  file.sync();
  return file.close();
}

}  // namespace gatefold
