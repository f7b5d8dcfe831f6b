#pragma once
/// \file
/// The compressed-tensors convention, both ways. What it can say is derived from a scheme's operands; no
/// scheme is named here, so a new row of the table needs no change. docs/checkpoints.md has the formats.

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "checkpoint/convention.h"
#include "checkpoint/integer_matrix.h"
#include "gatefold/quantize.h"

namespace gatefold::compressed_tensors {

/// Reads quant_method "compressed-tensors".
extern const Convention convention;

/// One tensor of a matrix; its name is the module's and this suffix.
struct StoredTensor {
  std::string_view suffix;
  DType dtype;
  std::vector<std::int64_t> shape;
};

/// The tensors that store a matrix of this scheme, shape, scale format and presence of an input scale; its
/// data is not looked at. A scheme that does not quantize gives one ".weight".
std::vector<StoredTensor> layout(const QuantizedMatrix& matrix);

/// Their bytes, in the order of layout().
Result<std::vector<std::vector<std::byte>>> store(QuantizedMatrix matrix);

/// The quantization_config of a model whose Linear layers, except `ignore`, are stored in the scheme. Where
/// compressed-tensors cannot say what is stored, an argument of our own does, which makes other software
/// refuse the checkpoint instead of misreading it. `static_input`: the matrices have an input scale.
nlohmann::ordered_json config(const Scheme& scheme, const std::vector<std::string>& ignore,
                              bool static_input = false);

/// Layers that are stored alike.
struct LayerKind {
  SchemeId scheme = SchemeId::bf16;
  bool static_input = false;
  friend bool operator<(const LayerKind& a, const LayerKind& b) {
    return std::tie(a.scheme, a.static_input) < std::tie(b.scheme, b.static_input);
  }
};
/// What names the layers of each kind: names, or patterns that begin with "re:".
using Targets = std::map<LayerKind, std::vector<std::string>>;

/// The same with a group for each kind; a single one still targets all Linear layers.
nlohmann::ordered_json config(const Targets& targets, const std::vector<std::string>& ignore,
                              bool fp8_kv_cache = false);

/// The kv_cache_scheme of an fp8 KV cache.
nlohmann::ordered_json kv_cache_scheme();

/// Whether the scheme needs that argument of our own.
bool needs_extension(const Scheme& scheme);

/// One entry of config_groups.
struct Group {
  std::string where;  ///< "/models/x/config.json: config_groups.group_0", to begin a message with
  std::vector<std::string> targets;
  std::string format;          ///< "pack-quantized"; empty: not said
  bool packed = false;         ///< the format has a weight_packed
  Operand weight, activation;  ///< a scale that may be of any wide float type counts as f32
  bool static_input = false;   ///< input_activations.dynamic is false or "local"
  bool act_order = false;      ///< weights.actorder is "group": there is a weight_g_idx
  Status unsupported;          ///< well-formed, but of a kind that no operand describes
};

/// Errors: not of the form that compressed-tensors writes.
Result<std::vector<Group>> parse_groups(const nlohmann::json& quantization, const std::string& config);

/// Whether kv_cache_scheme asks for e4m3 with one static scale for a layer's keys and one for its values.
/// Error: it asks for something else.
Result<bool> parse_kv_cache(const nlohmann::json& quantization, const std::string& config);

/// The row of the table with these operands, whatever wide float type the weight's scales have. Integers may
/// go into a row that holds them in another way (integer_row); `k` is of all matrices that share it.
Result<SchemeId> find_row(const Group& group, std::span<const std::int64_t> k);

/// Of a group whose weights are integers. One scale for the matrix counts as one for each row.
IntegerFormat integer_format(const Group& group);

/// Of a scale: f32, bf16 or f16, as the writer likes.
constexpr bool is_wide(Format format) {
  return format == formats::f32 || format == formats::bf16 || format == formats::f16;
}

}  // namespace gatefold::compressed_tensors
