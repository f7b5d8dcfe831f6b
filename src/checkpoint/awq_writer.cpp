// Writes AWQ's "gemm" layout: what awq.cpp reads. Symmetric weights get zero points of 8.

#include <fmt/format.h>

#include "checkpoint/awq.h"
#include "checkpoint/linear_tensors.h"
#include "checkpoint/linear_writer.h"

namespace gatefold {
namespace {

Result<std::vector<WrittenTensor>> store(QuantizedMatrix matrix) {
  auto integers = integer_codes(matrix, "awq");
  if (!integers) return integers.status();
  const IntegerCodes& m = *integers;
  if (m.bits != 4)
    return Status(Code::unsupported, fmt::format("awq packs codes of 4 bits, not of {}", m.bits));
  if (!matrix.input_order.empty())
    return Status(Code::unsupported, "awq has no order of inputs: the groups of act-order would be lost");
  if (m.n % 8 != 0) return Status(Code::unsupported, fmt::format("{} rows do not fill words of 8", m.n));
  // bf16 stays, as in files of bf16 models.
  const Format format = matrix.scale_format == formats::bf16 ? formats::bf16 : formats::f16;
  const auto scales = exact_scales(matrix, format);
  if (!scales) return scales.status();

  std::vector<std::uint32_t> codes(static_cast<std::size_t>(m.k * m.n / 8)),
      zeros(static_cast<std::size_t>(m.groups * m.n / 8));
  for (std::int64_t r = 0; r < m.n; ++r) {
    const int shift = kAwqNibble[r % 8] * 4;
    for (std::int64_t i = 0; i < m.k; ++i)
      codes[static_cast<std::size_t>((i * m.n + r) / 8)] |=
          static_cast<std::uint32_t>(m.codes[static_cast<std::size_t>(r * m.k + i)]) << shift;
    for (std::int64_t g = 0; g < m.groups; ++g)
      zeros[static_cast<std::size_t>((g * m.n + r) / 8)] |=
          static_cast<std::uint32_t>(m.zeros[static_cast<std::size_t>(r * m.groups + g)]) << shift;
  }
  std::vector<WrittenTensor> tensors;
  tensors.push_back({".qweight", DType::i32, {m.k, m.n / 8}, to_bytes(codes)});
  tensors.push_back({".qzeros", DType::i32, {m.groups, m.n / 8}, to_bytes(zeros)});
  tensors.push_back({".scales",
                     format == formats::bf16 ? DType::bf16 : DType::f16,
                     {m.groups, m.n},
                     transpose(scales->data(), m.n, m.groups, 2)});
  return tensors;
}

Result<nlohmann::ordered_json> config(std::span<const WrittenLayer> layers,
                                      const std::vector<std::string>& ignore) {
  if (Status status = check_uniform(layers, "awq"); !status.ok()) return status;
  const Operand& weight = scheme(layers.front().scheme).weight;
  return nlohmann::ordered_json{
      {"quant_method", "awq"}, {"bits", 4},         {"group_size", weight.group.k == 0 ? -1 : weight.group.k},
      {"zero_point", true},    {"version", "gemm"}, {"modules_to_not_convert", ignore}};
}

}  // namespace

const LinearWriter awq_writer{"awq", store, config, ""};

}  // namespace gatefold
