#include "format/options.h"

#include <cstdlib>

namespace gatefold {

namespace {
std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}
}  // namespace

std::string cpu_override() {
  return variable("GATEFOLD_CPU");
}

std::string tuning_path() {
  if (std::string path = variable("GATEFOLD_TUNING"); !path.empty()) return path;
  if (const std::string cache = variable("XDG_CACHE_HOME"); !cache.empty())
    return cache + "/gatefold/tuning.json";
  const std::string home = variable("HOME");
  return home.empty() ? "" : home + "/.cache/gatefold/tuning.json";
}

}  // namespace gatefold
