#include "quantize/smoothing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace gatefold {
namespace {

using Floats = std::vector<float>;

/// a^p / w^q, with the geometric mean 1.
Floats candidate(const Floats& a, const Floats& w, double p, double q, bool powers_of_two) {
  std::vector<double> logarithms(a.size());
  double mean = 0;
  for (std::size_t j = 0; j < a.size(); ++j) {
    logarithms[j] = p * std::log2(a[j]) - q * std::log2(w[j]);
    mean += logarithms[j] / static_cast<double>(a.size());
  }
  Floats s(a.size());
  for (std::size_t j = 0; j < a.size(); ++j) {
    const double exponent = std::clamp(logarithms[j] - mean, -12.0, 12.0);
    s[j] = static_cast<float>(std::exp2(powers_of_two ? std::round(exponent) : exponent));
  }
  return s;
}

}  // namespace

Sample sample_of(const Floats& x, std::int64_t k) {
  const auto rows = static_cast<std::int64_t>(x.size()) / k;
  std::vector<std::int64_t> chosen(static_cast<std::size_t>(rows));
  std::iota(chosen.begin(), chosen.end(), 0);
  if (rows > sample_rows) {
    Floats largest(chosen.size(), 0.0f);
    for (std::int64_t i = 0; i < rows * k; ++i) largest[i / k] = std::max(largest[i / k], std::fabs(x[i]));
    const auto extremes = chosen.begin() + sample_rows / 16;
    std::partial_sort(chosen.begin(), extremes, chosen.end(), [&](std::int64_t a, std::int64_t b) {
      return largest[a] != largest[b] ? largest[a] > largest[b] : a < b;
    });
    chosen.erase(extremes, chosen.end());
    for (std::int64_t i = 0; i < sample_rows; ++i) chosen.push_back(i * rows / sample_rows);
  }
  Sample sample{{}, static_cast<std::int64_t>(chosen.size()), k};
  for (const std::int64_t row : chosen)
    sample.x.insert(sample.x.end(), x.begin() + row * k, x.begin() + (row + 1) * k);
  return sample;
}

std::vector<float> least_smoothing(const Floats& a, const Floats& w, bool maxima, bool powers_of_two,
                                   const std::function<double(const Floats& s)>& loss) {
  Floats best(a.size(), 1.0f);
  double least = loss(best);
  for (int step = 0; step <= 10; ++step)
    for (const bool with_weights : {false, true}) {
      const double p = step / 10.0, q = with_weights ? 1 - p : 0;
      if ((maxima && !with_weights) || (p == 0 && q == 0)) continue;
      Floats s = candidate(a, w, p, q, powers_of_two);
      const double found = loss(s);
      if (found < least) {
        least = found;
        best = std::move(s);
      }
    }
  return best;
}

}  // namespace gatefold
