#pragma once
/// \file
/// Non-owning views of row-major, contiguous, little-endian tensors. Views never own or free memory, and
/// promise no alignment (safetensors files do not either).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace gatefold {

/// Element types of safetensors files, in the order of that format's own enumeration.
enum class DType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};

/// Bits of one element: 4 for f4, 6 for f6_*, else a multiple of 8.
int bits(DType dtype);
/// The name in a safetensors header: "BF16", "F8_E4M3".
std::string_view name(DType dtype);
std::optional<DType> find_dtype(std::string_view name);

struct TensorView {
  const std::byte* data = nullptr;
  DType dtype = DType::u8;
  std::vector<std::int64_t> shape;
  std::size_t bytes = 0;
};

/// [rows, cols] of f32, f16 or bf16.
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

struct MutableMatrixView {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

}  // namespace gatefold
