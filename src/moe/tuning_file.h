#pragma once
/// \file
/// The file of measured choices (gatefold/tune.h). An entry is of a CPU or of a GPU.

#include <filesystem>
#include <map>
#include <string>
#include <tuple>

#include "gatefold/moe.h"

namespace gatefold {

/// Token counts that are tuned together on a CPU: 1-2, 3-16, more.
inline constexpr int kTokenClasses = 3;
constexpr int token_class(std::int64_t tokens) {
  return tokens <= 2 ? 0 : tokens <= 16 ? 1 : 2;
}

class TuningFile {
 public:
  /// cpu, scheme; threads, hidden, intermediate, experts, top_k, token class.
  using Key = std::tuple<std::string, std::string, int, int, int, int, int, int>;
  static Key key(const MoeSpec& spec, int threads, int token_class);
  /// gpu, scheme; hidden, intermediate, experts, top_k, ep_size, token class (cuda_token_class); whether fp8
  /// is added up by PlanOptions::fast_accumulation.
  using CudaKey = std::tuple<std::string, std::string, int, int, int, int, int, int, bool>;
  static CudaKey cuda_key(const MoeSpec& spec, const std::string& gpu, int token_class,
                          bool fast_accumulation);

  /// Empty if there is no such file. Errors: it cannot be read, or is not of this kind.
  static Result<TuningFile> read(const std::filesystem::path& path);
  /// Replaces the file whole or not at all; makes its directory.
  Status write(const std::filesystem::path& path) const;

  const CpuTuning* find(const Key& key) const;
  const CudaTuning* find(const CudaKey& key) const;
  void set(const Key& key, const CpuTuning& tuning) { entries_[key] = tuning; }
  void set(const CudaKey& key, const CudaTuning& tuning) { cuda_entries_[key] = tuning; }

  /// The one that plans read, read once; empty if it is bad (`warning`).
  static const TuningFile& installed();
  static bool was_read();
  std::string warning;

 private:
  std::map<Key, CpuTuning> entries_;
  std::map<CudaKey, CudaTuning> cuda_entries_;
};

/// "warps", "warpgroups".
std::string_view name(CudaTuning::Body body);

}  // namespace gatefold
