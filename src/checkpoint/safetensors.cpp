#include "checkpoint/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "checkpoint/json.h"

namespace gatefold {
namespace {

constexpr std::size_t max_rank = 64;
constexpr std::size_t max_metadata = 1 << 16;

/// Collects the entries; offsets stay relative to the data.
class HeaderVisitor final : public JsonVisitor {
 public:
  SafetensorsHeader header;

 private:
  enum Seen : unsigned { dtype = 1, shape = 2, offsets = 4, all = 7 };

  Status scalar(nlohmann::json value) override {
    if (depth() == 1)
      return error(in_metadata() ? "must be an object" : fmt::format("{} is no object", show_json(value)));
    if (in_metadata()) {
      if (!value.is_string())
        return error(fmt::format("{}: {} is no string", quote(key(1)), show_json(value)));
      if (header.metadata.size() == max_metadata)
        return error(fmt::format("more than {} entries", max_metadata));
      header.metadata.emplace(key(1), value.get<std::string>());
      return {};
    }
    if (depth() == 3) return element(value);
    if (key(1) != "dtype") return unexpected();
    const auto found =
        value.is_string() ? find_dtype(value.get_ref<const std::string&>()) : std::optional<DType>{};
    if (!found) return error(fmt::format("unknown dtype {}", show_json(value)));
    entry().dtype = *found;
    seen_ |= dtype;
    return {};
  }

  Status begin(bool is_object) override {
    if (depth() == 1) {
      if (!is_object) return error("an array, not an object");
      if (in_metadata()) return {};
      seen_ = 0;
      offsets_.clear();
      header.tensors.emplace_back().name = key(0);
      return {};
    }
    if (in_metadata()) return error(fmt::format("{} is no string", quote(key(1))));
    if (depth() > 2) return error(fmt::format("{} holds something else than numbers", quote(key(1))));
    if (is_object || (key(1) != "shape" && key(1) != "data_offsets")) return unexpected();
    seen_ |= key(1) == "shape" ? shape : offsets;
    return {};
  }

  Status end() override {
    if (depth() != 1 || in_metadata()) return {};
    if (seen_ != all)
      return error(fmt::format("no {}", !(seen_ & dtype)   ? "dtype"
                                        : !(seen_ & shape) ? "shape"
                                                           : "data_offsets"));
    if (offsets_.size() != 2)
      return error(fmt::format("data_offsets holds {} numbers, not 2", offsets_.size()));
    entry().begin = offsets_[0];
    entry().end = offsets_[1];
    return {};
  }

  Status element(const nlohmann::json& value) {
    constexpr auto limit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > limit)
      return error(
          fmt::format("{} holds {}, which is no integer in [0, {}]", key(1), show_json(value), limit));
    if (key(1) == "data_offsets") {
      if (offsets_.size() == 2) return error("data_offsets holds more than 2 numbers");
      offsets_.push_back(value.get<std::uint64_t>());
      return {};
    }
    if (entry().shape.size() == max_rank) return error(fmt::format("more than {} dimensions", max_rank));
    entry().shape.push_back(value.get<std::int64_t>());
    return {};
  }

  bool in_metadata() const { return key(0) == "__metadata__"; }
  TensorEntry& entry() { return header.tensors.back(); }
  Status unexpected() { return error(fmt::format("unexpected key or value at {}", quote(key(1)))); }
  Status error(const std::string& what) const {
    return {Code::bad_file, in_metadata() ? fmt::format("__metadata__: {}", what)
                                          : fmt::format("tensor {}: {}", quote(key(0)), what)};
  }

  unsigned seen_ = 0;
  std::vector<std::uint64_t> offsets_;
};

/// Bytes of a tensor; an error if they overflow or do not fill whole bytes.
Result<std::uint64_t> data_bytes(const TensorEntry& entry) {
  std::uint64_t bit_count = static_cast<std::uint64_t>(bits(entry.dtype));
  for (const std::int64_t size : entry.shape)
    if (__builtin_mul_overflow(bit_count, static_cast<std::uint64_t>(size), &bit_count))
      return Status{Code::bad_file, "the number of bits overflows"};
  if (bit_count % 8 != 0)
    return Status{Code::bad_file, fmt::format("{} bits do not fill whole bytes", bit_count)};
  return bit_count / 8;
}

/// No gaps, no overlap, every size as its shape says; ends where the file does.
Status check_layout(std::vector<TensorEntry>& tensors, std::uint64_t data_size) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t position = 0;
  for (const TensorEntry& entry : tensors) {
    const auto error = [&](const std::string& what) {
      return Status{Code::bad_file,
                    fmt::format("tensor {}: {} {}, data_offsets [{}, {}]: {}", quote(entry.name),
                                name(entry.dtype), entry.shape, entry.begin, entry.end, what)};
    };
    if (entry.end < entry.begin) return error("the end lies before the beginning");
    if (entry.begin != position)
      return error(fmt::format("the tensor before it ends at {}, so there is {}", position,
                               entry.begin < position ? "an overlap" : "a gap"));
    const auto expected = data_bytes(entry);
    if (!expected) return error(expected.status().message());
    if (entry.bytes() != *expected)
      return error(fmt::format("{} bytes, but dtype and shape need {}", entry.bytes(), *expected));
    if (entry.end > data_size)
      return error(fmt::format("the file has only {} bytes of data: it is truncated", data_size));
    position = entry.end;
  }
  if (position != data_size)
    return {Code::bad_file, fmt::format("{} bytes of data, but its tensors need {}", data_size, position)};
  return {};
}

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> bytes, std::uint64_t file_size,
                                                   const std::string& file) {
  const auto error = [&](const std::string& what) {
    return Status{Code::bad_file, file + ": not a safetensors file: " + what};
  };
  std::uint64_t header_size = 0;
  if (bytes.size() < sizeof header_size)
    return error(fmt::format("{} bytes; the length of the header alone takes 8", bytes.size()));
  std::memcpy(&header_size, bytes.data(), sizeof header_size);
  if (header_size > max_safetensors_header)
    return error(
        fmt::format("a header of {} bytes; at most {} are allowed", header_size, max_safetensors_header));
  if (header_size > bytes.size() - sizeof header_size)
    return error(fmt::format("a header of {} bytes, but the file has {}", header_size, file_size));

  HeaderVisitor visitor;
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + sizeof header_size, header_size);
  if (Status status = visitor.parse(text, file); !status.ok()) return status;
  const std::uint64_t data_begin = sizeof header_size + header_size;
  if (Status status = check_layout(visitor.header.tensors, file_size - data_begin); !status.ok())
    return Status{status.code(), file + ": " + status.message()};
  for (TensorEntry& entry : visitor.header.tensors) {
    entry.begin += data_begin;
    entry.end += data_begin;
  }
  return std::move(visitor.header);
}

}  // namespace gatefold
