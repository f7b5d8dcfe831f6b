#pragma once
// Calls of grouped_gemm and scaled_mm on a GPU, and how far their results may be off.

#include <cmath>
#include <vector>

#include "format/code_rows.h"
#include "gatefold/cuda_linear.h"
#include "gatefold/linear.h"
#include "gpu.h"
#include "linear_matrices.h"

namespace gatefold {

/// Of f32 sums of k terms, beside the norm of all.
inline double tolerance(std::int64_t k) {
  return 4 * std::sqrt(static_cast<double>(k)) * std::exp2(-23);
}

/// Numbers that the oracle does not have must not have been written.
inline void expect_near(const std::vector<float>& y, const std::vector<double>& expected, double allowed) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    ASSERT_EQ(std::isnan(y[i]), std::isnan(expected[i])) << i;
    if (std::isnan(expected[i])) continue;
    error += (y[i] - expected[i]) * (y[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  EXPECT_LE(std::sqrt(error), allowed * std::sqrt(norm));
}

class GpuLinear : public GpuTest {
 protected:
  static Operand activation_of(SchemeId id, DType dtype = DType::bf16) {
    if (scheme(id).quantizes_activations()) return scheme(id).activation;
    return operands::plain(dtype == DType::f16 ? formats::f16 : formats::bf16);
  }
  static double of_sums(SchemeId id, std::int64_t k, DType dtype = DType::bf16) {
    return error_of_sums(scheme(id), activation_of(id, dtype), k);
  }
  /// f32 results; every byte of y is 0xFF (NaN) before.
  static std::vector<float> run(const cuda::LinearWeights& weights, const cuda::LinearOptions& options,
                                const Rows& x, const std::vector<std::int32_t>& offsets) {
    const auto plan = cuda::LinearPlan::create(weights.shape(), options);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan) return {};
    return run(*plan, weights, x, offsets);
  }
  static std::vector<float> run(const cuda::LinearPlan& plan, const cuda::LinearWeights& weights,
                                const Rows& x, const std::vector<std::int32_t>& offsets) {
    const DeviceVector<std::uint16_t> rows(x.codes);
    return call(plan, weights, {.x = {rows.data(), x.dtype, x.count, x.k}}, offsets);
  }
  /// The same of rows that are quantized already.
  static std::vector<float> run(const cuda::LinearWeights& weights, const cuda::LinearOptions& options,
                                const QuantizedActivation& x, const std::vector<std::int32_t>& offsets) {
    const auto plan = cuda::LinearPlan::create(weights.shape(), options);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan) return {};
    const DeviceVector<std::byte> codes(x.values), scales(x.scales);
    const DeviceVector<float> token_scales(x.token_scales);
    const DType dtype = dtype_of_codes(scheme(x.scheme).activation.value);
    return call(*plan, weights,
                {.x = {codes.data(), dtype, x.rows, x.k},
                 .scales = scales.data(),
                 .token_scales = token_scales.data()},
                offsets);
  }

 private:
  static std::vector<float> call(const cuda::LinearPlan& plan, const cuda::LinearWeights& weights,
                                 cuda::LinearInputs inputs, const std::vector<std::int32_t>& offsets) {
    const DeviceVector<std::int32_t> device_offsets(offsets);
    if (!offsets.empty()) inputs.offsets = device_offsets.data();
    const std::int64_t n = weights.shape().n;
    const DeviceVector<float> y(static_cast<std::size_t>(inputs.x.rows * n));
    const DeviceVector<std::byte> workspace(plan.workspace_bytes());
    const MutableMatrixView out{y.data(), DType::f32, inputs.x.rows, n};
    const std::span<std::byte> memory(workspace.data(), workspace.size());
    const Status status = offsets.empty() ? plan.scaled_mm(weights, inputs, out, memory)
                                          : plan.grouped_gemm(weights, inputs, out, memory);
    EXPECT_TRUE(status.ok()) << status.message();
    return y.host();
  }
};

}  // namespace gatefold
