#include "checkpoint/companions.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "checkpoint/safetensors_writer.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

/// What a model needs beside its weights: tokenizer, generation settings, code, licence.
bool is_companion(const fs::path& path) {
  constexpr std::array<std::string_view, 6> extensions = {".json",  ".jsonl", ".model",
                                                          ".jinja", ".py",    ".tiktoken"};
  constexpr std::array<std::string_view, 6> names = {"merges.txt", "vocab.txt",   "README.md",
                                                     "LICENSE",    "LICENSE.txt", "NOTICE"};
  const std::string name = path.filename().string();
  if (name == "config.json" || name.ends_with(".index.json") || name.ends_with("quantize_config.json") ||
      name.ends_with("quant_config.json") || name.starts_with('.'))
    return false;
  return std::find(names.begin(), names.end(), name) != names.end() ||
         std::find(extensions.begin(), extensions.end(), path.extension().string()) != extensions.end();
}

}  // namespace

Status copy_companions(const fs::path& from, const fs::path& to) {
  std::error_code error;
  for (fs::directory_iterator at(from, error), end; !error && at != end; at.increment(error)) {
    if (!is_companion(at->path()) || !at->is_regular_file(error)) continue;
    const fs::path copy = to / at->path().filename();
    fs::copy_file(at->path(), copy, error);
    if (error)
      return {Code::io_error,
              fmt::format("{}: cannot copy to {}: {}", at->path().string(), copy.string(), error.message())};
    if (Status status = sync_path(copy); !status.ok()) return status;
  }
  if (error) return {Code::io_error, fmt::format("{}: {}", from.string(), error.message())};
  return {};
}

}  // namespace gatefold
