#pragma once
/// \file
/// Hugging Face checkpoint directories: config.json, one or many safetensors files, an index.
///
/// Checkpoints are untrusted input: every field is checked before it is used, and an error names file, tensor
/// and values. Files are memory-mapped; nothing is read before it is asked for. A Checkpoint is immutable:
/// any number of threads may use it at once. (A file that is truncated by someone else while it is mapped
/// raises SIGBUS, as with any mapping.)

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "gatefold/moe_spec.h"
#include "gatefold/quantize.h"
#include "gatefold/recipe.h"
#include "gatefold/status.h"
#include "gatefold/tensor.h"

namespace gatefold {

/// Rotary embedding. The scalings of the supported families; formulas in src/model/rope.cpp.
struct RopeConfig {
  enum class Type : std::uint8_t { standard, linear, dynamic, llama3, yarn };
  Type type = Type::standard;
  double theta = 10000.0;
  double partial_rotary_factor = 1.0;  ///< of a head's channels, so many are rotated; 1 if not given
  double factor = 1.0;
  double original_max_positions = 0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;               // llama3
  double beta_fast = 32.0, beta_slow = 1.0;                           // yarn
  double attention_factor = 0.0, mscale = 0.0, mscale_all_dim = 0.0;  // yarn; 0: not given
  bool truncate = true;                                               // yarn: round the correction range
};

/// config.json, checked. Sizes are positive and bounded, so that products of any three fit in 64 bits.
struct ModelConfig {
  std::string model_type;  ///< "qwen3_moe"
  DType dtype = DType::bf16;
  int layers = 0, hidden = 0, vocab = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  int dense_intermediate = 0;
  int max_positions = 0;
  int sliding_window = 0;  ///< of the layers that slide; 0: none
  double rms_eps = 1e-6;
  bool tie_embeddings = false, attention_bias = false, qk_norm = false;
  RopeConfig rope;

