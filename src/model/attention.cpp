#include "model/attention.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "format/row_kernels.h"
#include "model/blas.h"
#include "model/softmax.h"

namespace gatefold {
namespace {

// Queries of the heads that share a KV head are rows of one tile. Tiles and key blocks have one shape and
// begin at fixed positions of the sequence, for the reason given in linear.cpp.
constexpr std::int64_t tile_rows = 16;
struct Tile {
  std::vector<float> queries, sums;  // [tile_rows, head_dim]
  std::vector<float> keys, values;   // [key_block, head_dim]: a block of codes, decoded
  float scores[tile_rows * key_block];

  explicit Tile(int head_dim)
      : queries(tile_rows * head_dim),
        sums(tile_rows * head_dim),
        keys(key_block * head_dim),
        values(key_block * head_dim) {}
};

// Rows of one head, `stride` floats apart.
struct Block {
  const float* rows;
  int stride;
};

// The block that begins at number `at` of the cache.
Block block_at(const CachedRows& cached, std::int64_t at, int stride, int d, std::vector<float>& decoded) {
  if (cached.values != nullptr) return {cached.values + at, stride};
  const float zero = 0;
  const auto decode = row_kernels()[formats::e4m3].decode;
  for (std::int64_t row = 0; row < key_block; ++row)
    decode(cached.codes + at + row * stride, d, d, &cached.scale, &zero, decoded.data() + row * d);
  return {decoded.data(), d};
}

// Rows of one KV head: row r is query head r % group of the token at position r / group. Of the tile that
// begins at row tile_begin, those that are in the call.
void attend(const AttentionShape& shape, const AttentionInputs& inputs, int kv_head, std::int64_t tile_begin,
            float* out, Tile& tile) {
  const int d = shape.head_dim;
  const int group = shape.heads / shape.kv_heads;
  const int stride = shape.kv_heads * d;
  const std::int64_t begin = std::max(inputs.first * group - tile_begin, std::int64_t{0});
  const std::int64_t end = std::min((inputs.first + inputs.tokens) * group - tile_begin, tile_rows);
  const auto position = [&](std::int64_t row) { return (tile_begin + row) / group; };
  const auto oldest = [&](std::int64_t row) {
    return shape.sliding_window > 0 ? std::max<std::int64_t>(0, position(row) - shape.sliding_window + 1) : 0;
  };
  const auto offset = [&](std::int64_t row) {
    const std::int64_t head = kv_head * group + (tile_begin + row) % group;
    return ((position(row) - inputs.first) * shape.heads + head) * d;
  };

  std::fill(tile.queries.begin(), tile.queries.end(), 0.0f);
  std::fill(tile.sums.begin(), tile.sums.end(), 0.0f);
  for (std::int64_t row = begin; row < end; ++row)
    std::copy_n(inputs.queries + offset(row), d, tile.queries.data() + row * d);
  SoftmaxRow states[tile_rows];
  const AbsorbScores absorb = absorb_scores();
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));

  for (std::int64_t block = oldest(begin) / key_block; block <= position(end - 1) / key_block; ++block) {
    const std::int64_t start = block * key_block;
    const std::int64_t at = start * stride + kv_head * d;
    const Block keys = block_at(inputs.keys, at, stride, d, tile.keys);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, tile_rows, key_block, d, scale, tile.queries.data(),
                d, keys.rows, keys.stride, 0.0f, tile.scores, key_block);
    // A row's sums take part in the product below even where the row sees nothing of this block: then its
    // weights are 0 and the sums stay as they are.
    for (std::int64_t row = begin; row < end; ++row) {
      float* scores = tile.scores + row * key_block;
      const std::int64_t seen = std::clamp<std::int64_t>(oldest(row) - start, 0, key_block);
      const std::int64_t unseen = std::clamp<std::int64_t>(position(row) - start + 1, 0, key_block);
      std::fill(scores, scores + seen, -std::numeric_limits<float>::infinity());
      std::fill(scores + unseen, scores + key_block, -std::numeric_limits<float>::infinity());
      absorb(states[row], scores, tile.sums.data() + row * d, d);
    }
    const Block values = block_at(inputs.values, at, stride, d, tile.values);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, tile_rows, d, key_block, 1.0f, tile.scores,
                key_block, values.rows, values.stride, 1.0f, tile.sums.data(), d);
  }
  for (std::int64_t row = begin; row < end; ++row)
    for (int i = 0; i < d; ++i) out[offset(row) + i] = tile.sums[row * d + i] / states[row].sum;
}

}  // namespace

void attention(const AttentionShape& shape, const AttentionInputs& inputs, float* out, int threads) {
  const std::int64_t group = shape.heads / shape.kv_heads;
  const std::int64_t first_tile = inputs.first * group / tile_rows;
  const std::int64_t tiles =
      ((inputs.first + inputs.tokens) * group + tile_rows - 1) / tile_rows - first_tile;
#pragma omp parallel num_threads(threads)
  {
    const SerialBlas serial;
    Tile tile(shape.head_dim);
    // Later queries see more keys: the longest tasks first.
#pragma omp for schedule(dynamic)
    for (std::int64_t task = tiles * shape.kv_heads - 1; task >= 0; --task)
      attend(shape, inputs, static_cast<int>(task % shape.kv_heads),
             (first_tile + task / shape.kv_heads) * tile_rows, out, tile);
  }
}

}  // namespace gatefold
