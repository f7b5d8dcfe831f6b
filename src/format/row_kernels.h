#pragma once
/// \file
/// The loops of rows.h behind function pointers, for code that chooses the format at run time.

#include <cstddef>
#include <cstdint>

#include "format/isa.h"
#include "format/scale_rule.h"
#include "gatefold/tensor.h"

namespace gatefold {

struct RowKernels {
  using Encode = void (*)(const float* x, std::int64_t k, std::int64_t group, const float* scale,
                          const float* zero, std::byte* out);
  using Decode = void (*)(const std::byte* in, std::int64_t k, std::int64_t group, const float* scale,
                          const float* zero, float* out);
  using Error = double (*)(const float* x, std::int64_t count, float scale, float zero, const float* weight);
  struct PerFormat {
    Encode encode = nullptr;
    Decode decode = nullptr;
    Error error = nullptr;
  };

  void (*widen_f32)(const std::byte* in, std::int64_t count, float* out);
  void (*widen_f16)(const std::byte* in, std::int64_t count, float* out);
  void (*widen_bf16)(const std::byte* in, std::int64_t count, float* out);
  bool (*ranges)(const float* x, std::int64_t k, std::int64_t group, GroupRange* out);
  PerFormat formats[std::size(formats::all)];  ///< filled for the formats that hold values

  /// `count` elements from element `at` of f32, f16 or bf16 data.
  void widen(DType dtype, const void* data, std::int64_t at, std::int64_t count, float* out) const {
    const auto* bytes = static_cast<const std::byte*>(data);
    if (dtype == DType::f32) return widen_f32(bytes + at * 4, count, out);
    return (dtype == DType::f16 ? widen_f16 : widen_bf16)(bytes + at * 2, count, out);
  }
  const PerFormat& operator[](Format format) const {
    std::size_t i = 0;
    while (!(formats::all[i].format == format)) ++i;
    return formats[i];
  }
};

/// For the instruction set that runs here (best_isa).
const RowKernels& row_kernels();
const RowKernels& row_kernels(Isa isa);

}  // namespace gatefold
