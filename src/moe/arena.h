#pragma once
/// \file
/// Memory for packed weights: one mapping a layer, in 2 MiB pages where the system has them (reading through
/// 4 KiB pages costs a quarter of the bandwidth or more).

#include <cstddef>

namespace gatefold {

class Arena {
 public:
  Arena() = default;
  /// Zeroed memory, 64-byte aligned; data() is nullptr if there is none to be had.
  explicit Arena(std::size_t bytes);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// The share that lies in large pages, 0 to 1: of the system's mapping that this memory belongs to.
  double large_pages() const;

 private:
  void* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace gatefold
