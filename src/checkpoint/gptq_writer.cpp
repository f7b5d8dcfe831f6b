// Writes GPTQ: what gptq.cpp reads. Symmetric weights as version 1, zero points as version 2, which holds all
// of them.

#include <fmt/format.h>

#include "checkpoint/linear_tensors.h"
#include "checkpoint/linear_writer.h"

namespace gatefold {
namespace {

Result<std::vector<WrittenTensor>> store(QuantizedMatrix matrix) {
  auto integers = integer_codes(matrix, "gptq");
  if (!integers) return integers.status();
  const IntegerCodes& m = *integers;
  const std::int64_t each = 32 / m.bits;
  if (m.n % each != 0 || m.k % each != 0)
    return Status(Code::unsupported,
                  fmt::format("{} x {} codes of {} bits do not fill whole words", m.n, m.k, m.bits));
  const auto scales = exact_scales(matrix, formats::f16);
  if (!scales) return scales.status();
  const bool version1 = !scheme(matrix.scheme).weight.zero_point.stored();

  std::vector<std::uint32_t> codes(static_cast<std::size_t>(m.k / each * m.n)),
      zeros(static_cast<std::size_t>(m.groups * m.n / each));
  for (std::int64_t r = 0; r < m.n; ++r) {
    for (std::int64_t i = 0; i < m.k; ++i)
      codes[static_cast<std::size_t>(i / each * m.n + r)] |=
          static_cast<std::uint32_t>(m.codes[static_cast<std::size_t>(r * m.k + i)]) << (i % each * m.bits);
    for (std::int64_t g = 0; g < m.groups; ++g) {
      const std::uint32_t zero = m.zeros[static_cast<std::size_t>(r * m.groups + g)] - (version1 ? 1u : 0u);
      zeros[static_cast<std::size_t>(g * (m.n / each) + r / each)] |= zero << (r % each * m.bits);
    }
  }
  std::vector<WrittenTensor> tensors;
  tensors.push_back({".qweight", DType::i32, {m.k / each, m.n}, to_bytes(codes)});
  tensors.push_back({".qzeros", DType::i32, {m.groups, m.n / each}, to_bytes(zeros)});
  tensors.push_back({".scales", DType::f16, {m.groups, m.n}, transpose(scales->data(), m.n, m.groups, 2)});
  tensors.push_back({".g_idx", DType::i32, {m.k}, to_bytes(m.group_of)});
  return tensors;
}

Result<nlohmann::ordered_json> config(std::span<const WrittenLayer> layers, const std::vector<std::string>&) {
  if (Status status = check_uniform(layers, "gptq"); !status.ok()) return status;
  const Operand& weight = scheme(layers.front().scheme).weight;
  bool ordered = false;
  for (const WrittenLayer& layer : layers) ordered |= layer.ordered;
  const bool symmetric = !weight.zero_point.stored();
  return nlohmann::ordered_json{{"quant_method", "gptq"},
                                {"bits", weight.value.bits},
                                {"group_size", weight.group.k == 0 ? -1 : weight.group.k},
                                {"desc_act", ordered},
                                {"sym", symmetric},
                                {"lm_head", false},
                                {"checkpoint_format", symmetric ? "gptq" : "gptq_v2"},
                                {"pack_dtype", "int32"}};
}

}  // namespace

const LinearWriter gptq_writer{"gptq", store, config, "quantize_config.json"};

}  // namespace gatefold
