#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "model/eval.h"
#include "model/logits_store.h"
#include "model/loss.h"

namespace gatefold {
namespace {

// One model over all windows. The base writes `store`, the others are measured against it.
Status measure(const Decoder& decoder, std::span<const std::int32_t> tokens, const CompareOptions& options,
               bool is_base, LogitsStore& store, CompareRow& row) {
  const std::int64_t vocab = decoder.config().vocab;
  double kl = 0;
  std::int64_t same = 0;
  std::vector<double> divergences;
  const auto visit = [&](const Predictions& predictions) {
    if (is_base) {
      std::copy_n(predictions.logits, predictions.rows * vocab, store.row(predictions.first));
      same += predictions.rows;
      return;
    }
    divergences.resize(predictions.rows);
#pragma omp parallel for num_threads(decoder.threads()) reduction(+ : same)
    for (std::int64_t r = 0; r < predictions.rows; ++r) {
      const float* base = store.row(predictions.first + r);
      const float* logits = predictions.logits + r * vocab;
      divergences[r] = divergence(base, logits, vocab);
      same += argmax(base, vocab) == argmax(logits, vocab);
    }
    for (const double value : divergences) kl += value;
  };
  const auto progress = [&](std::int64_t done, std::int64_t total) {
    if (options.progress) options.progress(row.name, done, total);
  };
  auto loss = run_windows(decoder, tokens, options.window, visit, progress);
  if (!loss) return loss.status();
  row.loss = *loss;
  row.expert_bytes = decoder.expert_bytes();
  if (decoder.expert_weights() > 0)
    row.bits_per_weight =
        8 * static_cast<double>(row.expert_bytes) / static_cast<double>(decoder.expert_weights());
  row.kl = kl / static_cast<double>(loss->tokens);
  row.top1_agreement = static_cast<double>(same) / static_cast<double>(loss->tokens);
  row.tokens_per_second =
      static_cast<double>(tokens.size() / options.window * options.window) / loss->seconds;
  return {};
}

}  // namespace

Result<std::vector<CompareRow>> compare(const Checkpoint& checkpoint, std::span<const std::int32_t> tokens,
                                        const CompareOptions& options) {
  if (Status status = check_windows(tokens, options.window); !status.ok()) return status;
  const auto stored = checkpoint.stored_scheme();
  if (!stored) return stored.status();
  if (scheme(*stored).weight.quantized())
    return Status(Code::invalid_argument,
                  fmt::format("{}: its experts are {} already: compare needs the unquantized model",
                              checkpoint.directory().string(), scheme(*stored).name));
  std::vector<SchemeId> schemes = options.schemes;
  if (schemes.empty() && options.others.empty() && options.recipes.empty())
    for (std::size_t i = 0; i < all_schemes().size(); ++i) schemes.push_back(static_cast<SchemeId>(i));

  const std::uint64_t rows = tokens.size() / options.window * (options.window - 1);
  auto store = LogitsStore::create(rows, checkpoint.config().vocab, options.memory_bytes);
  if (!store) return store.status();

  const auto run = [&](const Checkpoint& of, std::string name, std::optional<SchemeId> id,
                       const std::optional<Recipe>& recipe, bool is_base = false) -> CompareRow {
    CompareRow row;
    DecoderOptions decoder_options = options.decoder;
    decoder_options.scheme = id;
    decoder_options.recipe = recipe;
    const auto decoder = Decoder::load(of, decoder_options);
    row.scheme = decoder ? decoder->scheme() : id.value_or(*stored);
    row.schemes = decoder ? decoder->schemes() : name;
    row.name = std::move(name);
    if (decoder && decoder->config().vocab != checkpoint.config().vocab)
      row.status = {Code::invalid_argument,
                    fmt::format("{} has a vocabulary of {}, {} one of {}", row.name, decoder->config().vocab,
                                checkpoint.directory().string(), checkpoint.config().vocab)};
    else
      row.status = decoder ? measure(*decoder, tokens, options, is_base, *store, row) : decoder.status();
    return row;
  };
  const auto with_scheme = [&](SchemeId id, bool is_base) {
    return run(checkpoint, std::string(scheme(id).name), id, std::nullopt, is_base);
  };
  const CompareRow base = with_scheme(*stored, true);
  if (!base.status.ok()) return base.status;
  std::vector<CompareRow> result;
  const auto add = [&](CompareRow row) {
    result.push_back(std::move(row));
    if (options.on_row) options.on_row(result.back());
  };
  for (const SchemeId id : schemes) add(id == *stored ? base : with_scheme(id, false));
  for (const Recipe& recipe : options.recipes) add(run(checkpoint, recipe.name, std::nullopt, recipe));
  for (const Checkpoint& other : options.others)
    add(run(other, other.directory().string(), std::nullopt, std::nullopt));
  return result;
}

}  // namespace gatefold
