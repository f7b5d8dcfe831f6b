#pragma once
/// \file
/// The logits of one model, kept to compare others with them.

#include <cstdint>
#include <memory>
#include <vector>

#include "gatefold/status.h"

namespace gatefold {

/// For a mapping's pointer.
struct Unmap {
  std::uint64_t bytes = 0;
  void operator()(void* mapping) const;
};

/// Room for many rows of logits: memory, or a file without a name.
class LogitsStore {
 public:
  static Result<LogitsStore> create(std::uint64_t rows, std::uint64_t vocab, std::uint64_t memory_bytes);

  float* row(std::int64_t index) { return data_ + static_cast<std::uint64_t>(index) * vocab_; }

 private:
  explicit LogitsStore(std::uint64_t vocab) : vocab_(vocab) {}

  std::uint64_t vocab_;
  std::vector<float> memory_;
  std::unique_ptr<void, Unmap> mapping_;
  float* data_ = nullptr;
};

/// sum p (log p - log q), p and q the softmax of two rows of logits.
double divergence(const float* p_logits, const float* q_logits, std::int64_t count);

}  // namespace gatefold
