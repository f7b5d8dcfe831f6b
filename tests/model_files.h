#pragma once
/// \file
/// What the tests of the decoder share: reference tensors, and checkpoints changed on purpose.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/mapped_file.h"
#include "checkpoint/safetensors.h"
#include "gatefold/decoder.h"

namespace gatefold {

inline const std::string tiny_moe = GATEFOLD_SOURCE_DIR "/models/tiny-moe";
inline const std::string golden_models = GATEFOLD_SOURCE_DIR "/tests/golden/decoder";

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The data of one tensor of a safetensors file. T must have the dtype's size.
template <class T>
std::vector<T> read_tensor(const std::filesystem::path& path, const std::string& name) {
  const auto file = MappedFile::open(path);
  EXPECT_TRUE(file) << file.status().message();
  const auto header = parse_safetensors_header(file->bytes(), file->bytes().size(), path.string());
  EXPECT_TRUE(header) << header.status().message();
  for (const TensorEntry& entry : header->tensors) {
    if (entry.name != name) continue;
    EXPECT_EQ(bits(entry.dtype), static_cast<int>(8 * sizeof(T)));
    std::vector<T> values(entry.bytes() / sizeof(T));
    std::memcpy(values.data(), file->bytes().data() + entry.begin, entry.bytes());
    return values;
  }
  ADD_FAILURE() << path << " has no " << name;
  return {};
}

inline double relative_l2(std::span<const float> actual, std::span<const float> expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = static_cast<double>(actual[i]) - expected[i];
    error += difference * difference;
    norm += static_cast<double>(expected[i]) * expected[i];
  }
  return std::sqrt(error / norm);
}

inline Checkpoint open_checkpoint(const std::string& directory) {
  auto checkpoint = Checkpoint::open(directory);
  if (!checkpoint) throw std::runtime_error(checkpoint.status().message());
  return *checkpoint;
}

inline Decoder load_decoder(const std::string& directory, const DecoderOptions& options = {}) {
  auto decoder = Decoder::load(open_checkpoint(directory), options);
  if (!decoder) throw std::runtime_error(decoder.status().message());
  return *decoder;
}

/// A new directory that is removed at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "gatefold-test-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string string() const { return path_.string(); }

  std::filesystem::path write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return path_ / name;
  }
  /// Copies a file, with `from` (which it must contain) replaced by `to`.
  void copy(const std::filesystem::path& file, const std::string& from = "",
            const std::string& to = "") const {
    std::string content = read_file(file);
    if (!from.empty()) {
      const std::size_t at = content.find(from);
      ASSERT_NE(at, std::string::npos) << from << " in " << file;
      content.replace(at, from.size(), to);
    }
    write(file.filename().string(), content);
  }

 private:
  std::filesystem::path path_;
};

}  // namespace gatefold
