#include "gatefold/recommend.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <map>

#include "model/calibration_checks.h"
#include "model/least_loss.h"
#include "model/logits_store.h"
#include "model/text_stream.h"

namespace gatefold {
namespace {

constexpr std::uint64_t logits_memory = std::uint64_t{256} << 20;

/// The schemes to choose from.
Result<std::vector<SchemeId>> candidates(const MoeSpec& spec, const RecommendOptions& options) {
  std::vector<SchemeId> schemes;
  const bool activations = options.method == Method::smoothquant;
  for (std::size_t i = 0; options.schemes.empty() && i < all_schemes().size(); ++i) {
    const auto id = static_cast<SchemeId>(i);
    const Scheme& row = scheme(id);
    if (row.weight.quantized() && row.quantizes_activations() == activations &&
        check_shape(id, spec.intermediate, spec.hidden).ok() &&
        check_shape(id, spec.hidden, spec.intermediate).ok())
      schemes.push_back(id);
  }
  for (const SchemeId id : options.schemes) {
    if (!scheme(id).weight.quantized())
      return Status(Code::invalid_argument, fmt::format("{} does not quantize", scheme(id).name));
    if (std::find(schemes.begin(), schemes.end(), id) == schemes.end()) schemes.push_back(id);
  }
  if (schemes.empty()) return Status(Code::unsupported, "no scheme fits the model's experts");
  return schemes;
}

double bits_of(const MoeSpec& spec, std::uint64_t bytes) {
  return 8 * static_cast<double>(bytes) / static_cast<double>(expert_weights(spec));
}

/// The text, on which layers are calibrated (if at all) and measured.
class Measurement {
 public:
  Measurement(std::shared_ptr<const Decoder::State> model, std::span<const std::int32_t> tokens,
              const RecommendOptions& options, LogitsStore store)
      : model_(std::move(model)),
        options_(options),
        window_(options.calibrate.window),
        measured_(options.method ? tokens.subspan(fit_tokens(tokens.size(), window_)) : tokens),
        fit_(*model_, options.method ? tokens.first(fit_tokens(tokens.size(), window_)) : tokens.first(0),
             window_),
        here_(*model_, measured_, window_),
        ahead_(*model_, measured_, window_),
        store_(std::move(store)) {}

  /// Three quarters, in whole windows.
  static std::size_t fit_tokens(std::size_t tokens, int window) {
    const std::size_t windows = tokens / static_cast<std::size_t>(window);
    return windows * 3 / 4 * static_cast<std::size_t>(window);
  }

  Status run_unquantized() {
    return run_ahead(0, [&](std::int64_t first, std::int64_t rows, const float* logits) {
      std::copy_n(logits, rows * vocab(), store_.row(first));
    });
  }

  /// To the experts of a layer; and on, through them.
  Status enter(int layer) {
    Status status = here_.advance(layer);
    return status.ok() ? fit_.advance(layer) : status;
  }
  Status leave(int layer) {
    Status status = here_.pass_experts(layer);
    return status.ok() ? fit_.pass_experts(layer) : status;
  }

  /// The KL to the unquantized model, with the experts of this layer in the scheme.
  Result<double> measure(int layer, SchemeId id) {
    LayerOptions options{options_.calibrate, std::nullopt};
    options.scheme = id;
    if (options_.method) options.method = *options_.method;
    auto quantized = quantize_layer(layer, options);
    if (!quantized) return quantized.status();
    Stream stream = here_.stream();
    if (Status status = run_layer(model_->checkpoint, layer, options, *quantized, stream); !status.ok())
      return status;
    ahead_.stream() = std::move(stream);
    std::vector<double> sums;
    double kl = 0;
    const Status status =
        run_ahead(layer + 1, [&](std::int64_t first, std::int64_t rows, const float* logits) {
          sums.resize(static_cast<std::size_t>(rows));
#pragma omp parallel for num_threads(model_->options.threads)
          for (std::int64_t r = 0; r < rows; ++r)
            sums[r] = divergence(store_.row(first + r), logits + r * vocab(), vocab());
          for (const double sum : sums) kl += sum;
        });
    if (!status.ok()) return status;
    return kl / static_cast<double>(measured_.size() / static_cast<std::size_t>(window_) *
                                    static_cast<std::size_t>(window_));
  }

 private:
  std::int64_t vocab() const {
    return model_->checkpoint.config().vocab;
  }

  Result<QuantizedLayer> quantize_layer(int layer, const LayerOptions& options) {
    const auto cancelled = [&] { return options.cancelled && options.cancelled(); };
    if (!options_.method)
      return cancelled() ? Status(Code::io_error, "interrupted")
                         : rounded_layer(model_->checkpoint, layer, options.scheme, options_.quantize,
                                         options.threads);
    Stream stream = fit_.stream();
    return calibrate_layer(model_->checkpoint, layer, options, stream, [&] { return !cancelled(); });
  }

