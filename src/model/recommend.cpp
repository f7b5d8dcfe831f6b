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
        calibrated_(options.method ? tokens.first(fit_tokens(tokens.size(), window_)) : tokens.first(0)),
        fit_(*model_, calibrated_, window_),
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
    ahead_.stream() = here_.stream();
    Stream calibrated = fit_.stream();
    if (Status status = quantize_layer(layer, id, calibrated, ahead_.stream()); !status.ok()) return status;
    return divergence_ahead(layer + 1);
  }

  /// The same with all layers in their schemes, quantized one after the other.
  Result<double> measure(const std::map<int, SchemeId>& schemes) {
    ahead_ = TextStream(*model_, measured_, window_);
    TextStream fit(*model_, calibrated_, window_);
    for (int layer = 0; layer < model_->checkpoint.config().layers; ++layer) {
      Status status = ahead_.advance(layer);
      if (status.ok()) status = fit.advance(layer);
      if (const auto found = schemes.find(layer); status.ok() && found != schemes.end())
        status = quantize_layer(layer, found->second, fit.stream(), ahead_.stream());
      if (!status.ok()) return status;
    }
    return divergence_ahead(model_->checkpoint.config().layers);
  }

 private:
  Result<double> divergence_ahead(int layer) {
    std::vector<double> sums;
    double kl = 0;
    const Status status = run_ahead(layer, [&](std::int64_t first, std::int64_t rows, const float* logits) {
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

  std::int64_t vocab() const {
    return model_->checkpoint.config().vocab;
  }

  /// Quantizes the experts of a layer, and takes both streams through them; without a method, one.
  Status quantize_layer(int layer, SchemeId id, Stream& calibrated, Stream& measured) {
    LayerOptions options{options_.calibrate, std::nullopt};
    options.scheme = id;
    if (options_.method) options.method = *options_.method;
    const auto cancelled = [&] { return options.cancelled && options.cancelled(); };
    if (cancelled()) return {Code::io_error, "interrupted"};
    const auto quantized =
        options_.method
            ? calibrate_layer(model_->checkpoint, layer, options, calibrated, [&] { return !cancelled(); })
            : rounded_layer(model_->checkpoint, layer, id, options_.quantize, options.threads);
    return quantized ? run_layer(model_->checkpoint, layer, options, *quantized, measured)
                     : quantized.status();
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
  std::span<const std::int32_t> measured_, calibrated_;
  TextStream fit_, here_, ahead_;  // `ahead_` leaves `here_` with a quantized layer
  LogitsStore store_;
};

/// What was measured, as a choice of one option for each layer.
struct Choices {
  std::vector<std::vector<Sensitivity*>> rows;
  std::vector<std::vector<Option>> items;
  std::uint64_t budget = 0;  ///< bytes
  std::vector<std::vector<std::size_t>> found;
};

/// The best choice, and others that may be better as a whole: at most `count` in all, one at least.
Result<Choices> best_choices(const MoeSpec& spec, const RecommendOptions& options,
                             std::vector<Sensitivity>& measured) {
  Choices all;
  std::uint64_t least = 0;
  for (std::size_t i = 0; i < measured.size(); ++i) {
    if (i == 0 || measured[i].layer != measured[i - 1].layer)
      all.rows.emplace_back(), all.items.emplace_back();
    all.rows.back().push_back(&measured[i]);
    all.items.back().push_back({measured[i].bytes, measured[i].kl});
  }
  for (const auto& list : all.items)
    least +=
        std::min_element(list.begin(), list.end(), [](auto& a, auto& b) { return a.size < b.size; })->size;
  const double weights = static_cast<double>(expert_weights(spec)) * static_cast<double>(all.items.size());
  all.budget = static_cast<std::uint64_t>(options.budget * weights / 8);
  const auto best = least_loss(all.items, all.budget);
  if (!best)
    return Status(Code::invalid_argument,
                  fmt::format("a budget of {} bits per weight: the smallest schemes need {:.4f}",
                              options.budget, 8 * static_cast<double>(least) / weights));
  all.found = {*best};
  if (options.whole < 2) return all;
  // All layers in one scheme: rows have the same schemes in the same order.
  std::optional<std::size_t> single;
  double least_kl = 0;
  for (std::size_t i = 0; !all.items.empty() && i < all.items[0].size(); ++i) {
    std::uint64_t bytes = 0;
    double kl = 0;
    for (const auto& list : all.items) bytes += list[i].size, kl += list[i].loss;
    if (bytes <= all.budget && (!single || kl < least_kl)) single = i, least_kl = kl;
  }
  if (single) {
    const std::vector<std::size_t> choice(all.items.size(), *single);
    if (choice != *best) all.found.push_back(choice);
  }
  for (auto& choice : near_choices(all.items, all.budget, *best, static_cast<std::size_t>(options.whole)))
    if (all.found.size() < static_cast<std::size_t>(options.whole) &&
        std::find(all.found.begin(), all.found.end(), choice) == all.found.end())
      all.found.push_back(std::move(choice));
  return all;
}

/// Marks what is chosen, and writes it down.
void choose(const Checkpoint& source, const RecommendOptions& options, const Choices& choices,
            const std::vector<std::size_t>& choice, Recommendation& out) {
  std::map<SchemeId, std::string> layers;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < choice.size(); ++i) {
    Sensitivity& chosen = *choices.rows[i][choice[i]];
    chosen.chosen = true;
    bytes += chosen.bytes;
    out.kl += chosen.kl;
    std::string& together = layers[chosen.scheme];
    together += fmt::format("{}{}", together.empty() ? "" : "|", chosen.layer);
  }
  const MoeSpec& spec = source.config().moe;
  out.bits_per_weight = 8 * static_cast<double>(bytes) /
                        (static_cast<double>(expert_weights(spec)) * static_cast<double>(choice.size()));
  for (const auto& [id, together] : layers)
    out.recipe.rules.push_back({source.experts_pattern(together), id});
  out.recipe.comment =
      fmt::format("gatefold recommend, {}: {:.4f} bits per expert weight within {}, {} KL {:.5f}",
                  options.method ? name(*options.method) : "rtn", out.bits_per_weight, options.budget,
                  out.whole_kl ? "measured" : "predicted", out.whole_kl.value_or(out.kl));
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
                         static_cast<std::int64_t>(schemes->size()) +
                     options.whole;
  std::int64_t done = 0;
  const auto step = [&] {
    if (options.progress) options.progress(++done, total);
  };
  for (int layer = 0; layer < config.layers; ++layer) {
    if (Status status = measurement.enter(layer); !status.ok()) return status;
    if (!config.is_moe[layer]) continue;
    for (const SchemeId id : *schemes) {
      const auto kl = measurement.measure(layer, id);
      if (!kl) return kl.status();
      const std::uint64_t bytes = expert_bytes(config.moe, id);
      out.measured.push_back({layer, id, bytes, bits_of(config.moe, bytes), *kl, false});
      step();
    }
    if (Status status = measurement.leave(layer); !status.ok()) return status;
  }
  const auto choices = best_choices(config.moe, options, out.measured);
  if (!choices) return choices.status();
  const std::vector<std::size_t>* best = &choices->found[0];
  for (const auto& choice : choices->found) {
    if (options.whole == 0) break;
    std::map<int, SchemeId> of_layers;
    for (std::size_t i = 0; i < choice.size(); ++i)
      of_layers[choices->rows[i][choice[i]]->layer] = choices->rows[i][choice[i]]->scheme;
    const auto kl = measurement.measure(of_layers);
    if (!kl) return kl.status();
    if (!out.whole_kl || *kl < *out.whole_kl) out.whole_kl = *kl, best = &choice;
    step();
  }
  choose(source, options, *choices, *best, out);
  return out;
}

}  // namespace gatefold
