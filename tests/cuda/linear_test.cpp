// grouped_gemm and scaled_mm on the GPU, for every scheme and every way to multiply: against the reference in
// double precision, and against the CPU.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../moe_layer.h"
#include "cuda/moe_gemm.h"
#include "gatefold/codec.h"
#include "gpu_linear.h"

namespace gatefold {
namespace {

using cuda::LinearOptions;
using cuda::LinearPlan;
using cuda::LinearWeights;

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
  /// So many columns, or as many more as groups have to be whole.
  std::int64_t in_groups(std::int64_t columns) const {
    const Granularity group = scheme(id()).weight.group;
    const std::int64_t multiple = group.n == 1 && group.k != 0 ? group.k : 2;
    return (columns + multiple - 1) / multiple * multiple;
  }
  /// Columns that fill no record.
  std::int64_t ragged_k() const { return in_groups(170); }
  /// Groups of rows by every candidate, beside scales of groups in this type where they have 16 bits.
  void check_groups(Format scales) const;
};

void EveryLinear::check_groups(Format scales) const {
  Matrices matrices(id(), 5, 90, ragged_k(), scales);
  const LinearWeights weights = matrices.pack({.act_dtype = dtype()});
  constexpr int kRows = 952;
  const Rows x(dtype(), kRows, ragged_k());
  const Operand activation = activation_of(id(), dtype());
  const bool in_f16 = activation.value == formats::f16;
  const Operand& weight = scheme(id()).weight;
  if (scales != formats::bf16 && !in_f16 && weight.value.bits == 4 && weight.group.k != 0)
    for (QuantizedMatrix& matrix : matrices.all) convert_scales(matrix, formats::bf16);
  const auto rounded = rounds_weights(scheme(id()), activation);
  const double of_scales = in_f16 && scales == formats::f32 ? 0x1p-11 : 0;  // which are rounded to f16
  const std::vector<std::int32_t> all_offsets[] = {
      {0, 1, 1, 4, 170, 180},        {3, 4, 4, 37, 150, 171}, {7, 7, 7, 7, 7, 7},
      {0, 8, 24, 56, 112, 113},      {0, 7, 16, 33, 82, 180}, {0, 125, 257, 398, 550, 658},
      {0, 190, 410, 660, 779, kRows}};
  for (const bool fast : {false, true})
    for (const auto& offsets : all_offsets) {
      if (fast && scheme(id()).activation.value != formats::e4m3) return;
      const std::vector<double> expected = oracle(x, offsets, matrices);
      const std::vector<double> by_rounded =
          rounded ? oracle(x, offsets, matrices, false, rounded) : expected;
      LinearOptions forced = options(kRows);
      forced.fast_accumulation = fast;
      const auto plan = LinearPlan::create(weights.shape(), forced);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      const double allowed = tolerance(x.k) + error_of_sums(scheme(id()), activation, x.k, fast) + of_scales;
      // All tiles of warpgroups sum in the same order, unless only large ones sum fast. (NaN is not equal to
      // itself.)
      const bool of_groups = scheme(id()).weight.value.is_integer() && scheme(id()).weight.group.k != 0;
      std::vector<float> by_warpgroups[2];
      for (const CudaCandidate& candidate : plan->candidates(kRows)) {
        SCOPED_TRACE(describe(candidate.tuning));
        forced.cuda_tuning = candidate.tuning;
        const std::vector<float> y = run(weights, forced, x, offsets);
        const bool warpgroups = candidate.tuning.body == CudaTuning::Body::warpgroups;
        expect_near(y, warpgroups ? by_rounded : expected, rounded ? tolerance(x.k) + of_scales : allowed);
        if (!warpgroups) continue;
        std::vector<float>& first =
            by_warpgroups[fast && of_groups && candidate.tuning.tile_tokens > cuda::kTokensOfTwoUnits];
        if (first.empty()) first = y;
        EXPECT_EQ(std::memcmp(y.data(), first.data(), y.size() * sizeof(float)), 0);
      }
      expect_near(run(*plan, weights, x, offsets), expected, allowed);
    }
}

TEST_P(EveryLinear, GroupsByEveryCandidate) {
  check_groups(formats::bf16);
}

/// Scales of groups in f16, as in AWQ and GPTQ, or in f32, instead of bf16.
TEST_P(EveryLinear, GroupsOfOtherScales) {
  if (scheme(id()).weight.scale != formats::bf16) return;
  check_groups(formats::f16);
  check_groups(formats::f32);
}

/// Inputs that are larger or smaller by a power of two: so are results, exactly. (Inputs are scaled where
/// weights are in e4m3.)
TEST_P(EveryLinear, PowersOfTwo) {
  if (dtype() != DType::bf16 || scheme(id()).activation.quantized()) return;
  const Matrices matrices(id(), 1, 90, ragged_k());
  const LinearWeights weights = matrices.pack({.act_dtype = dtype()});
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
  const LinearWeights weights = matrices.pack({.act_dtype = dtype()});
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
  expect_near(run(matrices.pack(options(50)), options(50), x, offsets), oracle(x, offsets, matrices),
              allowed(x));
}

/// Rows that are quantized already give the bits of rows that are rounded to the same codes; whatever the
/// weights' static scales are. (Where one scale is that of a tensor, a group's numbers are one.)
TEST_P(EveryLinear, QuantizedRows) {
  const Operand& activation = scheme(id()).activation;
  if (!activation.quantized()) return;
  const bool whole = activation.group.n == 0;
  const std::vector<std::int32_t> offsets =
      whole ? std::vector<std::int32_t>{0, 0, 150, 150} : std::vector<std::int32_t>{3, 4, 37, 150};
  // Rows of 16 bytes, or not; and columns that fill records, or not.
  for (const std::int64_t k : {ragged_k(), in_groups(1440), std::int64_t{1536}}) {
    Matrices matrices(id(), 3, 90, k);
    const Rows x(dtype(), 150, k);
    const auto codes = quantize_activation(id(), {x.codes.data(), x.dtype, x.count, k});
    ASSERT_TRUE(codes.ok()) << codes.status().message();
    const LinearWeights weights = matrices.pack({.act_dtype = dtype()});
    LinearOptions forced = options(150);
    const auto plan = LinearPlan::create(weights.shape(), forced);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    for (const CudaCandidate& candidate : plan->candidates(150)) {
      SCOPED_TRACE(describe(candidate.tuning));
      forced.cuda_tuning = candidate.tuning;
      const std::vector<float> expected = run(weights, forced, x, offsets);
      EXPECT_EQ(std::memcmp(run(weights, forced, *codes, offsets).data(), expected.data(),
                            expected.size() * sizeof(float)),
                0);
    }
    if (!activation.may_be_static()) continue;
    const std::vector<float> expected = run(weights, options(150), *codes, offsets);
    for (QuantizedMatrix& matrix : matrices.all) matrix.input_scale = TensorScale{3, false};
    EXPECT_EQ(std::memcmp(run(matrices.pack(options(150)), options(150), *codes, offsets).data(),
                          expected.data(), expected.size() * sizeof(float)),
              0);
  }
}

/// The same of one matrix by all rows, which may be copied by whole items, and whose columns by parts.
TEST_P(EveryLinear, QuantizedRowsOfOneMatrix) {
  if (!scheme(id()).quantizes_activations()) return;
  const std::int64_t k = in_groups(1440);
  const LinearWeights weights = Matrices(id(), 1, 300, k).pack({.act_dtype = dtype()});
  for (const int rows : {1, 12, 40, 300}) {
    const Rows x(dtype(), rows, k);
    const auto codes = quantize_activation(id(), {x.codes.data(), x.dtype, x.count, k});
    ASSERT_TRUE(codes.ok()) << codes.status().message();
    LinearOptions forced = options(rows);
    const auto plan = LinearPlan::create(weights.shape(), forced);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    for (const CudaCandidate& candidate : plan->candidates(rows)) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << describe(candidate.tuning));
      forced.cuda_tuning = candidate.tuning;
      EXPECT_EQ(run(weights, forced, *codes, {}), run(weights, forced, x, {}));
    }
  }
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
  const LinearWeights weights = matrices.pack(weights_only);
  const std::vector<double> expected = oracle(x, {0, 3, 40}, matrices, true);
  const auto plan = LinearPlan::create(weights.shape(), weights_only);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  for (const CudaCandidate& candidate : plan->candidates(40)) {
    SCOPED_TRACE(describe(candidate.tuning));
    weights_only.cuda_tuning = candidate.tuning;
    expect_near(run(weights, weights_only, x, {0, 3, 40}), expected,
                tolerance(x.k) + error_of_sums(alone, inputs, x.k));
  }
}

INSTANTIATE_TEST_SUITE_P(Table, EveryLinear, every_scheme_and_type(), scheme_and_type);

}  // namespace
}  // namespace gatefold
