#include "moe/tuning_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>

#include "checkpoint/json.h"
#include "format/isa.h"
#include "format/options.h"
#include "moe/kernel.h"

namespace gatefold {

std::string_view name(CudaTuning::Body body) {
  return body == CudaTuning::Body::warps ? "warps" : "warpgroups";
}
std::string describe(const CudaTuning& tuning) {
  return fmt::format("{}, {} tokens", name(tuning.body), tuning.tile_tokens);
}

namespace {

constexpr int kVersion = 1;
constexpr int kMostPrefetch = 1 << 20, kMostSplit = 64, kMostSerial = 1 << 12;

using nlohmann::json;

bool get(const json& object, const char* name, int least, int most, int& value) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_number_integer()) return false;
  const auto number = found->get<std::int64_t>();
  value = static_cast<int>(number);
  return number >= least && number <= most;
}
bool get(const json& object, const char* name, std::string& value) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_string()) return false;
  value = found->get<std::string>();
  return true;
}

constexpr int most = 1 << 30;
constexpr CudaTuning::Body bodies[] = {CudaTuning::Body::warps, CudaTuning::Body::warpgroups};

bool parse_entry(const json& entry, TuningFile::Key& key, CpuTuning& tuning) {
  auto& [cpu, scheme, threads, hidden, intermediate, experts, top_k, tokens] = key;
  return get(entry, "cpu", cpu) && get(entry, "scheme", scheme) && get(entry, "threads", 1, most, threads) &&
         get(entry, "hidden", 1, most, hidden) && get(entry, "intermediate", 1, most, intermediate) &&
         get(entry, "experts", 1, most, experts) && get(entry, "top_k", 1, most, top_k) &&
         get(entry, "token_class", 0, kTokenClasses - 1, tokens) &&
         get(entry, "prefetch", -1, kMostPrefetch, tuning.prefetch) &&
         get(entry, "split", 1, kMostSplit, tuning.split) &&
         get(entry, "serial_tokens", 0, kMostSerial, tuning.serial_tokens);
}

bool parse_entry(const json& entry, TuningFile::CudaKey& key, CudaTuning& tuning) {
  auto& [gpu, scheme, hidden, intermediate, experts, top_k, ep_size, tokens, fast] = key;
  std::string body;
  const auto with_fast = entry.find("fast_accumulation");  // none: false
  if (with_fast != entry.end() && !with_fast->is_boolean()) return false;
  fast = with_fast != entry.end() && with_fast->get<bool>();
  ep_size = 1;
  if (entry.contains("ep_size") && !get(entry, "ep_size", 1, most, ep_size)) return false;
  if (!get(entry, "gpu", gpu) || !get(entry, "scheme", scheme) || !get(entry, "hidden", 1, most, hidden) ||
      !get(entry, "intermediate", 1, most, intermediate) || !get(entry, "experts", 1, most, experts) ||
      !get(entry, "top_k", 1, most, top_k) || !get(entry, "token_class", 0, kCudaTokenClasses - 1, tokens) ||
      !get(entry, "body", body) || !get(entry, "tile_tokens", 1, 1 << 10, tuning.tile_tokens))
    return false;
  const auto* found = std::find_if(std::begin(bodies), std::end(bodies),
                                   [&](CudaTuning::Body each) { return name(each) == body; });
  if (found == std::end(bodies)) return false;
  tuning.body = *found;
  return true;
}

}  // namespace

TuningFile::Key TuningFile::key(const MoeSpec& spec, int threads, int token_class) {
  return {cpu_name(),        std::string(scheme(spec.scheme).name),
          threads,           spec.hidden,
          spec.intermediate, spec.experts,
          spec.top_k,        token_class};
}
TuningFile::CudaKey TuningFile::cuda_key(const MoeSpec& spec, const std::string& gpu, int token_class,
                                         bool fast_accumulation) {
  const bool fast = fast_accumulation && scheme(spec.scheme).activation.value == formats::e4m3;
  return {gpu,          std::string(scheme(spec.scheme).name),
          spec.hidden,  spec.intermediate,
          spec.experts, spec.top_k,
          spec.ep_size, token_class,
          fast};
}

