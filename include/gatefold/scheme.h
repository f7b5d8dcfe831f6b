#pragma once
/// \file
/// A scheme says what is stored (weights) and what is multiplied (activations). The rows are in schemes.def
/// and nowhere else; nothing infers a scheme from dtypes, shapes or flags.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "gatefold/format.h"

namespace gatefold {

/// Extent that shares one scale, in rows (n: output channels, or tokens) and columns (k: the contraction).
/// 0 = the whole extent. Edge groups may be short where n or k does not divide the matrix.
struct Granularity {
  std::int16_t n = 0;
  std::int16_t k = 0;
  friend constexpr bool operator==(const Granularity&, const Granularity&) = default;
};

/// How the scales of activations are found where a checkpoint does not give them. The table's operands follow
/// the standard rules (quantize.h); a checkpoint is run with those of the software that made it.
enum class ScaleRule : std::uint8_t {
  standard,
  compressed_tensors,  ///< integers: amax / (range / 2); ue8m0: one exponent more from a mantissa of 1.75 on
  modelopt,            ///< ue4m3: amax / (6 * input_scale), at least 2^-9
};

/// One side of the multiply. real = (code - zero_point) * scale[group] * tensor_scale.
struct Operand {
  Format value;         ///< none: the model's own 16-bit type
  Format scale;         ///< none: the value is stored as it is
  Granularity group;    ///< extent of one scale (and zero point)
  Format zero_point;    ///< none: symmetric
  Format tensor_scale;  ///< f32: a second scale, one per matrix (weights) or per token (activations)
  ScaleRule rule = ScaleRule::standard;  ///< of activations; not part of the table
  friend constexpr bool operator==(const Operand&, const Operand&) = default;

  constexpr bool quantized() const { return scale.stored(); }
  /// Of activations: the f32 scale may be a checkpoint's, instead of one made for each call or token.
  constexpr bool may_be_static() const {
    return quantized() && (group == Granularity{0, 0} || tensor_scale.stored());
  }
};

struct Scheme {
  std::string_view name;
  Operand weight;
  Operand activation;

  constexpr bool quantizes_activations() const { return activation.quantized(); }
  /// One activation scale over all tokens of a call: then a token's result depends on its batch.
  constexpr bool batch_dependent() const {
    return quantizes_activations() && activation.group == Granularity{0, 0};
  }
};

/// The constructors used by schemes.def.
namespace operands {
using namespace formats;
inline constexpr Granularity per_tensor{0, 0};
inline constexpr Granularity per_channel{1, 0};
constexpr Granularity per_group(int k) {
  return {1, static_cast<std::int16_t>(k)};
}
constexpr Granularity per_block(int n, int k) {
  return {static_cast<std::int16_t>(n), static_cast<std::int16_t>(k)};
}
inline constexpr Operand act16{};
constexpr Operand plain(Format value) {
  return {value, none, {}, none, none};
}
constexpr Operand scaled(Format value, Format scale, Granularity group) {
  return {value, scale, group, none, none};
}
constexpr Operand with_zero(Format value, Format scale, Granularity group) {
  return {value, scale, group, value, none};
}
constexpr Operand with_tensor_scale(Format value, Format scale, Granularity group) {
  return {value, scale, group, none, f32};
}
}  // namespace operands

/// Index into the table. The numbers follow the table's order: store names, not numbers, in files.
enum class SchemeId : std::uint8_t {
#define GATEFOLD_SCHEME(id, weight, activation) id,
#include "gatefold/schemes.def"
#undef GATEFOLD_SCHEME
};

namespace operands {
inline constexpr Scheme table[] = {
#define GATEFOLD_SCHEME(id, weight, activation) {#id, weight, activation},
#include "gatefold/schemes.def"
#undef GATEFOLD_SCHEME
};
}  // namespace operands

/// One tag type per row: kernels are templates over tags (nvcc needs types, not values, on __global__
/// functions). `schemes::mxfp4::scheme` is the row.
namespace schemes {
#define GATEFOLD_SCHEME(tag, weight_operand, activation_operand)                    \
  struct tag {                                                                      \
    static constexpr SchemeId id = SchemeId::tag;                                   \
    static constexpr Scheme scheme = operands::table[static_cast<std::size_t>(id)]; \
  };
#include "gatefold/schemes.def"
#undef GATEFOLD_SCHEME
}  // namespace schemes

/// Calls `f.template operator()<Tag>()` for every row, in table order.
template <class Function>
constexpr void for_each_scheme(Function&& f) {
#define GATEFOLD_SCHEME(tag, weight, activation) f.template operator()<schemes::tag>();
#include "gatefold/schemes.def"
#undef GATEFOLD_SCHEME
}

/// Every row, in table order.
constexpr std::span<const Scheme> all_schemes() {
  return operands::table;
}

constexpr const Scheme& scheme(SchemeId id) {
  return operands::table[static_cast<std::size_t>(id)];
}

/// The id of a name, e.g. "int4_g128"; nothing if there is no such row.
constexpr std::optional<SchemeId> find_scheme(std::string_view name) {
  for (std::size_t i = 0; i < std::size(operands::table); ++i)
    if (operands::table[i].name == name) return static_cast<SchemeId>(i);
  return std::nullopt;
}

/// The row with exactly these operands: how a checkpoint's own description is matched to the table.
constexpr std::optional<SchemeId> find_scheme(const Operand& weight, const Operand& activation) {
  for (std::size_t i = 0; i < std::size(operands::table); ++i)
    if (operands::table[i].weight == weight && operands::table[i].activation == activation)
      return static_cast<SchemeId>(i);
  return std::nullopt;
}

/// "e2m1, ue4m3 per 16, f32 per tensor": for listings.
std::string describe(const Operand& operand, bool is_weight);

}  // namespace gatefold
