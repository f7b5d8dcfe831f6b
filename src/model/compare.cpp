#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/eval.h"
#include "model/loss.h"

namespace gatefold {
namespace {

struct Unmap {
  std::uint64_t bytes = 0;
  void operator()(void* mapping) const { munmap(mapping, bytes); }
};

// Room for many rows of logits: memory, or a file without a name.
class LogitsStore {
 public:
  static Result<LogitsStore> create(std::uint64_t rows, std::uint64_t vocab, std::uint64_t memory_bytes) {
    const std::uint64_t bytes = rows * vocab * sizeof(float);
    LogitsStore store(vocab);
    if (bytes <= memory_bytes) {
      store.memory_.resize(rows * vocab);
      store.data_ = store.memory_.data();
      return store;
    }
    std::error_code error;
    const std::filesystem::path directory = std::filesystem::temp_directory_path(error);
    const auto failed = [&](const char* what, int reason) {
      return Status(Code::io_error, fmt::format("{} bytes for the unquantized model's logits in {}: {}: {}",
                                                bytes, directory.string(), what, std::strerror(reason)));
    };
    if (error) return failed("no temporary directory", error.value());
    std::string name = (directory / "gatefold-logits-XXXXXX").string();
    const int file = mkstemp(name.data());
    if (file < 0) return failed("cannot create a file", errno);
    unlink(name.c_str());
    // Reserved now: a write to a mapping that finds the disk full would be a signal, not an error.
    int reason = posix_fallocate(file, 0, static_cast<off_t>(bytes));
    void* mapping = MAP_FAILED;
    if (reason == 0) {
      mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (mapping == MAP_FAILED) reason = errno;
    }
    close(file);
    if (mapping == MAP_FAILED) return failed("cannot reserve them", reason);
    store.mapping_ = {mapping, Unmap{bytes}};
    store.data_ = static_cast<float*>(mapping);
    return store;
  }

  float* row(std::int64_t index) { return data_ + static_cast<std::uint64_t>(index) * vocab_; }

 private:
  explicit LogitsStore(std::uint64_t vocab) : vocab_(vocab) {}

  std::uint64_t vocab_;
  std::vector<float> memory_;
  std::unique_ptr<void, Unmap> mapping_;
  float* data_ = nullptr;
};

// sum p (log p - log q), p and q the softmax of two rows of logits.
double divergence(const float* p_logits, const float* q_logits, std::int64_t count) {
  const double p_norm = log_sum_exp(p_logits, count);
  const double q_norm = log_sum_exp(q_logits, count);
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double log_p = p_logits[i] - p_norm;
    sum += std::exp(log_p) * (log_p - (q_logits[i] - q_norm));
  }
  return sum;
}

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
  if (schemes.empty() && options.others.empty())
    for (std::size_t i = 0; i < all_schemes().size(); ++i) schemes.push_back(static_cast<SchemeId>(i));

  const std::uint64_t rows = tokens.size() / options.window * (options.window - 1);
  auto store = LogitsStore::create(rows, checkpoint.config().vocab, options.memory_bytes);
  if (!store) return store.status();

  const auto run = [&](const Checkpoint& of, std::optional<SchemeId> id, bool is_base) -> CompareRow {
    CompareRow row;
    DecoderOptions decoder_options = options.decoder;
    decoder_options.scheme = id;
    const auto decoder = Decoder::load(of, decoder_options);
    row.scheme = decoder ? decoder->scheme() : id.value_or(*stored);
    row.name = id ? scheme(*id).name : of.directory().string();
    if (decoder && decoder->config().vocab != checkpoint.config().vocab)
      row.status = {Code::invalid_argument,
                    fmt::format("{} has a vocabulary of {}, {} one of {}", row.name, decoder->config().vocab,
                                checkpoint.directory().string(), checkpoint.config().vocab)};
    else
      row.status = decoder ? measure(*decoder, tokens, options, is_base, *store, row) : decoder.status();
    return row;
  };
  const CompareRow base = run(checkpoint, *stored, true);
  if (!base.status.ok()) return base.status;
  std::vector<CompareRow> result;
  const auto add = [&](CompareRow row) {
    result.push_back(std::move(row));
    if (options.on_row) options.on_row(result.back());
  };
  for (const SchemeId id : schemes) add(id == *stored ? base : run(checkpoint, id, false));
  for (const Checkpoint& other : options.others) add(run(other, std::nullopt, false));
  return result;
}

}  // namespace gatefold
