#pragma once
/// \file
/// Causal attention over a KV cache, with grouped queries and an optional sliding window.

#include <cstddef>
#include <cstdint>

namespace gatefold {

struct AttentionShape {
  int heads = 0, kv_heads = 0, head_dim = 0;
  int sliding_window = 0;  ///< a query sees this many positions, itself included; 0: all before it
};

/// Keys or values [positions, kv_heads, head_dim], from position 0 on, in whole blocks of key_block
/// positions; those past the end must be finite.
struct CachedRows {
  const float* values = nullptr;     ///< none: `codes`
  const std::byte* codes = nullptr;  ///< of e4m3, times scale
  float scale = 1;
};

struct AttentionInputs {
  const float* queries = nullptr;  ///< [tokens, heads, head_dim]: positions first, first + 1, ...
  CachedRows keys, values;
  std::int64_t first = 0, tokens = 0;
};

/// out [tokens, heads, head_dim] = softmax(q k / sqrt(head_dim)) v. A row of `out` does not depend on which
/// other queries are in the call, nor on `threads`.
void attention(const AttentionShape& shape, const AttentionInputs& inputs, float* out, int threads);

}  // namespace gatefold