  MoeSpec moe;               ///< of every MoE layer; scheme = the unquantized 16-bit one
  std::vector<bool> is_moe;  ///< per layer
  std::vector<bool> slides;  ///< per layer: has the sliding window (of families that the decoder runs)
};

/// One tensor of a checkpoint.
struct TensorEntry {
  std::string name;
  DType dtype = DType::u8;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  ///< bytes within the file
  int file = 0;                      ///< index into Checkpoint::files()
  std::uint64_t bytes() const { return end - begin; }
};

enum class Projection : std::uint8_t { gate, up, down };
std::string_view name(Projection projection);

/// One expert's logical [N, K] matrix: either a view of an unquantized tensor in the mapping, or the
/// canonical form of a quantized one (copied, small).
using ExpertMatrix = std::variant<MatrixView, QuantizedMatrix>;

/// A layer's group of tensors for listings: "experts of layer 3: 128 x {gate, up, down}, int4_g128".
struct ExpertGroup {
  int layer = 0;
  std::string stored;  ///< "bf16", a scheme's name, or "other: <why>"
  std::uint64_t bytes = 0;
};

/// A linear layer outside of the routed experts.
struct StoredLayer {
  std::string module;  ///< "model.layers.0.self_attn.q_proj"
  std::int64_t n = 0, k = 0;
};

class Checkpoint {
 public:
  /// Maps all files and checks everything that can be checked without reading tensor data.
  static Result<Checkpoint> open(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const;
  const ModelConfig& config() const;
  const std::string& config_text() const;  ///< config.json as it is
  /// The quantization_config by which tensors are read, wherever it stands, as JSON: with sorted keys, but
  /// for GPTQ's `dynamic`, which becomes an array of [key, value] in its order. "null" if there is none.
  std::string quantization_text() const;
  std::span<const std::filesystem::path> files() const;

  std::span<const TensorEntry> tensors() const;  ///< sorted by name
  const TensorEntry* find(std::string_view name) const;
  Result<TensorView> tensor(std::string_view name) const;  ///< error: no such tensor
  TensorView view(const TensorEntry& entry) const;
  /// Tells the system that these pages are not needed soon (streaming conversion).
  void release(const TensorEntry& entry) const;

  /// How the experts are stored: "unquantized", "compressed-tensors", ...
  std::string_view convention() const;
  /// The scheme in which the routed experts are stored; for unquantized ones that of their dtype.
  /// Error: stored in a way that no row of the table describes, or layers in different ones.
  Result<SchemeId> stored_scheme() const;
  /// The same of one layer. Error: also, its experts differ.
  Result<SchemeId> stored_scheme(int layer) const;

  /// The matrix of one routed expert: gate and up are [I, H], down is [H, I]. Per-expert tensors and slices
  /// of fused 3-D tensors look the same here.
  Result<ExpertMatrix> expert(int layer, int expert, Projection projection) const;
  /// Its QuantizedMatrix::input_order, without the rest.
  Result<std::vector<std::int32_t>> input_order(int layer, int expert, Projection projection) const;
  /// The biases of a layer's routed experts, [E, N] as f32 (MoeSpec::bias).
  Result<std::vector<float>> expert_biases(int layer, Projection projection) const;
  /// All tensors that make up the routed experts (to be replaced when converting), and only these.
  bool is_expert_tensor(std::string_view name) const;

  /// Router weight [E, H], correction bias [E] or nullptr, router bias [E] or nullptr.
  Result<TensorView> router(int layer) const;
  const TensorEntry* router_correction_bias(int layer) const;
  const TensorEntry* router_bias(int layer) const;
  /// Whether experts are chosen by a table of token ids (DeepSeek-V4's first layers): then the router alone
  /// does not say which, and the caller of a layer must.
  bool chooses_by_token(int layer) const;
  /// Shared expert's matrices, the scheme in which all three are stored, and its gate vector [1, H] if the
  /// family has one.
  Result<ExpertMatrix> shared_expert(int layer, Projection projection) const;
  Result<SchemeId> shared_scheme(int layer) const;
  Result<TensorView> shared_expert_gate(int layer) const;

  /// Quantized layers that are no routed expert's, in the order of their names, and the matrix of one.
  std::vector<StoredLayer> other_quantized_layers() const;
  Result<QuantizedMatrix> quantized_layer(const StoredLayer& layer) const;
  /// Unquantized ones, in the order of their names: every matrix but embeddings, routers and the gates of
  /// shared experts.
  std::vector<StoredLayer> other_unquantized_layers() const;
  /// The module that a tensor belongs to if the module is quantized; else empty, as for biases, which are
  /// stored as they are.
  std::string quantized_module(const TensorEntry& entry) const;
  /// "model.layers.0.mlp.experts.3.gate_proj": where the matrix is, or would be if experts were not fused.
  std::string expert_module(int layer, int expert, Projection projection) const;
  std::string shared_expert_module(int layer, Projection projection) const;
  /// The regular expression of the routed experts of layers ("0|1|5").
  std::string experts_pattern(const std::string& layers) const;
  /// Whether keys and values are to be kept as e4m3 (kv_cache_scheme of compressed-tensors and ModelOpt).
  /// Error: in a way that the decoder does not know.
  Result<bool> fp8_kv_cache() const;

  std::vector<ExpertGroup> expert_groups() const;
  /// How the layer is stored to which a tensor belongs: "compressed-tensors pack-quantized",
  /// "gptq v1, 4 bits", ...; "unquantized" for the rest.
  std::string convention(const TensorEntry& entry) const;

 private:
  struct State;
  explicit Checkpoint(std::shared_ptr<const State> state);
  std::shared_ptr<const State> state_;
};

/// What e4m3 codes of a layer's keys and values are multiplied by.
struct KvScales {
  float key = 1, value = 1;
};

struct ConvertOptions {
  SchemeId scheme = SchemeId::int4_g128;  ///< of the routed experts
  std::optional<Recipe> recipe;           ///< takes the place of `scheme`
  std::vector<KvScales> kv_scales;        ///< by layer, of an fp8 KV cache; empty: all 1
  QuantizeOptions quantize;
  std::uint64_t shard_bytes = 5'000'000'000;
  int threads = 0;  ///< 0: OpenMP's default
  /// Gives the experts' matrices in place of quantize(), from any thread; none: round to nearest.
  std::function<Result<QuantizedMatrix>(int layer, int expert, Projection projection)> matrix;
  bool static_input = false;  ///< these have an input_scale where Operand::may_be_static
  /// The bytes of a tensor that is no expert's, if they are to be others than the source's; from any thread.
  std::function<std::optional<std::span<const std::byte>>(const TensorEntry& entry)> replacement;
  /// Asked before each piece of work, from any thread: true stops the conversion with an error.
  std::function<bool()> cancelled;
};

struct ConvertProgress {
  std::uint64_t done_bytes = 0, total_bytes = 0;  ///< of the source
};
struct ConvertReport {
  std::uint64_t source_bytes = 0, written_bytes = 0;
  int shards = 0;
  double seconds = 0;
};

/// Quantizes every routed expert of `source` (unquantized), or what a recipe says, and copies all else, into
/// the new directory `destination`, in the compressed-tensors convention (docs/checkpoints.md). Streams:
/// memory does not grow with the model. Written to a temporary directory beside it and renamed at the end; on
/// any error nothing is left behind and nothing that existed is touched. `progress` may be called from any
/// thread, one at a time.
Result<ConvertReport> convert(const Checkpoint& source, const std::filesystem::path& destination,
                              const ConvertOptions& options,
                              const std::function<void(const ConvertProgress&)>& progress = {});

struct RewriteOptions {
  std::string to;  ///< "compressed-tensors", "gptq", "awq" or "modelopt"
  std::uint64_t shard_bytes = 5'000'000'000;
  int threads = 0;  ///< 0: OpenMP's default
  /// Asked before each matrix, from any thread: true stops with an error.
  std::function<bool()> cancelled;
};

/// Copies a quantized checkpoint into another convention: every quantized layer with the same weights bit for
/// bit, all else as it is. Errors: what would be lost, before anything is written; the same of a destination
/// that exists, and of failures, as convert(). Every layer is read twice; memory is one matrix per thread.
Result<ConvertReport> rewrite(const Checkpoint& source, const std::filesystem::path& destination,
                              const RewriteOptions& options,
                              const std::function<void(const ConvertProgress&)>& progress = {});

}  // namespace gatefold
