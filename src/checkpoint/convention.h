#pragma once
/// \file
/// A convention is a way to store the weight of one linear layer in tensors: plain, compressed-tensors, ...
/// To add one: a file that defines its Convention, and a line in the list in convention.cpp. What the layers
/// are called is the family's business (families.h); the two know nothing of each other.

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/source.h"
#include "gatefold/checkpoint.h"
#include "gatefold/scheme.h"
#include "gatefold/status.h"

namespace gatefold {

/// The matrix is a part of a tensor [experts, rows, k] (or of what a convention makes of it): rows
/// first_row, first_row + row_step, ... of `expert`. Some families store it transposed, [experts, k, rows],
/// as long as it is not quantized.
struct FusedSlice {
  std::int64_t experts = 0, rows = 0;
  std::int64_t expert = 0;
  std::int64_t first_row = 0, row_step = 1;
  bool transposed = false;
};

/// Where one logical weight [n, k] is stored.
struct Linear {
  /// What the names of all its tensors begin with: "model.layers.0.mlp.experts.3.gate_proj" (a suffix such as
  /// ".weight" follows) or, fused, "model.layers.0.mlp.experts.gate_up_proj" ("" or "_blocks" follows).
  std::string module;
  std::int64_t n = 0, k = 0;
  std::optional<FusedSlice> fused;
};

/// Reads the linear layers of one checkpoint. Immutable; used by many threads at once.
class LinearReader {
 public:
  virtual ~LinearReader() = default;

  /// All suffixes that a tensor of a layer may have, per-expert or fused. Nothing else may share its module
  /// name: Checkpoint::open refuses such tensors.
  virtual std::span<const std::string_view> suffixes(bool fused) const = 0;

  /// In which scheme `linear`, of which at least one tensor exists, is stored. Presence of the companion
  /// tensors decides. Checks names, dtypes and shapes, but reads no data: Checkpoint::open calls it for every
  /// linear layer. Errors: Code::unsupported if it is well-formed but no row of the table describes it (open
  /// goes on); anything else (a missing companion, a wrong shape, config and tensors that disagree) fails
  /// open.
  virtual Result<SchemeId> scheme(const Linear& linear) const = 0;

  /// Its matrix, after the same checks, and those of the data. A view if it is stored unquantized.
  virtual Result<ExpertMatrix> read(const Linear& linear) const = 0;

  /// QuantizedMatrix::input_order of read(), without the rest.
  virtual Result<std::vector<std::int32_t>> input_order(const Linear&) const {
    return std::vector<std::int32_t>();
  }

  /// What the tensors of a module look like if they store a quantized layer; nothing otherwise. For listings,
  /// and for layers whose size no config states.
  struct Quantized {
    std::int64_t n = 0, k = 0;
    std::string stored_as;  ///< "gptq v1, 4 bits"
  };
  virtual std::optional<Quantized> quantized(const std::string& module) const = 0;

  /// How the software that made the checkpoint finds the scales of activations.
  virtual ScaleRule activation_rule() const { return ScaleRule::standard; }

  /// Whether keys and values are to be kept as e4m3. Error: in another way that is not the model's own type.
  virtual Result<bool> fp8_kv_cache() const { return false; }
};

struct Convention {
  std::string_view name;
  /// `quantization` is the config's quantization_config; null if there is none.
  bool (*recognises)(const nlohmann::json& quantization);
  /// `source` outlives the reader. `config` is for messages: the path of config.json.
  Result<std::unique_ptr<LinearReader>> (*open)(const Source& source, const nlohmann::json& quantization,
                                                const ModelConfig& model, const std::string& config);
};

namespace unquantized {
extern const Convention convention;
}

/// The first that recognises `quantization`; an error that lists all if there is none.
Result<const Convention*> find_convention(const nlohmann::json& quantization, const std::string& config);

/// An unquantized linear layer: one tensor, f32, f16 or bf16. Conventions use these for the layers that a
/// checkpoint leaves unquantized. f32 is stored in no scheme: it counts as that of `model`'s 16-bit type.
Result<SchemeId> unquantized_scheme(const Source& source, const Linear& linear, const ModelConfig& model);
Result<ExpertMatrix> read_unquantized(const Source& source, const Linear& linear);

/// The tensor `linear.module + suffix`, which must have this shape and one of these dtypes (empty: any).
/// Errors: no such tensor; file, tensor, what it is and what it should be.
Result<const TensorEntry*> require_tensor(const Source& source, const std::string& name,
                                          std::span<const std::int64_t> shape,
                                          std::span<const DType> dtypes = {});

/// "[16, 256]"
std::string format_shape(std::span<const std::int64_t> shape);

}  // namespace gatefold
