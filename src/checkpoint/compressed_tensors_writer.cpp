// Writes compressed-tensors from what other conventions hold.

#include "checkpoint/compressed_tensors.h"
#include "checkpoint/linear_writer.h"

namespace gatefold {
namespace {

Result<std::vector<WrittenTensor>> store(QuantizedMatrix matrix) {
  // Version 0.20 of the package took "actorder": "group" away, and refuses it.
  if (!matrix.input_order.empty())
    return Status(
        Code::unsupported,
        "compressed-tensors has no order of inputs any more: the groups of act-order would be lost");
  if (Status status = turn_tensor_scale(matrix, true); !status.ok()) return status;
  const bool divides = scheme(matrix.scheme).activation.tensor_scale.stored();
  if (Status status = turn_input_scale(matrix, divides); !status.ok()) return status;

  std::vector<WrittenTensor> tensors;
  for (compressed_tensors::StoredTensor& stored : compressed_tensors::layout(matrix))
    tensors.push_back({stored.suffix, stored.dtype, std::move(stored.shape), {}});
  auto data = compressed_tensors::store(std::move(matrix));
  if (!data) return data.status();
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].data = std::move((*data)[i]);
  return tensors;
}

/// One group for each kind of layer. A single one targets all Linear layers, several name theirs.
Result<nlohmann::ordered_json> config(std::span<const WrittenLayer> layers,
                                      const std::vector<std::string>& ignore) {
  compressed_tensors::Targets targets;
  for (const WrittenLayer& layer : layers)
    targets[{layer.scheme, layer.static_input}].push_back(layer.module);
  return compressed_tensors::config(targets, ignore);
}

}  // namespace

const LinearWriter compressed_tensors_writer{"compressed-tensors", store, config, "",
                                             compressed_tensors::kv_cache_scheme};

}  // namespace gatefold
