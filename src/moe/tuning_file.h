#pragma once
/// \file
/// The file of measured choices (gatefold/tune.h).

#include <filesystem>
#include <map>
#include <string>
#include <tuple>

#include "gatefold/moe.h"

namespace gatefold {

/// Token counts that are tuned together: 1-2, 3-16, more.
inline constexpr int kTokenClasses = 3;
constexpr int token_class(std::int64_t tokens) {
  return tokens <= 2 ? 0 : tokens <= 16 ? 1 : 2;
}

class TuningFile {
 public:
  /// cpu, scheme; threads, hidden, intermediate, experts, top_k, token class.
  using Key = std::tuple<std::string, std::string, int, int, int, int, int, int>;
  static Key key(const MoeSpec& spec, int threads, int token_class);

  /// Empty if there is no such file. Errors: it cannot be read, or is not of this kind.
  static Result<TuningFile> read(const std::filesystem::path& path);
  /// Replaces the file whole or not at all; makes its directory.
  Status write(const std::filesystem::path& path) const;

  const CpuTuning* find(const Key& key) const;
  void set(const Key& key, const CpuTuning& tuning) { entries_[key] = tuning; }

  /// The one that plans read, read once; empty if it is bad (`warning`).
  static const TuningFile& installed();
  static bool was_read();
  std::string warning;

 private:
  std::map<Key, CpuTuning> entries_;
};

}  // namespace gatefold
