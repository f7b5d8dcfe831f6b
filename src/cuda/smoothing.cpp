#include "cuda/smoothing.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "cuda/expert_kernels.h"
#include "quantize/layer_quantizer.h"
#include "quantize/smoothing.h"

namespace gatefold::cuda {

Result<std::vector<float>> Smoothing::search(Blas& blas, Gptq& gptq, bool maxima, bool powers_of_two,
                                             const float* x, std::int64_t rows, const float* matrices,
                                             int count, std::int64_t n, std::int64_t k) {
  if (rows == 0) return std::vector<float>(static_cast<std::size_t>(k), 1.0f);
  constexpr std::int64_t number = sizeof(float);
  for (const auto& [buffer, bytes] : {std::pair{&factors_, k * number},
                                      {&magnitudes_, (count + 1) * k * number},
                                      {&rounded_, rows * k * number},
                                      {&scaled_, n * k * number},
                                      {&wanted_, count * rows * n * number},
                                      {&product_, rows * n * number},
                                      {&losses_, count * rows * 2 * number}})
    if (Status status = buffer->reserve(static_cast<std::size_t>(bytes), device_); !status.ok())
      return status;
  float *rounded = rounded_.as<float>(), *scaled = scaled_.as<float>(), *product = product_.as<float>();
  const auto multiply = [&](const float* in, const float* w, float* y) {
    blas.multiply(rows, n, k, 1, {in, k}, {w, k, true}, 0, y, n);
  };

  std::vector<float> found(static_cast<std::size_t>((count + 1) * k));
  column_magnitudes(x, rows, k, maxima, magnitudes_.as<float>(), native(stream_));
  for (int i = 0; i < count; ++i) {
    column_magnitudes(matrices + i * n * k, n, k, maxima, magnitudes_.as<float>() + (i + 1) * k,
                      native(stream_));
    multiply(x, matrices + i * n * k, wanted_.as<float>() + i * rows * n);
  }
  Status failure = copy(found.data(), magnitudes_.as<float>(), found.size() * sizeof(float), stream_);
  if (!failure.ok()) return failure;
  for (float& magnitude : found) magnitude = std::max(magnitude, 1e-6f);
  const std::vector<float> a(found.begin(), found.begin() + k);
  std::vector<float> w(a.size(), 0.0f);
  for (std::size_t i = a.size(); i < found.size(); ++i) {
    float& whole = w[i % a.size()];
    whole = maxima ? std::max(whole, found[i]) : whole + found[i] / static_cast<float>(count);
  }

  std::vector<double> losses(static_cast<std::size_t>(count * rows));
  const auto launch = [&](const std::vector<float>& s) -> Status {
    const float* factors = factors_.as<float>();
    if (Status status = copy(factors_.as<float>(), s.data(), s.size() * sizeof(float), stream_); !status.ok())
      return status;
    scale_columns(factors, true, rows, k, x, rounded, native(stream_));
    if (Status status = rounder_.round({}, rows, k, rounded); !status.ok()) return status;
    for (int i = 0; i < count; ++i) {
      scale_columns(factors, false, n, k, matrices + i * n * k, scaled, native(stream_));
      if (Status status = gptq.nearest(1, n, k, scaled, nullptr, scaled, nullptr); !status.ok())
        return status;
      multiply(rounded, scaled, product);
      row_losses(product, wanted_.as<float>() + i * rows * n, rows, n, losses_.as<double>() + i * rows,
                 native(stream_));
    }
    if (Status status = check_launch("search scales"); !status.ok()) return status;
    if (!blas.status().ok()) return blas.status();
    return copy(losses.data(), losses_.as<double>(), losses.size() * sizeof(double), stream_);
  };
  auto best = least_smoothing(a, w, maxima, powers_of_two, [&](const std::vector<float>& s) {
    if (failure.ok()) failure = launch(s);
    return failure.ok() ? std::accumulate(losses.begin(), losses.end(), 0.0)
                        : std::numeric_limits<double>::infinity();
  });
  if (!failure.ok()) return failure;
  return best;
}

}  // namespace gatefold::cuda

namespace gatefold {

Result<std::vector<float>> cuda_search_smoothing(SchemeId id, bool maxima, bool powers_of_two,
                                                 const Sample& sample,
                                                 std::span<const std::vector<float>> matrices, int device) {
  const cuda::DeviceGuard guard(device);
  auto blas = cuda::Blas::create(device, nullptr);
  if (!blas) return blas.status();
  const std::size_t each = matrices.front().size() * sizeof(float),
                    sample_bytes = sample.x.size() * sizeof(float);
  cuda::Buffer x, all;
  if (Status status = x.reserve(sample_bytes, device); !status.ok()) return status;
  if (Status status = all.reserve(matrices.size() * each, device); !status.ok()) return status;
  if (Status status = cuda::copy(x.as<void>(), sample.x.data(), sample_bytes); !status.ok()) return status;
  for (std::size_t i = 0; i < matrices.size(); ++i)
    if (Status status = cuda::copy(all.as<std::byte>() + i * each, matrices[i].data(), each); !status.ok())
      return status;
  cuda::Gptq gptq(id, device, nullptr);
  return cuda::Smoothing(id, device, nullptr)
      .search(*blas, gptq, maxima, powers_of_two, x.as<float>(), sample.rows, all.as<float>(),
              static_cast<int>(matrices.size()),
              static_cast<std::int64_t>(matrices.front().size()) / sample.k, sample.k);
}

}  // namespace gatefold
