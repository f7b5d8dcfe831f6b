// Activations quantized on the GPU have the bytes that the CPU makes of them.
#include "gatefold/cuda_quantize.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "cpu/activation.h"
#include "gpu.h"

namespace gatefold {
namespace {

using Bytes = std::vector<std::byte>;

/// Rows of numbers in 16 or 32 bit; row magnitudes differ by 2^40, and some rows are special.
struct Rows {
  DType dtype;
  std::int64_t rows, k;
  Bytes data;

  MatrixView view(const std::byte* at) const { return {at, dtype, rows, k}; }
  MatrixView view() const { return view(data.data()); }
  std::vector<float> row(std::int64_t r) const {
    std::vector<float> x(static_cast<std::size_t>(k));
    row_kernels().widen(dtype, data.data(), r * k, k, x.data());
    return x;
  }
};

Rows make_rows(DType dtype, std::int64_t rows, std::int64_t k, unsigned seed) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Rows out{dtype, rows, k, Bytes(static_cast<std::size_t>(rows * k) * (bits(dtype) / 8))};
  for (std::int64_t r = 0; r < rows; ++r) {
    const float magnitude =
        std::ldexp(1.0f, static_cast<int>(random() % 40) - (dtype == DType::f16 ? 24 : 20));
    for (std::int64_t i = 0; i < k; ++i) {
      float x = magnitude * normal(random);
      const auto kind = (r + seed) % 16;  // of the row
      if (kind == 3) x = i % 2 == 0 ? 0.0f : -0.0f;
      if (kind == 5 && random() % 50 == 0)
        x = random() % 2 == 0 ? std::nanf("") : (random() % 2 == 0 ? inf : -inf);
      if (kind == 7) x = i % 3 == 0 ? inf : std::nanf("");
      if (kind == 9) x = std::ldexp(normal(random), dtype == DType::f16 ? -22 : -132);
      if (kind == 11) x = std::ldexp(std::copysign(1.0f, normal(random)), static_cast<int>(random() % 8));
      if (kind == 13) x = dtype == DType::f16 ? 60000.0f : std::ldexp(normal(random), 126);
      if (kind == 15 && i % 40 != 0) x = 0;
      with_format(dtype == DType::f32   ? formats::f32
                  : dtype == DType::f16 ? formats::f16
                                        : formats::bf16,
                  [&]<Format F>() {
                    const std::uint32_t code = encode<F>(x);
                    std::memcpy(out.data.data() + (r * k + i) * (F.bits / 8), &code, F.bits / 8);
                  });
    }
  }
  return out;
}

struct Expected {
  Bytes values, scales;
  std::vector<float> token_scales;
  std::vector<float> real_scales;  // what a code of each group is multiplied by
};

/// Row i of the result is row from[i] of x; static_scale[i], if there are any, holds for it.
Expected on_the_cpu(SchemeId id, const Rows& x, const std::vector<std::int64_t>& from,
                    const std::vector<TensorScale>& static_scales) {
  const Operand& operand = scheme(id).activation;
  const auto k = static_cast<std::size_t>(x.k);
  const QuantizedLayout layout = quantized_layout(operand, operand.scale, 1, x.k);
  Bytes codes(2 * k);
  std::vector<GroupRange> ranges(k);
  std::vector<float> scales(k), zeros(k);
  const RowScratch scratch{codes.data(), ranges.data(), scales.data(), zeros.data()};
  float batch_amax = 0;
  for (const std::int64_t r : from)
    batch_amax = std::max(batch_amax, row_amax(row_kernels(), x.row(r).data(), x.k));
  Expected expected;
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::vector<float> row = x.row(from[i]);
    const float amax = row_amax(row_kernels(), row.data(), x.k);
    TensorRange range{{}, batch_amax};
    if (!static_scales.empty()) range.static_scale = static_scales[i];
    code_activations(row_kernels(), operand, range, scratch, row.data(), x.k);
    expected.values.insert(expected.values.end(), codes.begin(), codes.begin() + layout.row_bytes);
    expected.real_scales.insert(expected.real_scales.end(), scales.begin(),
                                scales.begin() + layout.scale_cols);
    if (operand.tensor_scale.stored()) {
      const TensorScale scale = range.static_scale.value_or(TensorScale{tensor_scale(operand, amax), false});
      expected.token_scales.push_back(scale.divides ? 1.0f / scale.value : scale.value);
    }
  }
  return expected;
}

