#include "model/attention.h"

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "gatefold/codec.h"
#include "model/blas.h"

namespace gatefold {
namespace {

// Queries of the heads that share a KV head are rows of one tile. Tiles and key blocks have one shape and
// begin at fixed positions of the sequence, for the reason given in linear.cpp.
constexpr std::int64_t tile_rows = 16;
constexpr int lanes = 16;

// exp(x) for x <= 0 to 1 ulp; exactly 1 at 0 and exactly 0 below -87 (-inf included). Unlike std::exp it
// vectorizes.
inline float exp_negative(float x) {
  const float clamped = x > -87.0f ? x : -87.0f;
  const float n = detail::round_to_integer(clamped * 1.44269504f);
  // ln 2 in two parts: n * 0.693359375 is exact.
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float power = std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
  return x > -87.0f ? p * power : 0.0f;
}

// The running softmax of one row: scores become weights relative to the largest score so far.
struct RowState {
  float highest = std::numeric_limits<float>::lowest();
  float sum = 0.0f;

  /// Returns the factor for what was accumulated before.
  float absorb(float* scores) {
    float high[lanes];
    std::fill_n(high, lanes, highest);
    for (std::int64_t j = 0; j < key_block; j += lanes)
      for (int lane = 0; lane < lanes; ++lane)
        high[lane] = high[lane] > scores[j + lane] ? high[lane] : scores[j + lane];
    const float before = highest;
    for (const float value : high) highest = highest > value ? highest : value;

    float sums[lanes] = {};
    for (std::int64_t j = 0; j < key_block; j += lanes) {
      for (int lane = 0; lane < lanes; ++lane) {
        scores[j + lane] = exp_negative(scores[j + lane] - highest);
        sums[lane] += scores[j + lane];
      }
    }
    const float factor = exp_negative(before - highest);
    sum *= factor;
    for (const float value : sums) sum += value;
    return factor;
  }
};

struct Tile {
  std::vector<float> queries, sums;  // [tile_rows, head_dim]
  float scores[tile_rows * key_block];

  explicit Tile(int head_dim) : queries(tile_rows * head_dim), sums(tile_rows * head_dim) {}
};

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
  RowState states[tile_rows];
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));

  for (std::int64_t block = oldest(begin) / key_block; block <= position(end - 1) / key_block; ++block) {
    const std::int64_t start = block * key_block;
    const std::int64_t at = start * stride + kv_head * d;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, tile_rows, key_block, d, scale, tile.queries.data(),
                d, inputs.keys + at, stride, 0.0f, tile.scores, key_block);
    // A row's sums take part in the product below even where the row sees nothing of this block: then its
    // weights are 0 and the sums stay as they are.
    for (std::int64_t row = begin; row < end; ++row) {
      float* scores = tile.scores + row * key_block;
      const std::int64_t seen = std::clamp<std::int64_t>(oldest(row) - start, 0, key_block);
      const std::int64_t unseen = std::clamp<std::int64_t>(position(row) - start + 1, 0, key_block);
      std::fill(scores, scores + seen, -std::numeric_limits<float>::infinity());
      std::fill(scores + unseen, scores + key_block, -std::numeric_limits<float>::infinity());
      const float factor = states[row].absorb(scores);
      for (int i = 0; i < d; ++i) tile.sums[row * d + i] *= factor;
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, tile_rows, d, key_block, 1.0f, tile.scores,
                key_block, inputs.values + at, stride, 1.0f, tile.sums.data(), d);
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
