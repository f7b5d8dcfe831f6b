#include "gatefold/scheme.h"

#include <fmt/format.h>

#include "format/scale_rule.h"

namespace gatefold {

// A row that the quantizer and the reference cannot handle must not compile: kernels, tests and listings take
// every row for runnable.
#define GATEFOLD_SCHEME(tag, weight_operand, activation_operand)                    \
  static_assert(can_quantize(schemes::tag::scheme.weight),                          \
                "scheme " #tag ": no reference can run this row (weight operand)"); \
  static_assert(can_quantize_activation(schemes::tag::scheme.activation),           \
                "scheme " #tag ": no reference can run this row (activation operand)");
#include "gatefold/schemes.def"
#undef GATEFOLD_SCHEME

namespace {

std::string extent(Granularity group, bool is_weight) {
  if (group.n == 0) return is_weight ? "per matrix" : "per tensor";
  if (group.k == 0) return is_weight ? "per channel" : "per token";
  if (group.n == 1) return fmt::format("per {}", group.k);
  return fmt::format("per {}x{}", group.n, group.k);
}

}  // namespace

std::string describe(const Operand& operand, bool is_weight) {
  if (!operand.value.stored()) return "16-bit";
  std::string text(name(operand.value));
  if (!operand.quantized()) return text;
  text += fmt::format(", {} {}", name(operand.scale), extent(operand.group, is_weight));
  if (operand.zero_point.stored()) text += ", zero points";
  if (operand.tensor_scale.stored())
    text += fmt::format(", {} {}", name(operand.tensor_scale), is_weight ? "per matrix" : "per token");
  return text;
}

}  // namespace gatefold