std::uint32_t bits_of(float x) {
  return std::bit_cast<std::uint32_t>(x);
}

constexpr std::size_t kGuard = 64;  // bytes after each output that must stay

struct Case {
  SchemeId id;
  const Rows& x;
  std::vector<std::int32_t> gather = {};  // empty: all rows
  int divisor = 1;
  std::vector<TensorScale> static_scales = {};
  std::vector<std::int32_t> static_index = {};
  std::size_t shift = 0;  // bytes that x is moved from its alignment
};

void same_as_on_the_cpu(const Case& test) {
  const Operand& operand = scheme(test.id).activation;
  const Rows& x = test.x;
  SCOPED_TRACE(testing::Message() << describe(operand, false) << " of " << name(x.dtype) << " [" << x.rows
                                  << ", " << x.k << "]");
  std::vector<std::int64_t> from;
  if (test.gather.empty())
    for (std::int64_t r = 0; r < x.rows; ++r) from.push_back(r);
  for (const std::int32_t slot : test.gather) from.push_back(slot / test.divisor);
  std::vector<TensorScale> by_row;
  for (std::size_t i = 0; i < from.size() && !test.static_scales.empty(); ++i)
    by_row.push_back(
        test.static_scales[test.static_index.empty() ? 0 : static_cast<std::size_t>(test.static_index[i])]);
  const Expected expected = on_the_cpu(test.id, x, from, by_row);

  const auto rows = static_cast<std::int64_t>(from.size());
  const auto layout = cuda::activation_layout(test.id, rows, x.k);
  ASSERT_TRUE(layout.ok()) << layout.status().message();
  Bytes shifted(test.shift);
  shifted.insert(shifted.end(), x.data.begin(), x.data.end());
  const DeviceVector<std::byte> input(shifted);
  const DeviceVector<std::int32_t> gather(test.gather), static_index(test.static_index);
  const DeviceVector<TensorScale> static_scales(test.static_scales);
  const DeviceVector<std::byte> workspace(layout->workspace_bytes);

  Bytes values, scales;
  std::vector<float> token_scales;
  for (int run = 0; run < 2; ++run) {
    const auto poison = static_cast<unsigned char>(run == 0 ? 0xFF : 0x55);
    const DeviceVector<std::byte> out(layout->value_bytes + kGuard, poison);
    const DeviceVector<std::byte> out_scales(layout->scale_bytes + kGuard, poison);
    const DeviceVector<float> out_tokens(layout->token_scale_bytes / sizeof(float) + kGuard, poison);
    const Status status = cuda::quantize_activations(
        test.id,
        {.x = x.view(input.data() + test.shift),
         .rows = rows,
         .gather = test.gather.empty() ? nullptr : gather.data(),
         .gather_divisor = test.divisor,
         .static_scales = test.static_scales.empty() ? nullptr : static_scales.data(),
         .static_index = test.static_index.empty() ? nullptr : static_index.data()},
        {.values = out.data(), .scales = out_scales.data(), .token_scales = out_tokens.data()},
        {workspace.data(), workspace.size()});
    ASSERT_TRUE(status.ok()) << status.message();
    values = out.host(), scales = out_scales.host(), token_scales = out_tokens.host();
    for (std::size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(values[layout->value_bytes + i], std::byte{poison});
      ASSERT_EQ(scales[layout->scale_bytes + i], std::byte{poison});
    }

    for (std::int64_t r = 0; r < rows; ++r) {
      float token_scale = 1;
      TensorScale two_level;
      if (operand.tensor_scale.stored()) {
        token_scale = token_scales[r];
        ASSERT_EQ(bits_of(token_scale), bits_of(expected.token_scales[r])) << "token scale of row " << r;
        two_level = by_row.empty() ? TensorScale{token_scale, false} : by_row[r];
      }
      for (std::int64_t g = 0; g < layout->scale_cols; ++g) {
        const std::int64_t at = r * layout->scale_cols + g;
        const float stored = with_format(operand.scale, [&]<Format S>() {
          std::uint32_t code = 0;
          std::memcpy(&code, scales.data() + at * (S.bits / 8), S.bits / 8);
          return decode<S>(code);
        });
        ASSERT_EQ(bits_of(two_level.apply(stored)), bits_of(expected.real_scales[at]))
            << two_level.apply(stored) << " is not " << expected.real_scales[at] << ": row " << r
            << ", group " << g;
      }
      for (std::int64_t i = 0; i < layout->row_bytes; ++i)
        ASSERT_EQ(static_cast<int>(values[r * layout->row_bytes + i]),
                  static_cast<int>(expected.values[r * layout->row_bytes + i]))
            << "row " << r << ", byte " << i << ", x = " << x.row(from[r])[i * 8 / operand.value.bits];
    }
  }
}

