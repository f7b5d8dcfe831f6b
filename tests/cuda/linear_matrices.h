#pragma once
// Rows and quantized matrices to multiply, and what comes out in double precision.

#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "../moe_layer.h"
#include "cuda/packed.h"
#include "format/matrix.h"
#include "gatefold/codec.h"
#include "gatefold/cuda_linear.h"

namespace gatefold {

inline std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& x : values) x = normal(random) * std::exp2(normal(random) / 2);
  return values;
}

/// Rows in a 16-bit type, and what they are as f32.
struct Rows {
  DType dtype;
  std::int64_t count, k;
  std::vector<std::uint16_t> codes;
  std::vector<float> values;

  Rows(DType type, std::int64_t rows, std::int64_t columns, unsigned seed = 5)
      : dtype(type),
        count(rows),
        k(columns),
        values(random_values(static_cast<std::size_t>(rows * k), seed)) {
    for (float& value : values) {
      const std::uint32_t code =
          dtype == DType::f16 ? encode<formats::f16>(value) : encode<formats::bf16>(value);
      codes.push_back(static_cast<std::uint16_t>(code));
      value = dtype == DType::f16 ? decode<formats::f16>(code) : decode<formats::bf16>(code);
    }
  }
};

struct Matrices {
  std::vector<QuantizedMatrix> all;
  std::vector<const QuantizedMatrix*> pointers;

  /// `scales`: in which scales of groups are stored; those of the scheme, if it has none in 16 bits.
  Matrices(SchemeId id, std::size_t count, std::int64_t n, std::int64_t k, Format scales = formats::bf16) {
    for (std::size_t i = 0; i < count; ++i) {
      auto values = random_values(static_cast<std::size_t>(n * k), static_cast<unsigned>(20 + i));
      // Groups whose scales are 0: at the begin of a row, and after others.
      for (const auto& [row, first] : {std::pair<std::int64_t, std::int64_t>{3, 0}, {5, 128}})
        for (std::int64_t col = first; row < n && col < std::min<std::int64_t>(k, 256); ++col)
          values[static_cast<std::size_t>(row * k + col)] = 0;
      auto matrix = quantize(id, {values.data(), DType::f32, n, k});
      EXPECT_TRUE(matrix.ok()) << matrix.status().message();
      if (scales != formats::bf16 && scheme(id).weight.scale == formats::bf16) {
        std::vector<float> numbers = all_scales(*matrix);
        for (float& number : numbers) number *= 1 + 0x1p-10f;  // which bf16 has not
        convert_scales(*matrix, scales);
        store_scales(*matrix, 0, numbers.data(), numbers.size());
      }
      all.push_back(std::move(*matrix));
    }
    for (const QuantizedMatrix& matrix : all) pointers.push_back(&matrix);
  }
  cuda::LinearWeights pack(const cuda::LinearOptions& options = {}) const {
    auto packed = cuda::LinearWeights::pack(pointers, options);
    EXPECT_TRUE(packed.ok()) << packed.status().message();
    return std::move(*packed);
  }
};

/// y of rows [offsets[g], offsets[g + 1]) by matrix g; NaN for the others. `rounded`: by weights rounded to
/// that, bf16 or f16.
inline std::vector<double> oracle(const Rows& x, const std::vector<std::int32_t>& offsets,
                                  const Matrices& matrices, bool weights_only = false,
                                  std::optional<Format> rounded = {}) {
  const auto n = static_cast<std::size_t>(matrices.all[0].n), k = static_cast<std::size_t>(x.k);
  std::vector<double> y(static_cast<std::size_t>(x.count) * n, std::nan(""));
  for (std::size_t g = 0; g < matrices.all.size(); ++g) {
    const QuantizedMatrix& w = matrices.all[g];
    const Operand& activation = scheme(w.scheme).activation;
    const auto first = static_cast<std::size_t>(offsets[g]), last = static_cast<std::size_t>(offsets[g + 1]);
    std::vector<double> rows(x.values.begin() + static_cast<std::ptrdiff_t>(first * k),
                             x.values.begin() + static_cast<std::ptrdiff_t>(last * k));
    if (activation.quantized() && !weights_only && first != last)
      reference_round(activation, w.input_scale ? &*w.input_scale : nullptr, x.k, rows);
    std::vector<double> weights = reference_dequantize(w);
    if (rounded)
      for (double& weight : weights) {
        const auto number = static_cast<float>(weight);
        weight = *rounded == formats::f16 ? decode<formats::f16>(encode<formats::f16>(number))
                                          : decode<formats::bf16>(encode<formats::bf16>(number));
      }
    for (std::size_t r = first; r < last; ++r)
      for (std::size_t i = 0; i < n; ++i) {
        double sum = 0;
        for (std::size_t j = 0; j < k; ++j) sum += rows[(r - first) * k + j] * weights[i * k + j];
        y[r * n + i] = sum;
      }
  }
  return y;
}

}  // namespace gatefold
