#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string>
#include <type_traits>

#include "checkpoint/mapped_file.h"
#include "checkpoint/safetensors.h"
#include "gatefold/decoder.h"

namespace gatefold {
namespace {

// Whole numbers of one type, as a file holds them.
struct Numbers {
  std::span<const std::byte> data;
  DType dtype = DType::i32;
};

Status bad_file(const std::filesystem::path& file, const std::string& what) {
  return {Code::bad_file, fmt::format("{}: {}", file.string(), what)};
}

// [n] or [1, n].
bool is_list(const std::vector<std::int64_t>& shape) {
  return shape.size() == 1 || (shape.size() == 2 && shape[0] == 1);
}

// The header of a .npy file is a Python dictionary: {'descr': '<i4', 'fortran_order': False, 'shape': (3,),
// }. NumPy writes exactly this form.
class NpyHeader {
 public:
  explicit NpyHeader(std::string_view text) : rest_(text) {}

  bool parse() {
    if (!take("{")) return false;
    bool seen[3] = {};
    while (!take("}")) {
      if (take("'descr'") && !seen[0]) {
        seen[0] = take(":") && string(descr);
        if (!seen[0]) return false;
      } else if (take("'fortran_order'") && !seen[1]) {
        if (!take(":") || !(take("False") || take("True"))) return false;
        seen[1] = true;
      } else if (take("'shape'") && !seen[2]) {
        seen[2] = take(":") && tuple(shape);
        if (!seen[2]) return false;
      } else {
        return false;
      }
      if (!take(",")) {
        if (!take("}")) return false;
        break;
      }
    }
    space();
    return seen[0] && seen[1] && seen[2] && rest_.empty();
  }

  std::string descr;
  std::vector<std::int64_t> shape;

 private:
  void space() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\n')) rest_.remove_prefix(1);
  }
  bool take(std::string_view token) {
    space();
    if (rest_.substr(0, token.size()) != token) return false;
    rest_.remove_prefix(token.size());
    return true;
  }
  bool string(std::string& out) {
    if (!take("'")) return false;
    const std::size_t end = rest_.find('\'');
    if (end == std::string_view::npos) return false;
    out = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    return true;
  }
  bool tuple(std::vector<std::int64_t>& out) {
    if (!take("(")) return false;
    while (!take(")")) {
      space();
      std::int64_t number = 0;
      std::size_t digits = 0;
      for (; digits < rest_.size() && rest_[digits] >= '0' && rest_[digits] <= '9'; ++digits) {
        if (digits == 18) return false;
        number = number * 10 + (rest_[digits] - '0');
      }
      if (digits == 0 || out.size() == 32) return false;
      rest_.remove_prefix(digits);
      out.push_back(number);
      if (!take(",")) return take(")");
    }
    return true;
  }

  std::string_view rest_;
};

// Magic, version, length of the header (2 bytes; from version 2 on 4), header, data.
Result<Numbers> read_npy(const std::filesystem::path& file, std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.size() < 10 || text.substr(0, 6) != "\x93NUMPY") return bad_file(file, "not a .npy file");
  const int version = static_cast<unsigned char>(text[6]);
  if (version < 1 || version > 3) return bad_file(file, fmt::format(".npy version {} is unknown", version));
  const std::size_t begin = version == 1 ? 10 : 12;
  std::uint32_t header_size = 0;
  if (text.size() >= begin) std::memcpy(&header_size, text.data() + 8, begin - 8);
  if (text.size() < begin || header_size > text.size() - begin)
    return bad_file(file, fmt::format("a header of {} bytes in a file of {}", header_size, text.size()));
  NpyHeader header(text.substr(begin, header_size));
  if (!header.parse()) return bad_file(file, "the .npy header is not as NumPy writes it");
  if (!is_list(header.shape))
    return bad_file(file, fmt::format("shape {}: token ids must be [n] or [1, n]", header.shape));

