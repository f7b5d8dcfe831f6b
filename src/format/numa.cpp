#include "format/numa.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace gatefold {
namespace {

/// The system's numbers of the nodes with CPUs.
const std::vector<unsigned>& nodes() {
  static const std::vector<unsigned> list = [] {
    std::vector<unsigned> found;
    for (unsigned node = 0; found.size() < kMostNodes && node < 8 * sizeof(unsigned long); ++node) {
      std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
      std::string cpus;
      if (std::getline(file, cpus) && !cpus.empty()) found.push_back(node);
    }
    if (found.empty()) found.push_back(0);
    return found;
  }();
  return list;
}

}  // namespace

int numa_nodes() {
  return static_cast<int>(nodes().size());
}

int current_node() {
  unsigned cpu = 0, node = 0;
  if (getcpu(&cpu, &node) != 0) return 0;
  const auto at = std::find(nodes().begin(), nodes().end(), node);
  return at == nodes().end() ? 0 : static_cast<int>(at - nodes().begin());
}

void prefer_node(void* data, std::size_t bytes, int node) {
  if (numa_nodes() == 1) return;
  constexpr long preferred = 1;  // MPOL_PREFERRED
  constexpr std::uintptr_t page = 4096;
  const auto begin = reinterpret_cast<std::uintptr_t>(data), first = (begin + page - 1) / page * page;
  if (begin + bytes < first + page) return;
  const unsigned long mask = 1ul << nodes()[static_cast<std::size_t>(node)];
  syscall(SYS_mbind, first, begin + bytes - first, preferred, &mask, 8 * sizeof(mask), 0);
}

}  // namespace gatefold
