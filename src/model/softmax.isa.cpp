#include "model/softmax.h"

#include "gatefold/codec.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

// Sums and maxima are kept in this many parts, so that they vectorize and do so in the same order everywhere.
constexpr int lanes = 16;
static_assert(key_block % lanes == 0);

// exp(x) for x <= 0, to 2 ulp; exactly 1 at 0 and exactly 0 below -87 (-inf included). Unlike std::exp it
// vectorizes.
GATEFOLD_HD float exp_negative(float x) {
  const float clamped = x > -87.0f ? x : -87.0f;
  const float n = detail::round_to_integer(clamped * 1.44269504f);
  // ln 2 in two parts, so that n times the first is exact.
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
      scores[j + lane] = exp_negative(scores[j + lane] - highest);
      parts[lane] += scores[j + lane];
    }
  }
  const float factor = exp_negative(before - highest);
  row.sum *= factor;
  for (const float value : parts) row.sum += value;
  for (std::int64_t i = 0; i < count; ++i) sums[i] *= factor;
}

}  // namespace

extern const AbsorbScores absorb;
const AbsorbScores absorb = absorb_block;

}  // namespace gatefold::GATEFOLD_ISA
