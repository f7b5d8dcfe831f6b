// Calls of grouped_gemm and scaled_mm on the GPU: what sums lose, types of results, many rows and matrices,
// graphs, and bad calls.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../moe_layer.h"
#include "cuda/measure.h"
#include "gatefold/codec.h"
#include "gpu_linear.h"

namespace gatefold {
namespace {

using cuda::LinearOptions;
using cuda::LinearPlan;
using cuda::LinearWeights;

/// The norm of all differences over that of what is expected.
double relative_error(const std::vector<float>& y, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    error += (y[i] - expected[i]) * (y[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

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

// One scale for all rows of a group, of which there are so many that a kernel finds it first.
TEST_F(GpuLinear, OneScaleOfManyRows) {
  const Rows x(DType::bf16, 5000, 256);
  for (const auto& offsets : {std::vector<std::int32_t>{0, 5000}, {3, 3, 2500, 4700}}) {
    const Matrices matrices(SchemeId::fp8_tensor_afp8, offsets.size() - 1, 32, 256);
    expect_near(run(matrices.pack(), {.max_rows = 5000, .debug_workspace = true}, x, offsets),
                oracle(x, offsets, matrices), tolerance(x.k) + of_sums(SchemeId::fp8_tensor_afp8, x.k));
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

// Codes without all of their scales, of another type, or where there are none.
TEST_F(GpuLinear, BadCodes) {
  const DeviceVector<std::byte> memory(std::size_t{1} << 20);
  const auto message = [&](SchemeId id, DType dtype, std::int64_t k, bool token_scales, bool weights_only) {
    const LinearWeights weights = Matrices(id, 1, 64, k).pack();
    const auto plan = LinearPlan::create(weights.shape(), {.max_rows = 8, .weights_only = weights_only});
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    const DeviceVector<float> y(8 * 64);
    const DeviceVector<std::byte> workspace(plan->workspace_bytes());
    return plan
        ->scaled_mm(weights,
                    {.x = {memory.data(), dtype, 8, k},
                     .scales = memory.data(),
                     .token_scales = token_scales ? reinterpret_cast<const float*>(memory.data()) : nullptr},
                    {y.data(), DType::f32, 8, 64}, {workspace.data(), workspace.size()})
        .message();
  };
  const auto says = [&](const std::string& text, const char* what) {
    EXPECT_NE(text.find(what), std::string::npos) << text;
  };
  EXPECT_EQ(message(SchemeId::fp8_channel_afp8, DType::f8_e4m3, 256, false, false), "");
  EXPECT_EQ(message(SchemeId::int8_aint8, DType::i8, 256, false, false), "");
  EXPECT_EQ(message(SchemeId::nvfp4_anvfp4, DType::f4, 256, true, false), "");
  says(message(SchemeId::fp8_channel_afp8, DType::bf16, 256, false, false), "BF16");
  says(message(SchemeId::fp8_channel_afp8, DType::f8_e5m2, 256, false, false), "F8_E4M3");
  says(message(SchemeId::fp8_channel_afp8, DType::f8_e4m3, 256, false, true), "16 bits");
  says(message(SchemeId::int4_g128, DType::f8_e4m3, 256, false, false), "int4_g128");
  says(message(SchemeId::nvfp4_anvfp4, DType::f4, 256, false, false), "token_scales");
}

/// Group scales of int4 are packed for rows of one type, and other weights for all.
TEST_F(GpuLinear, TypesOfRows) {
  const DType types[] = {DType::bf16, DType::f16};
  for (const auto& [id, own] : {std::pair{SchemeId::int4_g128, true},
                                {SchemeId::int4_g128_afp8, false},
                                {SchemeId::int8_g128, false},
                                {SchemeId::mxfp4, false}}) {
    const Matrices matrices(id, 1, 64, 256);
    for (const DType packed : types)
      for (const DType planned : types) {
        SCOPED_TRACE(testing::Message() << scheme(id).name << ' ' << name(packed) << ' ' << name(planned));
        const LinearWeights weights = matrices.pack({.act_dtype = packed});
        const auto plan = LinearPlan::create(weights.shape(), {.max_rows = 8, .act_dtype = planned});
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        const Rows x(planned, 8, 256);
        const DeviceVector<std::uint16_t> rows(x.codes);
        const DeviceVector<float> y(8 * 64);
        const DeviceVector<std::byte> memory(plan->workspace_bytes());
        const Status status = plan->scaled_mm(weights, {.x = {rows.data(), planned, 8, 256}},
                                              {y.data(), DType::f32, 8, 64}, {memory.data(), memory.size()});
        if (own && packed != planned)
          EXPECT_NE(status.message().find(packed == DType::bf16 ? "scales in bf16" : "scales in f32"),
                    std::string::npos)
              << status.message();
        else
          expect_near(y.host(), oracle(x, {0, 8}, matrices), tolerance(256) + of_sums(id, 256, planned));
      }
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
  EXPECT_NE(LinearWeights::pack(matrices.pointers, {.act_dtype = DType::f32}).status().message().find("F32"),
            std::string::npos);
  EXPECT_FALSE(LinearPlan::create(weights.shape(), {.max_rows = 0}).ok());
  EXPECT_FALSE(LinearPlan::create(weights.shape(), {.act_dtype = DType::f32}).ok());
  LinearOptions forced;
  forced.cuda_tuning = CudaTuning{CudaTuning::Body::warps, 12};
  EXPECT_NE(LinearPlan::create(weights.shape(), forced).status().message().find("warps, 8 tokens"),
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