/// Calls f(id) for one scheme of every activation operand of the table.
template <class Function>
void for_each_activation(Function&& f) {
  std::vector<Operand> seen;
  for (const Scheme& row : all_schemes()) {
    if (!row.quantizes_activations() || std::find(seen.begin(), seen.end(), row.activation) != seen.end())
      continue;
    seen.push_back(row.activation);
    f(*find_scheme(row.name));
  }
  EXPECT_FALSE(seen.empty());
}

class CudaQuantize : public GpuTest {};

TEST_F(CudaQuantize, AllRowCounts) {
  for_each_activation([](SchemeId id) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
      for (const std::int64_t rows : {1, 2, 3, 7, 8, 9, 16, 33, 64, 65, 129, 512})
        same_as_on_the_cpu({.id = id, .x = make_rows(dtype, rows, 272, static_cast<unsigned>(rows))});
  });
}

TEST_F(CudaQuantize, ColumnsOfAllSizes) {
  for_each_activation([](SchemeId id) {
    for (const std::int64_t k :
         {2, 14, 16, 30, 48, 128, 136, 768, 1008, 1040, 2048, 2880, 7168, 16384, 16400, 40000})
      same_as_on_the_cpu({.id = id, .x = make_rows(DType::bf16, 18, k, 1)});
    if (scheme(id).activation.value.bits == 8)
      same_as_on_the_cpu({.id = id, .x = make_rows(DType::f16, 17, 13, 2)});
  });
}

TEST_F(CudaQuantize, UnalignedInput) {
  for_each_activation([](SchemeId id) {
    same_as_on_the_cpu({.id = id, .x = make_rows(DType::bf16, 16, 256, 3), .shift = 2});
    same_as_on_the_cpu({.id = id, .x = make_rows(DType::f32, 16, 256, 3), .shift = 4});
  });
}

TEST_F(CudaQuantize, GathersRows) {
  std::mt19937 random(4);
  std::vector<std::int32_t> slots(16 * 6);
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int32_t>(i);
  std::shuffle(slots.begin(), slots.end(), random);
  for_each_activation([&](SchemeId id) {
    same_as_on_the_cpu({.id = id, .x = make_rows(DType::bf16, 16, 768, 5), .gather = slots, .divisor = 6});
    same_as_on_the_cpu({.id = id, .x = make_rows(DType::f16, 16, 80, 5), .gather = {15, 15, 0}});
  });
}

