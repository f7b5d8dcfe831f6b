#include <fmt/format.h>
#include <fmt/ranges.h>
#include <omp.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "format/row_kernels.h"
#include "model/decoder_state.h"

namespace gatefold {
namespace {

constexpr int max_step = 65536;
constexpr std::string_view supported_types[] = {"qwen3_moe", "qwen2_moe", "mixtral"};

// Finds tensors and checks what they are. The first error sticks; what is returned after it is empty.
class TensorLoader {
 public:
  TensorLoader(const Checkpoint& checkpoint, const DecoderOptions& options, const ModelSchemes& schemes)
      : checkpoint_(checkpoint), options_(options), schemes_(schemes) {}

  const Status& status() const { return status_; }
  bool has(const std::string& name) const { return checkpoint_.find(name) != nullptr; }
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  MatrixView matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    const TensorView view = tensor(name, {rows, cols});
    return {view.data, view.dtype, rows, cols};
  }

  std::vector<float> vector(const std::string& name, std::int64_t size) {
    const TensorView view = tensor(name, {size});
    if (view.data == nullptr) return {};
    std::vector<float> values(static_cast<std::size_t>(size));
    row_kernels().widen(view.dtype, view.data, 0, size, values.data());
    return values;
  }

  // A factor of one number; 1 if there is none.
  float scale(const std::string& name) {
    if (!has(name)) return 1;
    const TensorEntry& entry = *checkpoint_.find(name);
    const TensorView view = entry.shape.empty() ? tensor(name, {}) : tensor(name, {1});
    float value = 1;
    if (view.data != nullptr) row_kernels().widen(view.dtype, view.data, 0, 1, &value);
    if (!(value > 0 && value <= std::numeric_limits<float>::max()))
      fail({Code::bad_file, fmt::format("{}: tensor {} is {}, not a positive factor",
                                        checkpoint_.directory().string(), name, value)});
    return value;
  }

  // Of keys ("k") or values ("v"). ModelOpt has it at their projection.
  float kv_scale(const std::string& attention, std::string_view which) {
    const std::string own = fmt::format("{}{}_scale", attention, which);
    return scale(has(own) ? own : fmt::format("{}{}_proj.{}_scale", attention, which, which));
  }

  // "<name>.weight" and, if wanted, "<name>.bias"
  DenseLayer dense(const std::string& name, std::int64_t n, std::int64_t k, bool bias = false) {
    DenseLayer layer;
    if (quantized_.contains(name))
      set_quantized(layer, checkpoint_.quantized_layer({name, n, k}));
    else
      layer.weight = matrix(name + ".weight", n, k);
    if (const auto id = schemes_.other(name); id && status_.ok())
      set_quantized(layer, quantize(*id, layer.weight, options_.quantize), name + ": ");
    if (bias)
      layer.bias = vector(name + ".bias", n);
    else
      check_zeros(name + ".bias", n);
    return layer;
  }

 private:
  // Of a bias that nothing adds: some writers give every layer one of zeros.
  void check_zeros(const std::string& name, std::int64_t size) {
    if (!has(name)) return;
    for (const float value : vector(name, size))
      if (value != 0)
        return fail({Code::unsupported,
                     fmt::format("{}: tensor {} has {}, but config.json makes it a layer without bias",
                                 checkpoint_.directory().string(), name, value)});
  }

  static std::set<std::string> quantized_modules(const Checkpoint& checkpoint) {
    std::set<std::string> modules;
    for (StoredLayer& layer : checkpoint.other_quantized_layers()) modules.insert(std::move(layer.module));
    return modules;
  }

  void set_quantized(DenseLayer& layer, Result<QuantizedMatrix> matrix, const std::string& where = "") {
    if (!matrix) return fail({matrix.status().code(), where + matrix.status().message()});
    layer.quantized = std::move(*matrix);
    layer.weight = {nullptr, DType::f32, layer.quantized.n, layer.quantized.k};
    const Operand& activation = scheme(layer.quantized.scheme).activation;
    if (options_.weights_only || !activation.quantized()) return;
    layer.activation = activation;
    layer.activation.rule = checkpoint_.config().moe.activation_rule;
  }

