// Writes ModelOpt: what modelopt.cpp reads.

#include <fmt/format.h>

#include "checkpoint/linear_writer.h"
#include "checkpoint/modelopt.h"

namespace gatefold {
namespace {

using modelopt::Algorithm;

const Algorithm* find_algorithm(const Scheme& row) {
  for (const Algorithm& algorithm : modelopt::algorithms())
    if (algorithm.weight == row.weight && algorithm.activation == row.activation) return &algorithm;
  return nullptr;
}

std::vector<std::byte> bytes_of(float value) {
  return to_bytes(std::vector<float>{value});
}

Result<std::vector<WrittenTensor>> store(QuantizedMatrix matrix) {
  const Scheme& row = scheme(matrix.scheme);
  const Algorithm* algorithm = find_algorithm(row);
  if (algorithm == nullptr)
    return Status(Code::unsupported,
                  fmt::format("modelopt has no quant_algo of {} weights with {} activations",
                              describe(row.weight, true), describe(row.activation, false)));
  if (algorithm->static_input != matrix.input_scale.has_value())
    return Status(
        Code::unsupported,
        fmt::format("modelopt's {} wants a static scale of activations, and there is none", algorithm->name));
  if (Status status = turn_tensor_scale(matrix, false); !status.ok()) return status;
  if (Status status = turn_input_scale(matrix, false); !status.ok()) return status;
  const Operand& weight = row.weight;
  const QuantizedLayout layout = matrix.layout();
  auto scales = exact_scales(matrix, weight.scale);
  if (!scales) return scales.status();

  const bool four = weight.value.bits == 4;
  std::vector<std::int64_t> shape = {layout.scale_rows, layout.scale_cols};
  if (weight.group == operands::per_tensor) shape = {};
  if (weight.group == operands::per_channel) shape = {matrix.n};
  const DType dtype = weight.scale == formats::f32     ? DType::f32
                      : weight.scale == formats::ue8m0 ? DType::u8
                                                       : DType::f8_e4m3;
  std::vector<WrittenTensor> tensors;
  tensors.push_back({".weight",
                     four ? DType::u8 : DType::f8_e4m3,
                     {matrix.n, four ? matrix.k / 2 : matrix.k},
                     std::move(matrix.values)});
  tensors.push_back({".weight_scale", dtype, shape, std::move(*scales)});
  if (weight.tensor_scale.stored())
    tensors.push_back({".weight_scale_2", DType::f32, {}, bytes_of(matrix.tensor_scale.value)});
  if (matrix.input_scale)
    tensors.push_back({".input_scale", DType::f32, {}, bytes_of(matrix.input_scale->value)});
  return tensors;
}

Result<nlohmann::ordered_json> config(std::span<const WrittenLayer> layers,
                                      const std::vector<std::string>& ignore) {
  nlohmann::ordered_json config{{"quant_method", "modelopt"}, {"quant_algo", ""}, {"ignore", ignore}};
  const auto describe_algorithm = [](const Algorithm& algorithm) {
    nlohmann::ordered_json entry{{"quant_algo", algorithm.name}};
    if (algorithm.weight.group.n == 1 && algorithm.weight.group.k != 0)
      entry["group_size"] = algorithm.weight.group.k;
    return entry;
  };
  if (check_uniform(layers, "modelopt").ok()) {
    config.update(describe_algorithm(*find_algorithm(scheme(layers.front().scheme))));
    return config;
  }
  config["quant_algo"] = "MIXED_PRECISION";
  for (const WrittenLayer& layer : layers)
    config["quantized_layers"][layer.module] = describe_algorithm(*find_algorithm(scheme(layer.scheme)));
  return config;
}

}  // namespace

const LinearWriter modelopt_writer{"modelopt", store, config, ""};

}  // namespace gatefold
