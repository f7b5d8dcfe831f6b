#pragma once
/// \file
/// The workspace of a plan: one object gives the size to allocate and the pointers to use, so that the two
/// cannot disagree. A kernel declares its buffers by calling `add` in a function of its own; the plan calls
/// that function to learn the size, the kernel calls it again to get the same offsets.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace gatefold {

class WorkspaceLayout {
 public:
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t kCanaryBytes = 64;

  struct Region {
    std::string_view name;
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };

  explicit WorkspaceLayout(bool canaries = false) : canary_(canaries ? kCanaryBytes : 0), total_(canary_) {}

  /// Offset of a new buffer of `count` elements.
  template <class T>
  std::size_t add(std::string_view name, std::size_t count) {
    Region& region = regions_.at(used_++);
    region = {name, total_, count * sizeof(T)};
    total_ += (region.bytes + kAlignment - 1) / kAlignment * kAlignment + canary_;
    return region.offset;
  }

  std::span<const Region> regions() const { return {regions_.data(), used_}; }
  /// From an aligned base on.
  std::size_t used_bytes() const { return total_; }
  /// Includes the room to align a base pointer of any alignment.
  std::size_t bytes() const { return total_ + kAlignment; }

  static std::byte* align(std::byte* base) {
    return reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(base) + kAlignment - 1) /
                                        kAlignment * kAlignment);
  }

  /// Fills every buffer with 0xFF (NaN, -1) and the gaps around them with the canary.
  void poison(std::byte* aligned_base) const {
    std::memset(aligned_base, kCanary, total_);
    for (const Region& region : regions()) std::memset(aligned_base + region.offset, 0xFF, region.bytes);
  }

  /// The first region after or before whose buffer the canary is damaged; nullptr if none is.
  const Region* damaged(const std::byte* aligned_base) const {
    std::size_t end = 0;
    for (const Region& region : regions()) {
      for (std::size_t at = end; at < region.offset; ++at)
        if (aligned_base[at] != std::byte{kCanary}) return &region;
      end = region.offset + region.bytes;
    }
    for (std::size_t at = end; at < total_ && used_ != 0; ++at)
      if (aligned_base[at] != std::byte{kCanary}) return &regions_[used_ - 1];
    return nullptr;
  }

 private:
  static constexpr unsigned char kCanary = 0xC5;
  std::size_t canary_;
  std::size_t total_;
  std::size_t used_ = 0;
  std::array<Region, 48> regions_{};
};

}  // namespace gatefold