  TensorView tensor(const std::string& name, const std::vector<std::int64_t>& shape) {
    if (!status_.ok()) return {};
    const auto found = checkpoint_.tensor(name);
    if (!found) {
      fail(found.status());
      return {};
    }
    const DType dtype = found->dtype;
    if (found->shape != shape) {
      fail({Code::bad_file, fmt::format("{}: tensor {} is {}, but config.json makes it {}",
                                        checkpoint_.directory().string(), name, found->shape, shape)});
    } else if (dtype != DType::bf16 && dtype != DType::f16 && dtype != DType::f32) {
      fail({Code::unsupported,
            fmt::format("{}: tensor {} is {}; outside of experts the decoder takes BF16, F16 and F32",
                        checkpoint_.directory().string(), name, gatefold::name(dtype))});
    } else {
      return *found;
    }
    return {};
  }

  const Checkpoint& checkpoint_;
  const DecoderOptions& options_;
  const ModelSchemes& schemes_;
  const std::set<std::string> quantized_ = quantized_modules(checkpoint_);
  Status status_;
};

DecoderLayer load_layer(TensorLoader& loader, const ModelConfig& config, bool fp8_kv_cache, int index) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const std::string attention = prefix + "self_attn.";
  const std::int64_t hidden = config.hidden, d = config.head_dim;
  const bool bias = config.attention_bias;
  DecoderLayer layer;
  layer.attention_norm = loader.vector(prefix + "input_layernorm.weight", hidden);
  layer.mlp_norm = loader.vector(prefix + "post_attention_layernorm.weight", hidden);
  layer.q = loader.dense(attention + "q_proj", config.heads * d, hidden, bias);
  layer.k = loader.dense(attention + "k_proj", config.kv_heads * d, hidden, bias);
  layer.v = loader.dense(attention + "v_proj", config.kv_heads * d, hidden, bias);
  // Qwen2 has biases at the inputs only.
  layer.o = loader.dense(attention + "o_proj", hidden, config.heads * d,
                         bias && loader.has(attention + "o_proj.bias"));
  if (config.qk_norm) {
    layer.q_norm = loader.vector(attention + "q_norm.weight", d);
    layer.k_norm = loader.vector(attention + "k_norm.weight", d);
  }
  if (fp8_kv_cache) layer.kv_scales = {loader.kv_scale(attention, "k"), loader.kv_scale(attention, "v")};
  if (!config.is_moe[index]) {
    layer.gate = loader.dense(prefix + "mlp.gate_proj", config.dense_intermediate, hidden);
    layer.up = loader.dense(prefix + "mlp.up_proj", config.dense_intermediate, hidden);
    layer.down = loader.dense(prefix + "mlp.down_proj", hidden, config.dense_intermediate);
  }
  return layer;
}

Status check_supported(const ModelConfig& config, const DecoderOptions& options) {
  if (std::find(std::begin(supported_types), std::end(supported_types), config.model_type) ==
      std::end(supported_types))
    return {Code::unsupported, fmt::format("the decoder does not run model_type {} (it runs {}); single MoE "
                                           "layers of it can be run",
                                           config.model_type, fmt::join(supported_types, ", "))};
  if (config.rope.partial_rotary_factor != 1)
    return {Code::unsupported,
            fmt::format("partial_rotary_factor is {}: the decoder rotates all channels of a head",
                        config.rope.partial_rotary_factor)};
  const bool has_dense = std::count(config.is_moe.begin(), config.is_moe.end(), false) > 0;
  if (has_dense && config.moe.activation.kind != Activation::Kind::swiglu)
    return {Code::unsupported, "the decoder runs dense MLP layers with SiLU only"};
  if (options.threads < 0 || options.max_tokens < 1 || options.max_tokens > max_step)
    return {Code::invalid_argument,
            fmt::format("threads = {} and max_tokens = {}: threads must be at least 0, max_tokens in [1, {}]",
                        options.threads, options.max_tokens, max_step)};
  return {};
}

