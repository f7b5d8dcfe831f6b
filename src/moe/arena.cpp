#include "moe/arena.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

namespace gatefold {

Arena::Arena(std::size_t bytes) : bytes_(bytes) {
  constexpr std::size_t page = std::size_t{2} << 20, guard = 4096;
  // Room to begin on a large page, and to read a little past the end.
  mapped_ = bytes + page + guard;
  if (bytes == 0 || mapped_ < bytes) return;
  mapping_ =
      mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    return;
  }
  const auto begin = (reinterpret_cast<std::uintptr_t>(mapping_) + page - 1) / page * page;
  data_ = reinterpret_cast<std::byte*>(begin);
  if (bytes >= page) madvise(data_, bytes, MADV_HUGEPAGE);  // a wish: small pages do as well
}

double Arena::large_pages() const {
  std::ifstream maps("/proc/self/smaps");
  const auto at = reinterpret_cast<std::uintptr_t>(data_);
  bool inside = false;
  double resident = 0;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0, kilobytes = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      if (inside) break;
      inside = begin <= at && at < end;
    } else if (inside && std::sscanf(line.c_str(), "Rss: %lu kB", &kilobytes) == 1) {
      resident = static_cast<double>(kilobytes);
    } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kilobytes) == 1) {
      return resident > 0 ? static_cast<double>(kilobytes) / resident : 0;
    }
  }
  return 0;
}

Arena::~Arena() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

Arena::Arena(Arena&& other) noexcept {
  *this = std::move(other);
}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace gatefold
