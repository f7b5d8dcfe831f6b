#pragma once
/// \file
/// What the tests of checkpoints share: directories and files, good and bad, made on the spot.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "gatefold/checkpoint.h"
#include "gatefold/status.h"

namespace gatefold {

inline std::string load_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void save_file(const std::filesystem::path& path, std::string_view content) {
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  EXPECT_TRUE(file) << path;
}

/// Removed with all its content at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "gatefold-XXXXXX").string();
    EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// A safetensors file from its parts, which may contradict each other.
inline std::string safetensors(const std::string& header, const std::string& data = "") {
  const std::uint64_t size = header.size();
  std::string file(sizeof size, '\0');
  std::memcpy(file.data(), &size, sizeof size);
  return file + header + data;
}

struct FileTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string data;
};

inline std::string safetensors(const std::vector<FileTensor>& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const FileTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {data.size(), data.size() + tensor.data.size()}}};
    data += tensor.data;
  }
  return safetensors(header.dump(), data);
}

/// All tensors of a checkpoint, to be changed and saved again.
inline std::vector<FileTensor> load_tensors(const Checkpoint& checkpoint) {
  std::vector<FileTensor> tensors;
  for (const TensorEntry& entry : checkpoint.tensors()) {
    const TensorView view = checkpoint.view(entry);
    tensors.push_back({entry.name,
                       std::string(name(entry.dtype)),
                       entry.shape,
                       {reinterpret_cast<const char*>(view.data), view.bytes}});
  }
  return tensors;
}

/// The error has this code, and its message all these parts.
inline void expect_error(const Status& status, Code code, std::initializer_list<std::string_view> parts) {
  EXPECT_EQ(status.code(), code) << status.message();
  for (const std::string_view part : parts)
    EXPECT_NE(status.message().find(part), std::string::npos)
        << "no '" << part << "' in: " << status.message();
}

}  // namespace gatefold
