// Writes compressed-tensors from what other conventions hold, too: an order of inputs becomes a weight_g_idx.

#include <map>

#include "checkpoint/compressed_tensors.h"
#include "checkpoint/linear_writer.h"

namespace gatefold {
namespace {

/// Codes back in the order of the inputs.
Status undo_order(QuantizedMatrix& matrix, std::vector<std::int32_t>& group_of) {
  auto integers = integer_codes(matrix, "an order of inputs");
  if (!integers) return integers.status();
  group_of = std::move(integers->group_of);
  const int bits = integers->bits;
  const std::uint8_t middle =
      scheme(matrix.scheme).weight.zero_point.stored() ? 0 : static_cast<std::uint8_t>(1u << (bits - 1));
  const std::int64_t row_bytes = matrix.layout().row_bytes;
  matrix.values.assign(matrix.values.size(), std::byte{});
  for (std::int64_t r = 0; r < matrix.n; ++r)
    for (std::int64_t i = 0; i < matrix.k; ++i) {
      const int code =
          (integers->codes[static_cast<std::size_t>(r * matrix.k + i)] - middle) & (bits == 4 ? 15 : 255);
      matrix.values[static_cast<std::size_t>(r * row_bytes + i * bits / 8)] |=
          static_cast<std::byte>(code << (bits == 4 ? i % 2 * 4 : 0));
    }
  matrix.input_order.clear();
  return {};
}

Result<std::vector<WrittenTensor>> store(QuantizedMatrix matrix) {
  std::vector<std::int32_t> group_of;
  if (!matrix.input_order.empty())
    if (Status status = undo_order(matrix, group_of); !status.ok()) return status;
  if (Status status = turn_tensor_scale(matrix, true); !status.ok()) return status;
  const bool divides = scheme(matrix.scheme).activation.tensor_scale.stored();
  if (Status status = turn_input_scale(matrix, divides); !status.ok()) return status;

  std::vector<WrittenTensor> tensors;
  for (compressed_tensors::StoredTensor& stored : compressed_tensors::layout(matrix))
    tensors.push_back({stored.suffix, stored.dtype, std::move(stored.shape), {}});
  const std::int64_t k = matrix.k;
  auto data = compressed_tensors::store(std::move(matrix));
  if (!data) return data.status();
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].data = std::move((*data)[i]);
  if (!group_of.empty()) tensors.push_back({".weight_g_idx", DType::i32, {k}, to_bytes(group_of)});
  return tensors;
}

/// One group for each kind of layer. A single one targets all Linear layers, several name theirs.
Result<nlohmann::ordered_json> config(std::span<const WrittenLayer> layers,
                                      const std::vector<std::string>& ignore) {
  std::map<std::tuple<SchemeId, bool, bool>, std::vector<std::string>> kinds;
  for (const WrittenLayer& layer : layers)
    kinds[{layer.scheme, layer.ordered, layer.static_input}].push_back(layer.module);
  nlohmann::ordered_json config;
  for (const auto& [kind, modules] : kinds) {
    const auto& [id, ordered, static_input] = kind;
    nlohmann::ordered_json one = compressed_tensors::config(scheme(id), ignore, static_input);
    nlohmann::ordered_json group = one["config_groups"]["group_0"];
    if (ordered) group["weights"]["actorder"] = "group";
    if (kinds.size() > 1) group["targets"] = modules;
    const std::size_t number = config.is_null() ? 0 : config["config_groups"].size();
    if (config.is_null()) {
      config = std::move(one);
      config["config_groups"] = nlohmann::ordered_json::object();
    } else if (config["format"] != group["format"]) {
      config["format"] = "mixed-precision";
    }
    config["config_groups"]["group_" + std::to_string(number)] = std::move(group);
  }
  return config;
}

}  // namespace

const LinearWriter compressed_tensors_writer{"compressed-tensors", store, config, ""};

}  // namespace gatefold
