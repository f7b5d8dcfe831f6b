#include "format/options.h"

#include <cstdlib>

namespace gatefold {

std::string cpu_override() {
  const char* value = std::getenv("GATEFOLD_CPU");
  return value != nullptr ? value : "";
}

}  // namespace gatefold
