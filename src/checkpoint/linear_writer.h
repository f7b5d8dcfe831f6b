#pragma once
/// \file
/// Writing a quantized layer in a convention of other software: the other direction of convention.h.

#include <cstddef>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gatefold/quantize.h"
#include "gatefold/status.h"
#include "gatefold/tensor.h"

namespace gatefold {

struct WrittenTensor {
  std::string_view suffix;
  DType dtype = DType::u8;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

/// What a config has to say of a layer.
struct WrittenLayer {
  std::string module;
  SchemeId scheme = SchemeId::bf16;
  bool ordered = false, static_input = false;
};

struct LinearWriter {
  std::string_view name;
  /// The tensors of a matrix. Error: Code::unsupported, and what would be lost.
  Result<std::vector<WrittenTensor>> (*store)(QuantizedMatrix matrix);
  /// The quantization_config of a model with these quantized layers (at least one), and these others.
  Result<nlohmann::ordered_json> (*config)(std::span<const WrittenLayer> layers,
                                           const std::vector<std::string>& ignore);
  /// A file beside config.json that repeats it; empty: none.
  std::string_view side_file;
  /// The config's kv_cache_scheme of keys and values as e4m3; nullptr: it has no place for one.
  nlohmann::ordered_json (*kv_cache)() = nullptr;
};

extern const LinearWriter compressed_tensors_writer, gptq_writer, awq_writer, modelopt_writer;

/// nullptr if there is none of this name.
const LinearWriter* find_writer(std::string_view name);
/// "compressed-tensors, gptq, awq, modelopt"
std::string writer_names();

/// Integer codes as conventions count them, unsigned with zero points, in the order of the inputs.
struct IntegerCodes {
  std::int64_t n = 0, k = 0, groups = 0;
  int bits = 4;
  std::vector<std::uint8_t> codes;     ///< [n, k]
  std::vector<std::uint8_t> zeros;     ///< [n, groups]
  std::vector<std::int32_t> group_of;  ///< [k]
};
/// Error: not integers, or with quantized activations, which `convention` cannot say.
Result<IntegerCodes> integer_codes(const QuantizedMatrix& matrix, std::string_view convention);

/// The scales [rows, cols] as `format`. Error: one of them is no number of this format.
Result<std::vector<std::byte>> exact_scales(const QuantizedMatrix& matrix, Format format);

/// Makes a two-level scale divide, or multiply. Error: no f32 gives the same products.
Status turn_tensor_scale(QuantizedMatrix& matrix, bool divides);
Status turn_input_scale(QuantizedMatrix& matrix, bool divides);

/// All layers have the weights of the first: what a config without exceptions can say. Error: two that
/// differ.
Status check_uniform(std::span<const WrittenLayer> layers, std::string_view convention);

template <class T>
std::vector<std::byte> to_bytes(const std::vector<T>& values) {
  const auto* first = reinterpret_cast<const std::byte*>(values.data());
  return {first, first + values.size() * sizeof(T)};
}

}  // namespace gatefold
