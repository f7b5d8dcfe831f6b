#include "model/softmax.h"

#include "format/exponential.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

// Sums and maxima are kept in this many parts, so that they vectorize and do so in the same order everywhere.
constexpr int lanes = 16;
static_assert(key_block % lanes == 0);

void absorb_block(SoftmaxRow& row, float* scores, float* sums, std::int64_t count) {
  float high[lanes];
  for (float& value : high) value = row.highest;
  for (std::int64_t j = 0; j < key_block; j += lanes)
    for (int lane = 0; lane < lanes; ++lane)
      high[lane] = high[lane] > scores[j + lane] ? high[lane] : scores[j + lane];
  const float before = row.highest;
  for (const float value : high) row.highest = row.highest > value ? row.highest : value;
  const float highest = row.highest;

  float parts[lanes] = {};
  for (std::int64_t j = 0; j < key_block; j += lanes) {
    for (int lane = 0; lane < lanes; ++lane) {
      scores[j + lane] = exponential(scores[j + lane] - highest);
      parts[lane] += scores[j + lane];
    }
  }
  const float factor = exponential(before - highest);
  row.sum *= factor;
  for (const float value : parts) row.sum += value;
  for (std::int64_t i = 0; i < count; ++i) sums[i] *= factor;
}

}  // namespace

extern const AbsorbScores absorb;
const AbsorbScores absorb = absorb_block;

}  // namespace gatefold::GATEFOLD_ISA