TEST_F(CudaQuantize, RowsMayBeCountedOnTheDevice) {
  for_each_activation([](SchemeId id) {
    const Rows all = make_rows(DType::bf16, 20, 64, 8);
    Rows some = all;
    some.rows = 13;
    const Expected expected = on_the_cpu(id, some, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, {});
    const auto layout = cuda::activation_layout(id, 20, 64);
    const DeviceVector<std::byte> input(all.data), values(layout->value_bytes, 0xAB),
        scales(layout->scale_bytes);
    const DeviceVector<std::byte> workspace(layout->workspace_bytes);
    const DeviceVector<float> token_scales(20);
    const DeviceVector<std::int32_t> count(std::vector<std::int32_t>{13});
    ASSERT_TRUE(cuda::quantize_activations(
                    id, {.x = all.view(input.data()), .rows = 20, .row_count = count.data()},
                    {values.data(), scales.data(), token_scales.data()}, {workspace.data(), workspace.size()})
                    .ok());
    Bytes wanted = expected.values;
    wanted.resize(layout->value_bytes, std::byte{0xAB});
    EXPECT_EQ(values.host(), wanted);
  });
}

TEST_F(CudaQuantize, StaticScales) {
  const std::vector<TensorScale> scales = {{0.013f, false}, {57.0f, true}, {1e-30f, false}, {3e30f, false}};
  std::vector<std::int32_t> index;
  for (int i = 0; i < 32; ++i) index.push_back(i % 4);
  for_each_activation([&](SchemeId id) {
    const Operand& operand = scheme(id).activation;
    if (operand.group.n != 0 && !operand.tensor_scale.stored()) return;
    for (const DType dtype : {DType::bf16, DType::f32}) {
      same_as_on_the_cpu({.id = id, .x = make_rows(dtype, 32, 272, 6), .static_scales = {{0.5f, false}}});
      same_as_on_the_cpu(
          {.id = id, .x = make_rows(dtype, 32, 272, 7), .static_scales = scales, .static_index = index});
    }
  });
}

TEST(CudaQuantizeErrors, SayWhatIsWrong) {
  const auto layout = cuda::activation_layout(SchemeId::fp8_channel_afp8, 3, 100);
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->value_bytes, 300u);
  EXPECT_EQ(layout->scale_bytes, 12u);
  EXPECT_EQ(cuda::activation_layout(SchemeId::nvfp4_anvfp4, 3, 100)->scale_bytes, 21u);
  EXPECT_EQ(cuda::activation_layout(SchemeId::nvfp4_anvfp4, 3, 100)->token_scale_bytes, 12u);
  EXPECT_EQ(cuda::activation_layout(SchemeId::nvfp4_anvfp4, 3, 101).status().code(), Code::invalid_argument);
  EXPECT_EQ(cuda::activation_layout(SchemeId::mxfp4, 3, 100).status().code(), Code::invalid_argument);
  EXPECT_EQ(cuda::activation_layout(SchemeId::int8_aint8, -1, 100).status().code(), Code::invalid_argument);

  std::byte memory[64];
  const auto quantize = [&](cuda::QuantizeInputs inputs, cuda::QuantizeOutputs outputs) {
    return cuda::quantize_activations(SchemeId::fp8_tensor_afp8, inputs, outputs, {});
  };
  const MatrixView x{memory, DType::bf16, 2, 8};
  EXPECT_TRUE(quantize({.x = x, .rows = 0}, {}).ok());
  EXPECT_EQ(quantize({.x = x, .rows = 3}, {memory, memory}).message(), "3 rows are wanted of 2");
  EXPECT_EQ(quantize({.x = {memory, DType::i8, 2, 8}, .rows = 2}, {memory, memory}).message(),
            "cannot quantize I8 activations");
  EXPECT_NE(quantize({.x = x, .rows = 2}, {nullptr, memory}).message().find("values is a null pointer"),
            std::string::npos);
  EXPECT_NE(quantize({.x = x, .rows = 2}, {memory, memory}).message().find("workspace has 0 bytes"),
            std::string::npos);
}

}  // namespace
}  // namespace gatefold