/// The plan that runs layers of this spec; a new one if there is none yet.
Result<std::size_t> find_plan(std::vector<MoePlan>& plans, const MoeSpec& spec, const PlanOptions& options,
                              const Device& device) {
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const MoeSpec& other = plans[i].spec();
    if (other.scheme == spec.scheme && other.shared.scheme == spec.shared.scheme &&
        other.ordered_inputs == spec.ordered_inputs)
      return i;
  }
  auto plan = MoePlan::create(spec, options, device);
  if (!plan) return plan.status();
  plans.push_back(std::move(*plan));
  return plans.size() - 1;
}

}  // namespace

Result<std::shared_ptr<Decoder::State>> load_dense(const Checkpoint& checkpoint,
                                                   const DecoderOptions& options) {
  const ModelConfig& config = checkpoint.config();
  if (Status status = check_supported(config, options); !status.ok()) return status;
  auto rope = Rope::create(config.rope, config.head_dim, config.max_positions);
  if (!rope) return rope.status();

  ModelSchemes schemes;
  if (options.recipe) {
    auto resolved = resolve(*options.recipe, checkpoint);
    if (!resolved) return resolved.status();
    schemes = std::move(*resolved);
  } else if (options.scheme) {
    schemes = uniform_schemes(checkpoint, *options.scheme);
  }
  schemes.experts.resize(config.is_moe.size());
  auto state = std::make_shared<Decoder::State>(Decoder::State{.checkpoint = checkpoint,
                                                               .options = options,
                                                               .byte_level = false,
                                                               .embedding = {},
                                                               .layers = {},
                                                               .final_norm = {},
                                                               .head = {},
                                                               .rope = *rope,
                                                               .schemes = std::move(schemes),
                                                               .plans = {}});
  if (options.threads == 0) state->options.threads = omp_get_max_threads();
  state->byte_level = is_byte_level(checkpoint);

  TensorLoader loader(checkpoint, options, state->schemes);
  state->embedding = loader.matrix("model.embed_tokens.weight", config.vocab, config.hidden);
  state->final_norm = loader.vector("model.norm.weight", config.hidden);
  state->head = config.tie_embeddings ? DenseLayer{state->embedding, {}}
                                      : loader.dense("lm_head", config.vocab, config.hidden);
  const auto stored_cache = checkpoint.fp8_kv_cache();
  if (!stored_cache) return stored_cache.status();
  const bool fp8_kv_cache = *stored_cache || state->schemes.fp8_kv_cache;
  for (int i = 0; i < config.layers && loader.status().ok(); ++i)
    state->layers.push_back(load_layer(loader, config, fp8_kv_cache, i));
  if (!loader.status().ok()) return loader.status();
  return state;
}

Result<std::shared_ptr<Decoder::State>> load_state(const Checkpoint& checkpoint,
                                                   const DecoderOptions& options) {
  const ModelConfig& config = checkpoint.config();
  auto dense = load_dense(checkpoint, options);
  if (!dense) return dense.status();
  std::shared_ptr<Decoder::State> state = std::move(*dense);

  const PlanOptions plan_options{.max_tokens = options.max_tokens,
                                 .threads = state->options.threads,
                                 .precision = options.precision,
                                 .weights_only = options.weights_only,
                                 .debug_workspace = false,
                                 .batch_invariant = options.batch_invariant,
                                 .fast_accumulation = options.fast_accumulation,
                                 .kernel = {}};
  for (int i = 0; i < config.layers; ++i) {
    if (!config.is_moe[i]) continue;
    const std::string shared = checkpoint.shared_expert_module(i, Projection::gate);
    auto experts = load_experts(checkpoint, {.layer = i,
                                             .scheme = state->schemes.experts[static_cast<std::size_t>(i)],
                                             .device = options.device,
                                             .quantize = options.quantize,
                                             .plan = plan_options,
                                             .shared_scheme = state->schemes.other(shared)});
    if (!experts) return experts.status();
    auto plan = find_plan(state->plans, experts->spec(), plan_options, options.device);
    if (!plan) return plan.status();
    state->layers[i].experts = std::move(*experts);
    state->layers[i].plan = *plan;
  }
  return state;
}

Result<Decoder> Decoder::load(const Checkpoint& checkpoint, const DecoderOptions& options) {
  auto state = load_state(checkpoint, options);
  if (!state) return state.status();
  return Decoder(std::move(*state));
}

}  // namespace gatefold
