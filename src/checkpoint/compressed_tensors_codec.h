#pragma once
/// \file
/// Matrices to the tensors of compressed-tensors and back, once it is known which tensors these are.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "gatefold/quantize.h"
#include "gatefold/tensor.h"

namespace gatefold::compressed_tensors {

/// How the codes of a matrix lie in its tensor.
///   plain   "weight" [n, k], one code per element of the tensor's type
///   bytes   "weight_packed" U8 [n, k / 2], low nibble first: our own layout
///   words   "weight_packed" I32 [n, ceil(k * bits / 32)], lowest bits first, offset binary (code +
///   2^(bits-1));
///           "weight_shape" I64 [2] = n, k; zero points I32 [ceil(n * bits / 32), groups], packed down a
///           column
enum class Packing : std::uint8_t { plain, bytes, words };

Packing packing(const Scheme& scheme);

/// 32-bit words that hold `count` codes.
std::int64_t words(std::int64_t count, int bits);
/// The type of a tensor of such codes or scales.
DType dtype(Format format);
std::vector<std::int64_t> scale_shape(const QuantizedMatrix& matrix);
/// Of a static activation scale: a factor, or a divisor where there are block scales too.
std::string_view input_suffix(const Operand& activation);

/// The values of `matrix` (scheme, n and k are set) from a tensor of that packing.
std::vector<std::byte> unpack_values(const QuantizedMatrix& matrix, Packing packing,
                                     std::span<const std::byte> stored);
std::vector<std::byte> unpack_zeros(const QuantizedMatrix& matrix, std::span<const std::byte> stored);

}  // namespace gatefold::compressed_tensors
