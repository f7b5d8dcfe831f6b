// grouped_gemm and scaled_mm on the GPU, for every scheme and every way to multiply: against the reference in
// double precision, and against the CPU.
#include "gatefold/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../moe_layer.h"
#include "cuda/measure.h"
#include "gatefold/codec.h"
#include "gatefold/cuda_linear.h"
#include "gpu.h"
#include "linear_matrices.h"

namespace gatefold {
namespace {

using cuda::LinearInputs;
using cuda::LinearOptions;
using cuda::LinearPlan;
using cuda::LinearWeights;

/// Of f32 sums of k terms, beside the norm of all.
double tolerance(std::int64_t k) {
  return 4 * std::sqrt(static_cast<double>(k)) * std::exp2(-23);
}

/// The norm of all differences over that of what is expected.
double relative_error(const std::vector<float>& y, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    error += (y[i] - expected[i]) * (y[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

/// Numbers that the oracle does not have must not have been written.
void expect_near(const std::vector<float>& y, const std::vector<double>& expected, double allowed) {
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
  static std::vector<float> run(const LinearWeights& weights, const LinearOptions& options, const Rows& x,
                                const std::vector<std::int32_t>& offsets) {
    const auto plan = LinearPlan::create(weights.shape(), options);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan) return {};
    return run(*plan, weights, x, offsets);
  }
  static std::vector<float> run(const LinearPlan& plan, const LinearWeights& weights, const Rows& x,
                                const std::vector<std::int32_t>& offsets) {
    const DeviceVector<std::uint16_t> rows(x.codes);
    const DeviceVector<std::int32_t> device_offsets(offsets);
    const std::int64_t n = weights.shape().n;
    const DeviceVector<float> y(static_cast<std::size_t>(x.count * n));
    const DeviceVector<std::byte> workspace(plan.workspace_bytes());
    const LinearInputs inputs{.x = {rows.data(), x.dtype, x.count, x.k},
                              .offsets = offsets.empty() ? nullptr : device_offsets.data()};
    const MutableMatrixView out{y.data(), DType::f32, x.count, n};
    const std::span<std::byte> memory(workspace.data(), workspace.size());
    const Status status = offsets.empty() ? plan.scaled_mm(weights, inputs, out, memory)
                                          : plan.grouped_gemm(weights, inputs, out, memory);
    EXPECT_TRUE(status.ok()) << status.message();
    return y.host();
  }
};

class EveryLinear : public GpuLinear, public testing::WithParamInterface<SchemeAndType> {
 protected:
  SchemeId id() const { return static_cast<SchemeId>(std::get<0>(GetParam())); }
  DType dtype() const { return std::get<1>(GetParam()); }
  LinearOptions options(int max_rows) const {
    return {.max_rows = max_rows, .act_dtype = dtype(), .debug_workspace = true};
  }
  double allowed(const Rows& x, bool fast = false) const {
    return tolerance(x.k) + error_of_sums(scheme(id()), activation_of(id(), dtype()), x.k, fast);
  }
  /// Columns that fill no record.
  std::int64_t ragged_k() const {
    const Granularity group = scheme(id()).weight.group;
    const std::int64_t multiple = group.n == 1 && group.k != 0 ? group.k : 2;
    return (170 + multiple - 1) / multiple * multiple;
  }
};

TEST_P(EveryLinear, GroupsByEveryCandidate) {
  const Matrices matrices(id(), 5, 90, ragged_k());
  const LinearWeights weights = matrices.pack();
  const Rows x(dtype(), 180, ragged_k());
  const std::vector<std::int32_t> all_offsets[] = {{0, 1, 1, 4, 170, 180},
                                                   {3, 4, 4, 37, 150, 171},
                                                   {7, 7, 7, 7, 7, 7},
                                                   {0, 8, 24, 56, 112, 113},
                                                   {0, 7, 16, 33, 82, 180}};
  for (const bool fast : {false, true})
    for (const auto& offsets : all_offsets) {
      if (fast && scheme(id()).activation.value != formats::e4m3) return;
      const std::vector<double> expected = oracle(x, offsets, matrices);
      const bool rounds = rounds_weights(scheme(id()), activation_of(id(), dtype()));
      const std::vector<double> by_rounded = rounds ? oracle(x, offsets, matrices, false, true) : expected;
      LinearOptions forced = options(180);
      forced.fast_accumulation = fast;
      const auto plan = LinearPlan::create(weights.shape(), forced);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      std::vector<float> by_warpgroups;
      for (const CudaCandidate& candidate : plan->candidates(180)) {
        SCOPED_TRACE(describe(candidate.tuning));
        forced.cuda_tuning = candidate.tuning;
        const std::vector<float> y = run(weights, forced, x, offsets);
        const bool warpgroups = candidate.tuning.body == CudaTuning::Body::warpgroups;
        expect_near(y, warpgroups ? by_rounded : expected, rounds ? tolerance(x.k) : allowed(x, fast));
        // All tiles of warpgroups sum in the same order. (NaN is not equal to itself.)
        if (!warpgroups) continue;
        if (by_warpgroups.empty()) by_warpgroups = y;
        EXPECT_EQ(std::memcmp(y.data(), by_warpgroups.data(), y.size() * sizeof(float)), 0);
      }
      expect_near(run(*plan, weights, x, offsets), expected, allowed(x, fast));
    }
}

/// Inputs that are larger or smaller by a power of two: so are results, exactly. (Inputs are scaled where
/// weights are in e4m3.)
TEST_P(EveryLinear, PowersOfTwo) {
  if (dtype() != DType::bf16 || scheme(id()).activation.quantized()) return;
  const Matrices matrices(id(), 1, 90, ragged_k());
  const LinearWeights weights = matrices.pack();
  const Rows x(dtype(), 70, ragged_k());
  LinearOptions forced = options(70);
  const auto plan = LinearPlan::create(weights.shape(), forced);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  for (const CudaCandidate& candidate : plan->candidates(70)) {
    SCOPED_TRACE(describe(candidate.tuning));
    forced.cuda_tuning = candidate.tuning;
    const std::vector<float> y = run(weights, forced, x, {});
    for (const int power : {-30, 40}) {
      Rows scaled = x;
      for (std::uint16_t& code : scaled.codes)
        if ((code & 0x7fff) != 0) code = static_cast<std::uint16_t>(code + power * 128);
      const std::vector<float> scaled_y = run(weights, forced, scaled, {});
      for (std::size_t i = 0; i < y.size(); ++i) ASSERT_EQ(scaled_y[i], std::ldexp(y[i], power)) << i;
    }
  }
}

TEST_P(EveryLinear, OneMatrix) {
  const Matrices matrices(id(), 1, 256, 1024);
  const LinearWeights weights = matrices.pack();
  const auto plan = LinearPlan::create(weights.shape(), options(300));
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  for (const int rows : {1, 8, 17, 64, 129, 300}) {
    SCOPED_TRACE(rows);
    const Rows x(dtype(), rows, 1024);
    const std::vector<float> y = run(*plan, weights, x, {});
    expect_near(y, oracle(x, {0, rows}, matrices), allowed(x));
    EXPECT_EQ(run(*plan, weights, x, {}), y) << "another run, other bits";
    if (rows > 64) continue;  // the CPU's, whose 16-bit activations have the same values
    std::vector<float> on_cpu(y.size());
    const std::int64_t offsets[] = {0, rows};
    ASSERT_TRUE(grouped_gemm({x.codes.data(), dtype(), rows, 1024}, offsets, matrices.pointers,
                             {on_cpu.data(), DType::f32, rows, 256})
                    .ok());
    expect_near(y, {on_cpu.begin(), on_cpu.end()}, allowed(x));
  }
}

TEST_P(EveryLinear, StaticActivationScales) {
  const Operand& activation = scheme(id()).activation;
  if (!activation.may_be_static()) return;
  Matrices matrices(id(), 3, 64, 256);
  for (std::size_t g = 0; g < 3; ++g) {
    const float real =
        (activation.tensor_scale.stored() ? 4.0f / 2688 : 4.0f / 448) * static_cast<float>(1 + g);
    matrices.all[g].input_scale =
        activation.tensor_scale.stored() ? TensorScale{1 / real, true} : TensorScale{real, false};
  }
  const Rows x(dtype(), 50, 256);
  const std::vector<std::int32_t> offsets = {0, 20, 21, 50};
  expect_near(run(matrices.pack(), options(50), x, offsets), oracle(x, offsets, matrices), allowed(x));
}

TEST_P(EveryLinear, WeightsOnly) {
  if (!scheme(id()).quantizes_activations()) return;
  const Matrices matrices(id(), 2, 64, 256);
  const Rows x(dtype(), 40, 256);
  LinearOptions weights_only = options(40);
  weights_only.weights_only = true;
  Scheme alone = scheme(id());
  alone.activation = operands::act16;
  const Operand inputs = operands::plain(dtype() == DType::f16 ? formats::f16 : formats::bf16);
  expect_near(run(matrices.pack(), weights_only, x, {0, 3, 40}), oracle(x, {0, 3, 40}, matrices, true),
              tolerance(x.k) + error_of_sums(alone, inputs, x.k));
}

INSTANTIATE_TEST_SUITE_P(Table, EveryLinear, every_scheme_and_type(), scheme_and_type);

// What sums of long rows lose, beside double precision, by each multiply; in fp8 not more than cuBLAS's lose.
TEST_F(GpuLinear, ErrorsOfLongRows) {
  const std::int64_t rows = 520, n = 32, k = 7168;  // too many rows for parts of columns
  const auto by = [&](const LinearWeights& weights, const Rows& x, CudaTuning::Body body) {
    const auto plan = LinearPlan::create(weights.shape(), {.max_rows = static_cast<int>(rows)});
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    LinearOptions options{.max_rows = static_cast<int>(rows)};
    for (const CudaCandidate& candidate : plan->candidates(static_cast<int>(rows)))
      if (candidate.tuning.body == body) options.cuda_tuning = candidate.tuning;
    return run(weights, options, x, {});
  };
  const Rows x(DType::bf16, rows, k);
  std::printf("relative errors at k = %ld   by warps  by warpgroups\n", static_cast<long>(k));
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    const auto id = static_cast<SchemeId>(i);
    const Matrices matrices(id, 1, n, k);
    const LinearWeights weights = matrices.pack();
    const std::vector<double> expected = oracle(x, {0, static_cast<std::int32_t>(rows)}, matrices);
    const double warps = relative_error(by(weights, x, CudaTuning::Body::warps), expected);
    const double warpgroups = relative_error(by(weights, x, CudaTuning::Body::warpgroups), expected);
    std::printf("%-28s%12.1e%15.1e\n", std::string(scheme(id).name).c_str(), warps, warpgroups);
    EXPECT_LE(warps, tolerance(k)) << scheme(id).name;
    EXPECT_LE(warpgroups, tolerance(k) + of_sums(id, k)) << scheme(id).name;
  }

  Matrices matrices(SchemeId::fp8_tensor_afp8, 1, n, k);
  matrices.all[0].input_scale = TensorScale{1, false};
  std::vector<std::byte> codes;
  for (const float value : x.values) codes.push_back(static_cast<std::byte>(encode<formats::e4m3>(value)));
  auto theirs = cuda::dense_product(codes, matrices.all[0].values, rows, n, k, 0);
  if (!theirs) {
    std::printf("not compared with cuBLAS: %s\n", theirs.status().message().c_str());
    return;
  }
  const std::vector<double> expected = oracle(x, {0, static_cast<std::int32_t>(rows)}, matrices);
  float scale = 0;
  std::memcpy(&scale, matrices.all[0].scales.data(), sizeof(scale));
  std::vector<double> unscaled(expected);
  for (double& value : unscaled) value /= scale;
  const double cublas = relative_error(*theirs, unscaled);
  const double ours = relative_error(by(matrices.pack(), x, CudaTuning::Body::warpgroups), expected);
  std::printf("e4m3 codes: cuBLAS %.2e, by warpgroups %.2e\n", cublas, ours);
  EXPECT_LE(ours, 1.03 * cublas);
}

// Types of y are roundings of the same sums; a bias is added before. Rows of y are stored by 16 bytes, or
// not.
TEST_F(GpuLinear, OutputTypesAndBias) {
  const std::int64_t k = 256;
  const std::vector<std::int32_t> offsets = {0, 130, 131, 160};
  const DeviceVector<std::int32_t> device_offsets(offsets);
  const Rows x(DType::bf16, 160, k);
  const DeviceVector<std::uint16_t> rows(x.codes);
  using Body = CudaTuning::Body;
  const std::pair<SchemeId, CudaTuning> kernels[] = {{SchemeId::int4_g128, {Body::warps, 8}},
                                                     {SchemeId::int4_g128, {Body::warpgroups, 64}},
                                                     {SchemeId::fp8_block_afp8, {Body::warpgroups, 64}},
                                                     {SchemeId::fp8_block_afp8, {Body::warpgroups, 128}},
                                                     {SchemeId::fp8_block_afp8, {Body::warpgroups, 192}}};
  for (const auto& [id, tuning] : kernels)
    for (const std::int64_t n : {200, 202, 203}) {
      SCOPED_TRACE(testing::Message() << scheme(id).name << ", " << describe(tuning) << ", " << n << " rows");
      const Matrices matrices(id, 3, n, k);
      const LinearWeights weights = matrices.pack();
      const std::vector<float> bias = random_values(static_cast<std::size_t>(3 * n), 9);
      const DeviceVector<float> device_bias(bias);
      const LinearOptions options{.max_rows = 160, .debug_workspace = true, .cuda_tuning = tuning};
      const auto plan = LinearPlan::create(weights.shape(), options);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      const DeviceVector<std::byte> workspace(plan->workspace_bytes());
      const auto run_to = [&](void* y, DType dtype) {
        const Status status = plan->grouped_gemm(weights,
                                                 {.x = {rows.data(), DType::bf16, 160, k},
                                                  .offsets = device_offsets.data(),
                                                  .bias = device_bias.data()},
                                                 {y, dtype, 160, n}, {workspace.data(), workspace.size()});
        ASSERT_TRUE(status.ok()) << status.message();
      };
      const DeviceVector<float> y(static_cast<std::size_t>(160 * n));
      const DeviceVector<std::uint16_t> y_bf16(y.size()), y_f16(y.size());
      run_to(y.data(), DType::f32);
      run_to(y_bf16.data(), DType::bf16);
      run_to(y_f16.data(), DType::f16);
      const std::vector<float> sums = y.host();
      const auto bf16 = y_bf16.host(), f16 = y_f16.host();
      for (std::size_t i = 0; i < sums.size(); ++i) {
        ASSERT_EQ(bf16[i], encode<formats::bf16>(sums[i])) << i;
        ASSERT_EQ(f16[i], encode<formats::f16>(sums[i])) << i;
      }
      std::vector<double> expected = oracle(x, offsets, matrices);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const auto row = static_cast<std::int32_t>(i / static_cast<std::size_t>(n));
        const std::size_t group = row < 130 ? 0 : row < 131 ? 1 : 2;
        expected[i] += bias[group * static_cast<std::size_t>(n) + i % static_cast<std::size_t>(n)];
      }
      expect_near(sums, expected, tolerance(k) + of_sums(id, k));
    }
}

// Columns are cut into parts where there are few rows; a bias is added once.
TEST_F(GpuLinear, PartsAndBias) {
  const std::int64_t n = 200, k = 2048;
  const std::vector<float> bias = random_values(static_cast<std::size_t>(n), 9);
  const DeviceVector<float> device_bias(bias);
  for (const SchemeId id : {SchemeId::int4_g128, SchemeId::mxfp4, SchemeId::fp8_block_afp8}) {
    const Matrices matrices(id, 1, n, k);
    const LinearWeights weights = matrices.pack();
    const auto plan = LinearPlan::create(weights.shape(), {.max_rows = 70, .debug_workspace = true});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const DeviceVector<std::byte> workspace(plan->workspace_bytes());
    for (const std::int32_t count : {3, 5, 8, 16, 33, 70}) {
      SCOPED_TRACE(count);
      const Rows x(DType::bf16, count, k);
      const DeviceVector<std::uint16_t> rows(x.codes);
      const DeviceVector<float> y(static_cast<std::size_t>(count * n));
      const Status status =
          plan->scaled_mm(weights, {.x = {rows.data(), DType::bf16, count, k}, .bias = device_bias.data()},
                          {y.data(), DType::f32, count, n}, {workspace.data(), workspace.size()});
      ASSERT_TRUE(status.ok()) << status.message();
      std::vector<double> expected = oracle(x, {0, count}, matrices);
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += bias[i % static_cast<std::size_t>(n)];
      expect_near(y.host(), expected, tolerance(k) + of_sums(id, k));
    }
  }
}

// A row alone has the bits that it has among others, in any group size.
TEST_F(GpuLinear, BatchInvariant) {
  for (const SchemeId id : {SchemeId::int4_g128, SchemeId::mxfp4, SchemeId::mxfp4_afp8,
                            SchemeId::fp8_block_afp8, SchemeId::int8_aint8}) {
    const Matrices matrices(id, 2, 192, 384);
    const LinearWeights weights = matrices.pack();
    const LinearOptions options{.max_rows = 200, .batch_invariant = true};
    const Rows x(DType::bf16, 200, 384);
    const std::vector<float> together = run(weights, options, x, {0, 150, 200});
    for (const int row : {0, 1, 77, 149, 150, 199}) {
      Rows alone(DType::bf16, 1, 384);
      alone.codes.assign(x.codes.begin() + row * 384, x.codes.begin() + (row + 1) * 384);
      const std::vector<float> y =
          run(weights, options, alone,
              row < 150 ? std::vector<std::int32_t>{0, 1, 1} : std::vector<std::int32_t>{0, 0, 1});
      EXPECT_TRUE(std::equal(y.begin(), y.end(), together.begin() + row * 192))
          << scheme(id).name << " " << row;
    }
  }
}

// More matrices than are sorted by their rows.
TEST_F(GpuLinear, ManyMatrices) {
  const std::int64_t count = 1100, n = 32, k = 128, rows = 200;
  const Matrices matrices(SchemeId::int4_g128, static_cast<std::size_t>(count), n, k);
  std::vector<std::int32_t> offsets;
  for (std::int64_t g = 0; g <= count; ++g)
    offsets.push_back(static_cast<std::int32_t>(g < 1000 ? g / 10 : 100 + g - 1000));
  const Rows x(DType::bf16, rows, k);
  for (const bool batch_invariant : {false, true})
    expect_near(run(matrices.pack(), {.max_rows = 200, .batch_invariant = batch_invariant}, x, offsets),
                oracle(x, offsets, matrices), tolerance(k) + of_sums(SchemeId::int4_g128, k));
}

// A captured call, replayed with other rows and offsets in the same memory.
TEST_F(GpuLinear, GraphReplay) {
  const std::int64_t n = 128, k = 256;
  const Matrices matrices(SchemeId::fp8_tensor_afp8, 4, n, k);
  const LinearWeights weights = matrices.pack();
  const auto plan = LinearPlan::create(weights.shape(), {.max_rows = 70});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const DeviceVector<std::byte> workspace(plan->workspace_bytes());
  const DeviceVector<std::uint16_t> rows(static_cast<std::size_t>(70 * k));
  const DeviceVector<std::int32_t> offsets(5);
  const DeviceVector<float> y(static_cast<std::size_t>(70 * n));
  const auto graph = cuda::Graph::record([&](cuda::Stream stream) {
    return plan->grouped_gemm(weights, {.x = {rows.data(), DType::bf16, 70, k}, .offsets = offsets.data()},
                              {y.data(), DType::f32, 70, n}, {workspace.data(), workspace.size()}, stream);
  });
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  for (unsigned seed = 1; seed < 4; ++seed) {
    const std::vector<std::int32_t> now = seed == 1   ? std::vector<std::int32_t>{0, 10, 20, 30, 70}
                                          : seed == 2 ? std::vector<std::int32_t>{0, 0, 70, 70, 70}
                                                      : std::vector<std::int32_t>{5, 6, 40, 69, 69};
    const Rows x(DType::bf16, 70, k, seed);
    ASSERT_TRUE(cuda::copy(rows.data(), x.codes.data(), x.codes.size() * 2).ok());
    ASSERT_TRUE(cuda::copy(offsets.data(), now.data(), now.size() * 4).ok());
    ASSERT_TRUE(cuda::fill(y.data(), 0xFF, y.size() * 4).ok());
    ASSERT_TRUE(graph->launch().ok());
    expect_near(y.host(), oracle(x, now, matrices), tolerance(k) + of_sums(SchemeId::fp8_tensor_afp8, k));
  }
}

TEST_F(GpuLinear, BadCalls) {
  const Matrices matrices(SchemeId::mxfp4, 2, 64, 128), other(SchemeId::mxfp4, 1, 64, 256);
  const LinearWeights weights = matrices.pack();
  const auto plan = LinearPlan::create(weights.shape(), {.max_rows = 8});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const DeviceVector<std::byte> memory(plan->workspace_bytes());
  const DeviceVector<float> x(8 * 128), y(8 * 64 + 1);
  const DeviceVector<std::int32_t> offsets(std::vector<std::int32_t>{0, 4, 8});
  struct Call {
    std::int64_t rows = 8, k = 128, n = 64;
    DType dtype = DType::f32;
    bool grouped = true;
    std::size_t bytes_less = 0;
    int shift = 0;
  };
  const auto message = [&](const LinearWeights& w, const Call& call) {
    return plan
        ->grouped_gemm(w,
                       {.x = {x.data(), call.dtype, call.rows, call.k},
                        .offsets = call.grouped ? offsets.data() : nullptr},
                       {y.data() + call.shift, DType::f32, call.rows, call.n},
                       {memory.data(), memory.size() - call.bytes_less})
        .message();
  };
  const auto expect_says = [&](const Call& call, const char* what) {
    EXPECT_NE(message(weights, call).find(what), std::string::npos) << message(weights, call);
  };
  EXPECT_EQ(message(weights, {}), "");
  EXPECT_EQ(message(weights, {.rows = 0}), "");
  expect_says({.rows = 9}, "9 rows");
  expect_says({.k = 64}, "[8, 64]");
  expect_says({.n = 65}, "[8, 65]");
  expect_says({.dtype = DType::i8}, "I8");
  expect_says({.grouped = false}, "offsets");
  expect_says({.bytes_less = 1}, "workspace");
  expect_says({.shift = 1}, "aligned");
  EXPECT_NE(message(other.pack(), {}).find("[64, 256]"), std::string::npos);
  const QuantizedMatrix* different[] = {matrices.pointers[0], other.pointers[0]};
  EXPECT_NE(LinearWeights::pack(different).status().message().find("matrix 1"), std::string::npos);
  EXPECT_FALSE(LinearWeights::pack({}).ok());
  EXPECT_FALSE(LinearPlan::create(weights.shape(), {.max_rows = 0}).ok());
  EXPECT_FALSE(LinearPlan::create(weights.shape(), {.act_dtype = DType::f32}).ok());
  LinearOptions forced;
  forced.cuda_tuning = CudaTuning{CudaTuning::Body::warps, 12};
  EXPECT_NE(LinearPlan::create(weights.shape(), forced).status().message().find("warps, 16 tokens"),
            std::string::npos);
  EXPECT_NE(
      LinearPlan::create({SchemeId::bf16, 1, 64, 64}, {.act_dtype = DType::f16, .batch_invariant = true})
          .status()
          .message()
          .find("one order"),
      std::string::npos);
}

}  // namespace
}  // namespace gatefold
