#include "checkpoint/source.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "checkpoint/index.h"
#include "checkpoint/json.h"
#include "checkpoint/safetensors.h"

namespace gatefold {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t max_index_bytes = 100'000'000;
constexpr std::string_view single_name = "model.safetensors";
constexpr std::string_view index_name = "model.safetensors.index.json";

/// "model-00002-of-00005.safetensors": 2 of 5.
struct Shard {
  fs::path path;
  std::uint64_t number = 0, count = 0;
};

std::optional<Shard> parse_shard_name(const fs::path& path) {
  const std::string file_name = path.filename().string();
  std::string_view rest = file_name;
  const auto skip = [&](std::string_view text) {
    const bool matches = rest.starts_with(text);
    if (matches) rest.remove_prefix(text.size());
    return matches;
  };
  const auto number = [&](std::uint64_t& value) {
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    return error == std::errc{};
  };
  Shard shard{path};
  if (skip("model-") && number(shard.number) && skip("-of-") && number(shard.count) && rest == ".safetensors")
    return shard;
  return std::nullopt;
}

/// All shards of a directory without an index; an error if one is missing.
Result<std::vector<fs::path>> numbered_shards(const fs::path& directory) {
  std::vector<Shard> shards;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    if (auto shard = parse_shard_name(it->path())) shards.push_back(std::move(*shard));
  if (error)
    return Status{Code::io_error, fmt::format("{}: cannot list: {}", directory.string(), error.message())};
  if (shards.empty())
    return Status{Code::io_error,
                  fmt::format("{}: no weights: neither {} nor {} nor model-*-of-*.safetensors",
                              directory.string(), index_name, single_name)};
  std::sort(shards.begin(), shards.end(), [](const Shard& a, const Shard& b) { return a.number < b.number; });
  std::vector<fs::path> paths;
  for (const Shard& shard : shards) {
    const std::uint64_t expected = paths.size() + 1;
    if (shard.count != shards.front().count || shard.number != expected)
      return Status{Code::bad_file,
                    fmt::format("{}: shard {} of {} expected here: a shard is missing or there are two sets",
                                shard.path.string(), expected, shards.front().count)};
    paths.push_back(shard.path);
  }
  if (paths.size() != shards.front().count)
    return Status{Code::io_error, fmt::format("{}: only {} of {} shards", directory.string(), paths.size(),
                                              shards.front().count)};
  return paths;
}

}  // namespace

Result<Source> Source::open_file(const fs::path& path) {
  Source source;
  if (Status status = source.add(path); !status.ok()) return status;
  if (Status status = source.sort(); !status.ok()) return status;
  return Result<Source>(std::move(source));
}

Result<Source> Source::open(const fs::path& directory) {
  std::error_code error;
  if (!fs::is_directory(directory, error))
    return Status{Code::io_error, fmt::format("{}: {}", directory.string(),
                                              error ? error.message() : std::string("not a directory"))};
  const fs::path index_path = directory / index_name;
  const fs::path single_path = directory / single_name;
  const bool has_index = fs::exists(index_path, error);

  ShardIndex index;
  std::vector<fs::path> paths;
  if (has_index) {
    auto text = read_text(index_path, max_index_bytes);
    if (!text) return text.status();
    auto parsed = parse_index(*text, index_path.string());
    if (!parsed) return parsed.status();
    index = std::move(*parsed);
    std::set<std::string> names;
    for (const auto& [tensor, shard] : index) names.insert(shard);
    for (const std::string& shard : names) paths.push_back(directory / shard);
    if (!names.contains(std::string(single_name)) && fs::exists(single_path, error))
      return Status{Code::bad_file, fmt::format("{}: there is an index beside it that does not name it; "
                                                "remove the one that is not meant",
                                                single_path.string())};
  } else if (fs::exists(single_path, error)) {
    paths = {single_path};
  } else {
    auto shards = numbered_shards(directory);
    if (!shards) return shards.status();
    paths = std::move(*shards);
  }

  Source source;
  for (const fs::path& path : paths)
    if (Status status = source.add(path); !status.ok()) return status;
  if (Status status = source.sort(); !status.ok()) return status;
  for (const auto& [tensor, shard] : index) {
    const TensorEntry* entry = source.find(tensor);
    if (entry == nullptr)
      return Status{Code::bad_file, fmt::format("{}: weight_map: tensor {} is in no file, least of all in {}",
                                                index_path.string(), quote(tensor), quote(shard))};
    const std::string found = source.paths_[static_cast<std::size_t>(entry->file)].filename().string();
    if (found != shard)
      return Status{Code::bad_file, fmt::format("{}: weight_map: tensor {} is not in {}, but in {}",
                                                index_path.string(), quote(tensor), quote(shard), found)};
  }
  return Result<Source>(std::move(source));
}

Status Source::add(const fs::path& path) {
  auto file = MappedFile::open(path);
  if (!file) return file.status();
  auto header = parse_safetensors_header(file->bytes(), file->bytes().size(), path.string());
  if (!header) return header.status();
  for (TensorEntry& entry : header->tensors) {
    entry.file = static_cast<int>(files_.size());
    tensors_.push_back(std::move(entry));
  }
  paths_.push_back(path);
  files_.push_back(std::move(*file));
  return {};
}

Status Source::sort() {
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  const auto twice =
      std::adjacent_find(tensors_.begin(), tensors_.end(),
                         [](const TensorEntry& a, const TensorEntry& b) { return a.name == b.name; });
  if (twice == tensors_.end()) return {};
  return {Code::bad_file, fmt::format("{}: also in {}", where(*twice),
                                      paths_[static_cast<std::size_t>(std::next(twice)->file)].string())};
}

const TensorEntry* Source::find(std::string_view name) const {
  const auto found =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const TensorEntry& entry, std::string_view wanted) { return entry.name < wanted; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

TensorView Source::view(const TensorEntry& entry) const {
  const auto file = files_[static_cast<std::size_t>(entry.file)].bytes();
  return {file.data() + entry.begin, entry.dtype, entry.shape, static_cast<std::size_t>(entry.bytes())};
}

void Source::release(const TensorEntry& entry) const {
  files_[static_cast<std::size_t>(entry.file)].release(entry.begin, entry.end);
}

std::string Source::where(const TensorEntry& entry) const {
  return fmt::format("{}: tensor {}", paths_[static_cast<std::size_t>(entry.file)].string(),
                     quote(entry.name));
}

}  // namespace gatefold
