#include <cstddef>
#include <iterator>

#include "gatefold/tensor.h"

namespace gatefold {
namespace {

struct Row {
  std::string_view name;
  int bits;
};
constexpr Row table[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
};
static_assert(std::size(table) == static_cast<std::size_t>(DType::u64) + 1);

}  // namespace

int bits(DType dtype) {
  return table[static_cast<std::size_t>(dtype)].bits;
}

std::string_view name(DType dtype) {
  return table[static_cast<std::size_t>(dtype)].name;
}

std::optional<DType> find_dtype(std::string_view name) {
  for (std::size_t i = 0; i < std::size(table); ++i)
    if (table[i].name == name) return static_cast<DType>(i);
  return std::nullopt;
}

}  // namespace gatefold