Result<TuningFile> TuningFile::read(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return TuningFile{};
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return Status(Code::io_error, fmt::format("{}: cannot be read", path.string()));
  const Result<json> root = parse_json(text.str(), path.string());
  if (!root) return root.status();
  int version = 0;
  if (!root->is_object() || !get(*root, "gatefold_tuning", 0, 1 << 30, version) || version != kVersion ||
      !root->contains("entries") || !root->at("entries").is_array())
    return Status(Code::bad_file,
                  fmt::format("{}: is not a tuning file of version {}", path.string(), kVersion));
  TuningFile result;
  for (const json& entry : root->at("entries")) {
    const auto add = [&]<class EntryKey, class Tuning>(EntryKey key, Tuning tuning) {
      const bool good = parse_entry(entry, key, tuning);
      if (good) result.set(key, tuning);
      return good;
    };
    const bool good =
        entry.is_object() && (entry.contains("gpu") ? add(CudaKey{}, CudaTuning{}) : add(Key{}, CpuTuning{}));
    if (!good)
      return Status(Code::bad_file, fmt::format("{}: entry {} is not complete or out of range", path.string(),
                                                result.entries_.size() + result.cuda_entries_.size()));
  }
  return result;
}

Status TuningFile::write(const std::filesystem::path& path) const {
  json entries = json::array();
  for (const auto& [key, tuning] : entries_) {
    const auto& [cpu, scheme, threads, hidden, intermediate, experts, top_k, tokens] = key;
    entries.push_back({{"cpu", cpu},
                       {"scheme", scheme},
                       {"threads", threads},
                       {"hidden", hidden},
                       {"intermediate", intermediate},
                       {"experts", experts},
                       {"top_k", top_k},
                       {"token_class", tokens},
                       {"prefetch", tuning.prefetch},
                       {"split", tuning.split},
                       {"serial_tokens", tuning.serial_tokens}});
  }
  for (const auto& [key, tuning] : cuda_entries_) {
    const auto& [gpu, scheme, hidden, intermediate, experts, top_k, ep_size, tokens, fast] = key;
    entries.push_back({{"gpu", gpu},
                       {"scheme", scheme},
                       {"hidden", hidden},
                       {"intermediate", intermediate},
                       {"experts", experts},
                       {"top_k", top_k},
                       {"token_class", tokens},
                       {"body", name(tuning.body)},
                       {"tile_tokens", tuning.tile_tokens}});
    if (ep_size > 1) entries.back()["ep_size"] = ep_size;
    if (fast) entries.back()["fast_accumulation"] = true;
  }
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  const std::filesystem::path temporary = path.string() + ".new";
  {
    std::ofstream file(temporary);
    file << json{{"gatefold_tuning", kVersion}, {"entries", entries}}.dump(1) << "\n";
    file.flush();
    if (!file) {
      std::filesystem::remove(temporary, error);
      return {Code::io_error, fmt::format("{}: cannot be written", path.string())};
    }
  }
  std::filesystem::rename(temporary, path, error);
  if (!error) return {};
  const std::string why = error.message();
  std::filesystem::remove(temporary, error);
  return {Code::io_error, fmt::format("{}: cannot be written: {}", path.string(), why)};
}

const CpuTuning* TuningFile::find(const Key& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second;
}
const CudaTuning* TuningFile::find(const CudaKey& key) const {
  const auto found = cuda_entries_.find(key);
  return found == cuda_entries_.end() ? nullptr : &found->second;
}

namespace {
std::atomic<bool> installed_was_read{false};
}

bool TuningFile::was_read() {
  return installed_was_read;
}

const TuningFile& TuningFile::installed() {
  static const TuningFile file = [] {
    installed_was_read = true;
    const std::string path = tuning_path();
    if (path.empty()) return TuningFile{};
    Result<TuningFile> read = TuningFile::read(path);
    if (!read) {
      TuningFile none;
      none.warning = "tuning is ignored: " + read.status().message();
      return none;
    }
    bool mine = read->entries_.empty();
    for (const auto& [key, tuning] : read->entries_) mine |= std::get<0>(key) == cpu_name();
    if (!mine)
      read->warning = fmt::format("tuning is ignored: {} has nothing for this CPU, {}", path, cpu_name());
    return std::move(*read);
  }();
  return file;
}

}  // namespace gatefold
