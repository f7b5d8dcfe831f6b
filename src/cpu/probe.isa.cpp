#include "cpu/probe.h"

#include "cpu/vec.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

/// Eight streams, so that enough cache lines are on their way; prefetched well ahead.
float read(const float* data, std::int64_t count) {
  constexpr int kStreams = 8;
  const std::int64_t each = count / kStreams;
  Vec sums[kStreams];
  for (Vec& s : sums) s = zero();
  const Vec one = load(data);
  for (std::int64_t i = 0; i < each; i += 16)
    for (int s = 0; s < kStreams; ++s) {
      const float* p = data + s * each + i;
      __builtin_prefetch(p + 512);
      for (int j = 0; j < 16; j += Vec::lanes) sums[s] = multiply_add(load(p + j), one, sums[s]);
    }
  float total = 0;
  for (const Vec& s : sums) total += sum(s);
  return total;
}

double multiply(std::int64_t rounds, float* sink) {
  constexpr int kChains = 12;  // more than latency times issue width, fewer than the registers
  Vec sums[kChains];
  for (Vec& s : sums) s = zero();
  const Vec a = load(sink), b = load(sink + Vec::lanes);
  for (std::int64_t i = 0; i < rounds; ++i)
    for (Vec& s : sums) s = multiply_add(a, b, s);
  float total = 0;
  for (const Vec& s : sums) total += sum(s);
  *sink = total;
  return 2.0 * kChains * Vec::lanes * static_cast<double>(rounds);
}

}  // namespace

extern const Probe probes;
const Probe probes{read, multiply};

}  // namespace gatefold::GATEFOLD_ISA
