#include "model/logits_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>

#include "model/loss.h"

namespace gatefold {

void Unmap::operator()(void* mapping) const {
  munmap(mapping, bytes);
}

Result<LogitsStore> LogitsStore::create(std::uint64_t rows, std::uint64_t vocab, std::uint64_t memory_bytes) {
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

}  // namespace gatefold
