#include "checkpoint/convention.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/compressed_tensors.h"
#include "checkpoint/conventions.h"
#include "checkpoint/json.h"

namespace gatefold {
namespace {

constexpr const Convention* conventions[] = {&compressed_tensors::convention,
                                             &gptq_convention,
                                             &awq_convention,
                                             &fp8_convention,
                                             &modelopt_convention,
                                             &mxfp4_convention,
                                             &unquantized::convention};

std::string join_names(std::span<const DType> dtypes) {
  std::string list;
  for (const DType dtype : dtypes) list += fmt::format("{}{}", list.empty() ? "" : " or ", name(dtype));
  return list;
}

}  // namespace

Result<const Convention*> find_convention(const nlohmann::json& quantization, const std::string& config) {
  std::string known;
  for (const Convention* convention : conventions) {
    if (convention->recognises(quantization)) return convention;
    if (!convention->recognises(nullptr))
      known += fmt::format("{}{}", known.empty() ? "" : ", ", convention->name);
  }
  const auto method = quantization.find("quant_method");
  return Status{Code::unsupported,
                fmt::format("{}: quantization_config: quant_method {} is unknown; known: {}", config,
                            method == quantization.end() ? "(none)" : show_json(*method), known)};
}

Result<const TensorEntry*> require_tensor(const Source& source, const std::string& name,
                                          std::span<const std::int64_t> shape,
                                          std::span<const DType> dtypes) {
  const TensorEntry* entry = source.find(name);
  if (entry == nullptr)
    return Status{Code::bad_file, fmt::format("{}: no tensor {}",
                                              source.files().front().parent_path().string(), quote(name))};
  if (!std::equal(entry->shape.begin(), entry->shape.end(), shape.begin(), shape.end()))
    return Status{Code::bad_file, fmt::format("{}: shape {}, but {} is expected", source.where(*entry),
                                              format_shape(entry->shape), format_shape(shape))};
  if (!dtypes.empty() && std::find(dtypes.begin(), dtypes.end(), entry->dtype) == dtypes.end())
    return Status{Code::bad_file, fmt::format("{}: dtype {}, but {} is expected", source.where(*entry),
                                              gatefold::name(entry->dtype), join_names(dtypes))};
  return entry;
}

bool has_method(const nlohmann::json& quantization, std::initializer_list<std::string_view> methods) {
  if (!quantization.is_object()) return false;
  const auto method = quantization.find("quant_method");
  return method != quantization.end() && method->is_string() &&
         std::find(methods.begin(), methods.end(), method->get<std::string>()) != methods.end();
}

std::span<const std::int64_t> expert_sizes(std::span<const std::int64_t> sizes, const Linear& linear,
                                           const ModelConfig& model) {
  const bool gate = linear.n == model.moe.intermediate && linear.k == model.moe.hidden;
  const bool down = linear.n == model.moe.hidden && linear.k == model.moe.intermediate;
  return gate || down ? sizes : sizes.first(1);
}

std::string format_shape(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

}  // namespace gatefold
