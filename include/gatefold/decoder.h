#pragma once
/// \file
/// A minimal decoder (Qwen3-MoE, Qwen2-MoE, Mixtral), to make text and to measure what a scheme costs.
///
///   auto model    = gatefold::Decoder::load(*checkpoint, {.scheme = SchemeId::mxfp4});
///   auto tokens   = gatefold::text_tokens(*model, "Once upon a time");
///   auto loss     = gatefold::evaluate(*model, *tokens, {.window = 512});
///   auto sequence = model->new_sequence();
///   Status done   = model->forward(*tokens, sequence, logits);
///
/// Numerics. Dense weights stay in the checkpoint's own type (a view of the mapping), or quantized, and are
/// multiplied in f32; the residual stream and attention are f32, and so is the KV cache, unless a recipe or
/// the checkpoint asks for e4m3: code = e4m3(x / scale), saturating, with one scale for a layer's keys and
/// one for its values (a checkpoint's k_scale and v_scale, else 1). Only the MoE layers round, as their
/// scheme says, and dense layers whose scheme quantizes activations. Products go through BLAS in blocks of
/// one fixed shape, so the same input gives the same bits on every run, for every thread count and for every
/// way of splitting a sequence into calls. Two exceptions depend on the split: Scheme::batch_dependent
/// schemes, and RoPE of type dynamic beyond max_positions (its frequencies follow the length reached by the
/// call, as in transformers).
///
/// Sequences may be longer than ModelConfig::max_positions: RoPE simply goes on. The limit is 2^24 tokens.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gatefold/checkpoint.h"
#include "gatefold/moe.h"
#include "gatefold/recipe.h"
#include "gatefold/scheme.h"
#include "gatefold/status.h"
#include "gatefold/tensor.h"

namespace gatefold {

struct DecoderOptions {
  std::optional<SchemeId> scheme = {};  ///< of the routed experts; none: as stored
  std::optional<Recipe> recipe = {};    ///< takes the place of `scheme`; quantized on load
  Device device = {};                   ///< of the MoE layers; all else runs on the CPU
  Precision precision = Precision::native;
  bool weights_only = false;  ///< leave activations unquantized in schemes that quantize them
  bool batch_invariant = false, fast_accumulation = false;  ///< PlanOptions
  QuantizeOptions quantize = {};  ///< when `scheme` or `recipe` is quantized on load
  int threads = 0;                ///< 0: OpenMP's default at load
  int max_tokens = 512;           ///< tokens computed at once, up to 65536; longer inputs are split
};

/// One running sequence: its KV cache, and the scratch memory of the calls. Memory grows with the length.
/// For one thread at a time, and only for the decoder that made it.
class Sequence {
 public:
  std::int64_t length() const;  ///< tokens seen
  void clear();                 ///< back to length 0; memory is kept

  struct State;
  struct Delete {
    void operator()(State* state) const;
  };

 private:
  friend class Decoder;
  explicit Sequence(std::unique_ptr<State, Delete> state) : state_(std::move(state)) {}
  std::unique_ptr<State, Delete> state_;
};

/// Called during `forward`, in order, from the calling thread. Pointers are valid during the call only.
struct ForwardHooks {
  /// Logits [rows, vocab] of tokens first, first + 1, ... of the call.
  std::function<void(std::int64_t first, std::int64_t rows, const float* logits)> logits;
  /// What went into an MoE layer and what came out (f32, before the residual sum), for tokens first, ...
  std::function<void(int layer, std::int64_t first, const MatrixView& input, const MatrixView& output)> moe;
  /// Keys and values [tokens, kv_heads * head_dim] of a layer, as attention would see them in f32.
  std::function<void(int layer, const MatrixView& keys, const MatrixView& values)> kv;
};

/// A model ready to run. Immutable: several threads may use it at once, each with a Sequence of its own. It
/// keeps the checkpoint mapped.
class Decoder {
 public:
  /// Errors: a model_type or tensor dtype that is not supported, a tensor that is missing or whose shape
  /// contradicts the config, and those of load_experts and MoePlan.
  static Result<Decoder> load(const Checkpoint& checkpoint, const DecoderOptions& options = {});

  const Checkpoint& checkpoint() const;
  const ModelConfig& config() const;
  SchemeId scheme() const;      ///< of the routed experts of the first MoE layer, as run
  std::string schemes() const;  ///< of all, in the order of layers: "mxfp4", "mxfp4 and int4_g32"
  int threads() const;
  bool byte_level() const;               ///< tokens are bytes: vocab 256 and no tokenizer.json
  std::uint64_t expert_bytes() const;    ///< of all routed experts, as a checkpoint stores the scheme
  std::uint64_t expert_weights() const;  ///< how many weights that is
  std::string_view kernel_name() const;  ///< of the first MoE layer

  Sequence new_sequence() const;