  constexpr std::pair<std::string_view, DType> types[] = {
      {"|u1", DType::u8},  {"|i1", DType::i8},  {"<u2", DType::u16}, {"<i2", DType::i16},
      {"<u4", DType::u32}, {"<i4", DType::i32}, {"<u8", DType::u64}, {"<i8", DType::i64}};
  const auto* type = std::find_if(std::begin(types), std::end(types),
                                  [&](const auto& entry) { return entry.first == header.descr; });
  if (type == std::end(types))
    return bad_file(file, fmt::format("type '{}': token ids must be little-endian integers", header.descr));
  const auto data = bytes.subspan(begin + header_size);
  const std::size_t size = bits(type->second) / 8;
  const auto count = static_cast<std::size_t>(header.shape.back());
  if (data.size() % size != 0 || data.size() / size != count)
    return bad_file(file,
                    fmt::format("{} bytes of data for {} numbers of {} bytes", data.size(), count, size));
  return Numbers{data, type->second};
}

Result<Numbers> read_safetensors(const std::filesystem::path& file, std::span<const std::byte> bytes) {
  const auto header = parse_safetensors_header(bytes, bytes.size(), file.string());
  if (!header) return header.status();
  if (header->tensors.size() != 1)
    return bad_file(file, fmt::format("{} tensors: token ids must be the only one", header->tensors.size()));
  const TensorEntry& entry = header->tensors[0];
  if (!is_list(entry.shape))
    return bad_file(file,
                    fmt::format("tensor {} is {}: token ids must be [n] or [1, n]", entry.name, entry.shape));
  return Numbers{bytes.subspan(entry.begin, entry.bytes()), entry.dtype};
}

template <class T>
Result<std::vector<std::int32_t>> convert(const std::filesystem::path& file, std::span<const std::byte> data,
                                          int vocab) {
  std::vector<std::int32_t> tokens(data.size() / sizeof(T));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    T value;
    std::memcpy(&value, data.data() + i * sizeof(T), sizeof(T));
    bool inside = static_cast<std::uint64_t>(value) < static_cast<std::uint64_t>(vocab);
    if constexpr (std::is_signed_v<T>) inside = inside && value >= 0;
    if (!inside) return bad_file(file, fmt::format("token {} is {}: not in [0, {})", i, value, vocab));
    tokens[i] = static_cast<std::int32_t>(value);
  }
  return tokens;
}

}  // namespace

Result<std::vector<std::int32_t>> read_tokens(const std::filesystem::path& file, int vocab) {
  const auto mapped = MappedFile::open(file);
  if (!mapped) return mapped.status();
  const bool is_npy = file.extension() == ".npy";
  if (!is_npy && file.extension() != ".safetensors")
    return Status(Code::invalid_argument,
                  fmt::format("{}: token ids come from a .npy or .safetensors file", file.string()));
  const auto numbers = is_npy ? read_npy(file, mapped->bytes()) : read_safetensors(file, mapped->bytes());
  if (!numbers) return numbers.status();
  switch (numbers->dtype) {
    case DType::u8:
      return convert<std::uint8_t>(file, numbers->data, vocab);
    case DType::i8:
      return convert<std::int8_t>(file, numbers->data, vocab);
    case DType::u16:
      return convert<std::uint16_t>(file, numbers->data, vocab);
    case DType::i16:
      return convert<std::int16_t>(file, numbers->data, vocab);
    case DType::u32:
      return convert<std::uint32_t>(file, numbers->data, vocab);
    case DType::i32:
      return convert<std::int32_t>(file, numbers->data, vocab);
    case DType::u64:
      return convert<std::uint64_t>(file, numbers->data, vocab);
    case DType::i64:
      return convert<std::int64_t>(file, numbers->data, vocab);
    default:
      return bad_file(file, fmt::format("token ids are {}: not integers", name(numbers->dtype)));
  }
}

bool is_byte_level(const Checkpoint& checkpoint) {
  std::error_code ignored;
  return checkpoint.config().vocab == 256 &&
         !std::filesystem::exists(checkpoint.directory() / "tokenizer.json", ignored);
}

Result<std::vector<std::int32_t>> text_tokens(const Checkpoint& checkpoint, std::string_view text) {
  if (!is_byte_level(checkpoint))
    return Status(
        Code::invalid_argument,
        fmt::format("{} (vocab {}) needs a tokenizer, which gatefold does not have: give token ids in "
                    "a .npy or .safetensors file (--tokens, --calibration)",
                    checkpoint.config().model_type, checkpoint.config().vocab));
  std::vector<std::int32_t> tokens;
  tokens.reserve(text.size());
  for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
  return tokens;
}

}  // namespace gatefold