  /// Of `ahead_`, from the attention of a layer on.
  Status run_ahead(int layer, const std::function<void(std::int64_t, std::int64_t, const float*)>& visit) {
    const ModelConfig& config = model_->checkpoint.config();
    for (; layer < config.layers; ++layer) {
      Status status = ahead_.advance(layer);
      if (status.ok() && config.is_moe[layer]) status = ahead_.pass_experts(layer);
      if (!status.ok()) return status;
    }
    ahead_.logits(visit);
    return {};
  }

  std::shared_ptr<const Decoder::State> model_;
  const RecommendOptions& options_;
  const int window_;
  std::span<const std::int32_t> measured_;
  TextStream fit_, here_, ahead_;  // `ahead_` leaves `here_` with a quantized layer
  LogitsStore store_;
};

/// Marks what is chosen, and writes it down.
Status choose(const Checkpoint& source, const RecommendOptions& options, Recommendation& out) {
  const MoeSpec& spec = source.config().moe;
  std::map<int, std::vector<Option>> by_layer;
  std::map<int, std::vector<Sensitivity*>> rows;
  for (Sensitivity& row : out.measured) {
    by_layer[row.layer].push_back({row.bytes, row.kl});
    rows[row.layer].push_back(&row);
  }
  std::vector<std::vector<Option>> items;
  std::uint64_t least = 0;
  for (const auto& [layer, list] : by_layer) {
    items.push_back(list);
    least +=
        std::min_element(list.begin(), list.end(), [](auto& a, auto& b) { return a.size < b.size; })->size;
  }
  const double weights = static_cast<double>(expert_weights(spec)) * static_cast<double>(items.size());
  const auto choice = least_loss(items, static_cast<std::uint64_t>(options.budget * weights / 8));
  if (!choice)
    return {Code::invalid_argument,
            fmt::format("a budget of {} bits per weight: the smallest schemes need {:.4f}", options.budget,
                        8 * static_cast<double>(least) / weights)};
  std::map<SchemeId, std::string> layers;
  std::size_t item = 0;
  std::uint64_t bytes = 0;
  for (auto& [layer, list] : rows) {
    Sensitivity& chosen = *list[(*choice)[item++]];
    chosen.chosen = true;
    bytes += chosen.bytes;
    out.kl += chosen.kl;
    std::string& together = layers[chosen.scheme];
    together += fmt::format("{}{}", together.empty() ? "" : "|", layer);
  }
  out.bits_per_weight = 8 * static_cast<double>(bytes) / weights;
  for (const auto& [id, together] : layers)
    out.recipe.rules.push_back({source.experts_pattern(together), id});
  out.recipe.comment = fmt::format(
      "gatefold recommend, {}: {:.4f} bits per expert weight within {}, predicted KL {:.5f}",
      options.method ? name(*options.method) : "rtn", out.bits_per_weight, options.budget, out.kl);
  return {};
}

}  // namespace

Result<Recommendation> recommend(const Checkpoint& source, std::span<const std::int32_t> tokens,
                                 const RecommendOptions& given) {
  RecommendOptions options = given;
  const int window = options.calibrate.window;
  if (options.calibrate.threads == 0) options.calibrate.threads = omp_get_max_threads();
  if (Status status = check_calibration(source, tokens, options.calibrate); !status.ok()) return status;
  if (options.method && tokens.size() < 2 * static_cast<std::size_t>(window))
    return Status(Code::invalid_argument,
                  fmt::format("{} tokens: {} calibrates on some windows of {} and measures on others",
                              tokens.size(), name(*options.method), window));
  const ModelConfig& config = source.config();
  const auto schemes = candidates(config.moe, options);
  if (!schemes) return schemes.status();
  for (const SchemeId id : *schemes)
    if (options.method)
      if (Status status = check_method(scheme(id), *options.method); !status.ok()) return status;
  auto model = load_state(source, {.threads = options.calibrate.threads, .max_tokens = window});
  if (!model) return model.status();
  auto store = LogitsStore::create(tokens.size(), static_cast<std::uint64_t>(config.vocab), logits_memory);
  if (!store) return store.status();

  Measurement measurement(std::move(*model), tokens, options, std::move(*store));
  if (Status status = measurement.run_unquantized(); !status.ok()) return status;
  Recommendation out;
  const auto total = std::count(config.is_moe.begin(), config.is_moe.end(), true) *
                     static_cast<std::int64_t>(schemes->size());
  for (int layer = 0; layer < config.layers; ++layer) {
    if (Status status = measurement.enter(layer); !status.ok()) return status;
    if (!config.is_moe[layer]) continue;
    for (const SchemeId id : *schemes) {
      const auto kl = measurement.measure(layer, id);
      if (!kl) return kl.status();
      const std::uint64_t bytes = expert_bytes(config.moe, id);
      out.measured.push_back({layer, id, bytes, bits_of(config.moe, bytes), *kl, false});
      if (options.measured)
        options.measured(out.measured.back(), static_cast<std::int64_t>(out.measured.size()), total);
    }
    if (Status status = measurement.leave(layer); !status.ok()) return status;
  }
  if (Status status = choose(source, options, out); !status.ok()) return status;
  return out;
}

}  // namespace gatefold