  /// Appends `tokens` to the sequence. `logits` gets those of the last logits.size() / vocab tokens,
  /// row-major; it may be empty. Errors (the sequence is as it was): a token id outside the vocabulary (index
  /// and value), a logits size that is not a multiple of vocab or asks for more rows than tokens, a sequence
  /// too long.
  Status forward(std::span<const std::int32_t> tokens, Sequence& sequence, std::span<float> logits) const;
  Status forward(std::span<const std::int32_t> tokens, Sequence& sequence, const ForwardHooks& hooks) const;

  struct State;

 private:
  explicit Decoder(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  Status run(std::span<const std::int32_t> tokens, Sequence& sequence, std::int64_t first_logits,
             const ForwardHooks& hooks) const;
  std::shared_ptr<const State> state_;
};

/// The bytes of a text, for byte-level models. Error: the model has a tokenizer; give it token ids.
Result<std::vector<std::int32_t>> text_tokens(const Checkpoint& checkpoint, std::string_view text);
inline Result<std::vector<std::int32_t>> text_tokens(const Decoder& decoder, std::string_view text) {
  return text_tokens(decoder.checkpoint(), text);
}
/// Token ids of a .npy file (one-dimensional, or [1, n]) or of a .safetensors file with one tensor, of any
/// integer type. Error: an id outside [0, vocab), with its index and value.
Result<std::vector<std::int32_t>> read_tokens(const std::filesystem::path& file, int vocab);

/// Done and total tokens, for progress bars.
using EvalProgress = std::function<void(std::int64_t done, std::int64_t total)>;

struct EvalOptions {
  int window = 512;
  EvalProgress progress = {};
};
struct EvalResult {
  std::optional<double> bits_per_byte;  ///< byte-level models only
  double nats_per_token = 0;
  double perplexity = 0;
  std::int64_t tokens = 0;  ///< predicted ones: windows * (window - 1)
  double seconds = 0;
};
/// Mean loss over non-overlapping windows. The first token of each window is not predicted; a remainder
/// shorter than a window is dropped. Errors: window < 2, fewer tokens than one window, and forward's.
Result<EvalResult> evaluate(const Decoder& decoder, std::span<const std::int32_t> tokens,
                            const EvalOptions& options = {});

struct GenerateOptions {
  int tokens = 128;
  double temperature = 0;  ///< 0: the most likely token, ties to the lowest id
  std::uint64_t seed = 0;
  /// Called with each token as it is chosen; false stops.
  std::function<bool(std::int32_t token)> on_token = {};
};
struct GenerateResult {
  std::vector<std::int32_t> tokens;
  double prompt_seconds = 0, seconds = 0;  ///< of the prompt, and of all tokens after the first
};
/// Continues `prompt`. The same seed gives the same tokens on every run and machine that gives the same
/// logits. Errors: an empty prompt, tokens < 0, a temperature that is negative or not finite, and forward's.
Result<GenerateResult> generate(const Decoder& decoder, std::span<const std::int32_t> prompt,
                                const GenerateOptions& options = {});

/// One scheme, or one quantized checkpoint, against the unquantized model, on the same windows as `evaluate`.
struct CompareRow {
  SchemeId scheme = SchemeId::bf16;  ///< of the first MoE layer
  std::string schemes;               ///< of all: Decoder::schemes
  std::string name;                  ///< the scheme's, the recipe's, or the checkpoint's directory
  Status status;                     ///< why this scheme could not be run; then all else is 0
  double bits_per_weight = 0;        ///< packed expert bytes * 8 / expert weights
  std::uint64_t expert_bytes = 0;
  EvalResult loss;
  double kl = 0;              ///< mean KL(unquantized || scheme), nats per token
  double top1_agreement = 0;  ///< fraction of tokens with the same most likely successor
  double tokens_per_second = 0;
};
struct CompareOptions {
  std::vector<SchemeId> schemes = {};  ///< empty: every row of the table
  std::vector<Recipe> recipes = {};    ///< more rows
  /// The same model as others have quantized it: more rows, in the schemes in which they are stored.
  std::vector<Checkpoint> others = {};
  int window = 512;
  DecoderOptions decoder = {};  ///< `scheme` and `recipe` are ignored
  /// Up to this size the unquantized model's logits are kept in memory, else in a temporary file.
  std::uint64_t memory_bytes = std::uint64_t{256} << 20;
  std::function<void(const CompareRow&)> on_row = {};
  std::function<void(std::string_view name, std::int64_t done, std::int64_t total)> progress = {};
};
/// Rows in the order of `options.schemes`, then of `options.recipes` and `options.others`. The temporary file
/// has no name (it vanishes with the process) and is in TMPDIR. Errors: a checkpoint that is itself
/// quantized, evaluate's, a full disk. A scheme that the model does not fit is no error: its row says why.
Result<std::vector<CompareRow>> compare(const Checkpoint& checkpoint, std::span<const std::int32_t> tokens,
                                        const CompareOptions& options = {});

}  // namespace gatefold
