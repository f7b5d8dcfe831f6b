// GPTQ (AutoGPTQ, GPTQModel): <module>.qweight I32 [K bits / 32, N], packed down the columns; .qzeros I32
// [groups, N bits / 32], packed along the rows; .scales [groups, N]; .g_idx I32 [K], the group of each
// column. W[n][k] = (q - z) * s[g_idx[k]][n]. Version 1 stores z - 1, version 2 stores z.

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoint/companion_reader.h"
#include "checkpoint/config.h"
#include "checkpoint/conventions.h"
#include "checkpoint/fields.h"
#include "checkpoint/integer_matrix.h"
#include "checkpoint/json.h"
#include "checkpoint/name_pattern.h"

namespace gatefold {
namespace {

constexpr std::string_view kSuffixes[] = {".qweight", ".qzeros", ".scales", ".g_idx", ".bias", ".weight"};
constexpr LayerSuffixes kLayer{.all = kSuffixes, .companions = std::span(kSuffixes).first(3)};

struct Options {
  IntegerFormat format;
  bool act_order = false;
};

/// An entry of `dynamic`: other options for the modules that a pattern matches.
struct Override {
  NamePattern pattern;
  Options options;
};

struct Config {
  Options options;
  int version = 1;
  std::vector<Override> overrides;
};

Options read_options(Fields& fields, const Options& otherwise) {
  Options options;
  options.format.bits = fields.integer({"bits"}, {2, 8}, otherwise.format.bits);
  options.format.symmetric = fields.boolean({"sym"}, otherwise.format.symmetric);
  const int group =
      fields.integer({"group_size"}, {-1, 1 << 20},
                     otherwise.format.group == 0 ? -1 : static_cast<int>(otherwise.format.group));
  options.format.group = group == -1 ? 0 : group;
  options.act_order = fields.boolean({"desc_act"}, otherwise.act_order);
  const int bits = options.format.bits;
  if (bits != 2 && bits != 3 && bits != 4 && bits != 8)
    fields.fail(fmt::format("bits is {}; 2, 3, 4 and 8 are known", bits), Code::unsupported);
  if (group == 0) fields.fail("group_size is 0");
  return options;
}

Result<Config> read_config(const nlohmann::json& quantization, const std::string& config) {
  Config parsed;
  Fields fields(quantization, quantization_of(config));
  for (const std::string_view key : {"bits", "group_size"})
    if (!fields.has(key)) fields.fail(fmt::format("no {}", key));
  parsed.options = read_options(fields, {});
  const std::string format = fields.text({"checkpoint_format", "format"}, "gptq");
  if (format != "gptq" && format != "gptq_v2")
    fields.fail(fmt::format("checkpoint_format is {}; gptq and gptq_v2 are known", quote(format)),
                Code::unsupported);
  parsed.version = format == "gptq_v2" ? 2 : 1;
  if (const std::string type = fields.text({"pack_dtype"}, "int32"); type != "int32")
    fields.fail(fmt::format("pack_dtype is {}; int32 is known", quote(type)), Code::unsupported);
  const nlohmann::json* dynamic = fields.array({ordered_key});
  if (!fields.status().ok()) return fields.status();
  if (dynamic == nullptr) return parsed;
  for (const nlohmann::json& entry : *dynamic) {
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string())
      return Status(Code::bad_file, fmt::format("{}.dynamic has {}", fields.where(), show_json(entry)));
    const std::string key = entry[0].get<std::string>();
    const nlohmann::json& value = entry[1];
    if (key.starts_with("-:")) continue;  // leaves modules unquantized: their tensors say so
    const std::string where = fmt::format("{}.dynamic[{}]", fields.where(), quote(key));
    auto pattern = NamePattern::compile(std::string_view(key).substr(key.starts_with("+:") ? 2 : 0));
    if (!pattern) return Status(pattern.status().code(), where + ": " + pattern.status().message());
    if (!value.is_object()) return Status(Code::bad_file, where + " is not an object");
    Fields override(value, where);
    parsed.overrides.push_back({std::move(*pattern), read_options(override, parsed.options)});
    if (!override.status().ok()) return override.status();
  }
  return parsed;
}

struct Parts {
  QuantizedMatrix matrix;
  Options options;
  const TensorEntry *codes = nullptr, *zeros = nullptr, *scales = nullptr, *groups = nullptr;
};

class Reader final : public CompanionReader<Parts> {
 public:
  Reader(const Source& source, const ModelConfig& model, std::string config, Config parsed)
      : CompanionReader(source, model, std::move(config), kLayer), parsed_(std::move(parsed)) {}

  std::optional<Quantized> quantized(const std::string& module) const override {
    const TensorEntry* codes = entry(module, ".qweight");
    const TensorEntry* scales = entry(module, ".scales");
    if (codes == nullptr || codes->shape.size() != 2) return std::nullopt;
    const int bits = options(module).format.bits;
    const TensorEntry* groups = entry(module, ".g_idx");
    const std::int64_t k =
        groups != nullptr && groups->shape.size() == 1 ? groups->shape[0] : codes->shape[0] * 32 / bits;
    const bool ordered = options(module).act_order;
    return Quantized{codes->shape[1], k,
                     fmt::format("gptq v{}, {} bits{}{}{}", parsed_.version, bits,
                                 options(module).format.symmetric ? "" : ", zero points",
                                 ordered ? ", act-order" : "", scales == nullptr ? ", no scales" : "")};
  }

 private:
  Status load(const Linear& linear, Parts& parts) const override {
    auto order = groups_of(parts, linear.k);
    if (!order) return order.status();

    const std::int64_t n = linear.n, k = linear.k;
    const IntegerFormat& format = parts.options.format;
    IntegerSource from;
    from.format = format;
    from.scale_format = wide_format(parts.scales->dtype);
    from.scales =
        transpose(source_.view(*parts.scales).data, format.groups(k), n, from.scale_format.bits / 8);
    from.group_of = std::move(*order);
    auto zeros = read_zeros(parts, linear);
    if (!zeros) return zeros.status();
    const std::byte* words = source_.view(*parts.codes).data;
    from.rows = [&](std::int64_t first, std::int64_t count, std::uint8_t* codes) {
      unpack(words, n, k, format.bits, first, count, codes);
    };
    if (Status status = check_version(parts, linear, from, *zeros); !status.ok()) return status;
    if (!format.symmetric) from.zeros = std::move(*zeros);
    auto matrix = integer_matrix(parts.matrix.scheme, n, k, from);
    if (!matrix)
      return Status(matrix.status().code(),
                    source_.where(parts.groups == nullptr ? *parts.codes : *parts.groups) + ": " +
                        matrix.status().message());
    parts.matrix = std::move(*matrix);
    return {};
  }

  Result<std::vector<std::int32_t>> input_order(const Linear& linear, const Parts& parts) const override {
    const auto groups = groups_of(parts, linear.k);
    if (!groups) return groups.status();
    if (groups->empty()) return std::vector<std::int32_t>();
    return column_order(*groups, parts.options.format.groups(linear.k));
  }

  const Options& options(const std::string& module) const {
    for (const Override& entry : parsed_.overrides)
      if (entry.pattern.matches(module)) return entry.options;
    return parsed_.options;
  }

  Result<Parts> find(const Linear& linear) const override {
    Parts parts;
    parts.options = options(linear.module);
    const IntegerFormat& format = parts.options.format;
    const std::int64_t groups = format.groups(linear.k);
    TensorFinder finder(source_, linear,
                        fmt::format("{} (gptq, bits {}, group_size {})", quantization_of(config_),
                                    format.bits, format.group == 0 ? -1 : format.group));
    finder.refuse(".weight", "there is a qweight too");
    parts.codes = finder.require(".qweight", {words(linear.k, format.bits), linear.n}, kI32);
    parts.scales = finder.require(".scales", {groups, linear.n}, kWideDtypes);
    parts.zeros = finder.require(".qzeros", {groups, words(linear.n, format.bits)}, kI32);
    // A short last group looks like other groups: only g_idx says which.
    const bool is_short = format.group != 0 && linear.k % format.group != 0;
    if (finder.has(".g_idx") || parts.options.act_order || is_short)
      parts.groups = finder.require(".g_idx", {linear.k}, kI32);
    if (linear.k * format.bits % 32 != 0 || linear.n * format.bits % 32 != 0)
      finder.fail(Code::unsupported, fmt::format("{} x {} codes of {} bits do not fill whole words", linear.n,
                                                 linear.k, format.bits));
    if (!finder.status().ok()) return finder.status();
    const std::int64_t sizes[] = {linear.k, model_.moe.hidden, model_.moe.intermediate};
    const auto row = integer_row(format, {}, expert_sizes(sizes, linear, model_));
    if (!row) return Status(row.status().code(), quantization_of(config_) + ": " + row.status().message());
    parts.matrix = matrix_of(*row, linear);
    return parts;
  }

  static std::int64_t words(std::int64_t count, int bits) { return (count * bits + 31) / 32; }

  /// The group of each column; empty: in runs, as without act-order.
  Result<std::vector<std::int32_t>> groups_of(const Parts& parts, std::int64_t k) const {
    if (parts.groups == nullptr) return std::vector<std::int32_t>();
    std::vector<std::int32_t> groups = read_i32(source_, *parts.groups);
    const IntegerFormat& format = parts.options.format;
    const auto order = column_order(groups, format.groups(k));
    if (!order) return Status(Code::bad_file, source_.where(*parts.groups) + ": " + order.status().message());
    bool in_runs = true;
    for (std::int64_t i = 0; i < k; ++i)
      in_runs &= groups[static_cast<std::size_t>(i)] == (format.group == 0 ? 0 : i / format.group);
    if (in_runs) return std::vector<std::int32_t>();
    if (!parts.options.act_order)
      return Status(Code::bad_file,
                    fmt::format("{}: groups are not runs of {} columns, but {}: desc_act is false",
                                source_.where(*parts.groups), format.group, quantization_of(config_)));
    return groups;
  }

  /// [n, groups]; z - 1 wraps around in version 1.
  Result<std::vector<std::uint8_t>> read_zeros(const Parts& parts, const Linear& linear) const {
    const IntegerFormat& format = parts.options.format;
    const std::int64_t groups = format.groups(linear.k), row = words(linear.n, format.bits);
    const std::byte* data = source_.view(*parts.zeros).data;
    std::vector<std::uint8_t> zeros(static_cast<std::size_t>(linear.n * groups));
    const std::uint32_t mask = (1u << format.bits) - 1;
    for (std::int64_t g = 0; g < groups; ++g)
      for (std::int64_t n = 0; n < linear.n; ++n) {
        const std::uint32_t stored = dense_code(data + g * row * 4, 1, format.bits, n);
        const std::uint32_t zero = (stored + (parsed_.version == 1 ? 1 : 0)) & mask;
        zeros[static_cast<std::size_t>(n * groups + g)] = static_cast<std::uint8_t>(zero);
        if (format.symmetric && zero != format.middle())
          return Status(
              Code::bad_file,
              fmt::format("{}: holds {} for row {}, group {}, but {} says sym true and checkpoint_format "
                          "{}, which makes all {}",
                          source_.where(*parts.zeros), stored, n, g, quantization_of(config_),
                          parsed_.version == 1 ? "gptq" : "gptq_v2",
                          format.middle() - (parsed_.version == 1 ? 1 : 0)));
      }
    return zeros;
  }

  /// Zero points that belong to the other version are off by one, and so are all weights: their mean shows
  /// it.
  Status check_version(const Parts& parts, const Linear& linear, const IntegerSource& from,
                       const std::vector<std::uint8_t>& zeros) const {
    const IntegerFormat& format = parts.options.format;
    if (format.symmetric) return {};
    const std::int64_t groups = format.groups(linear.k);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(linear.k));
    double sum = 0, squares = 0, count = 0;
    for (std::int64_t n = 0; n < linear.n; n += std::max<std::int64_t>(1, linear.n / 256)) {
      from.rows(n, 1, codes.data());
      for (std::int64_t k = 0; k < linear.k; ++k) {
        const std::int64_t g = from.group_of.empty() ? (format.group == 0 ? 0 : k / format.group)
                                                     : from.group_of[static_cast<std::size_t>(k)];
        const double value = static_cast<double>(codes[static_cast<std::size_t>(k)]) -
                             zeros[static_cast<std::size_t>(n * groups + g)];
        sum += value, squares += value * value, ++count;
      }
    }
    const double mean = sum / count, other = mean + (parsed_.version == 1 ? 1 : -1);
    const double noise = std::sqrt(squares / count / count);
    if (std::abs(mean) < 0.6 + 6 * noise || std::abs(other) > 0.4 + 6 * noise) return {};
    return {Code::bad_file,
            fmt::format(
                "{}: codes lie {:.2f} above their zero points on average, and {:.2f} if these were those of "
                "checkpoint_format {}; {} says {}",
                source_.where(*parts.zeros), mean, other, parsed_.version == 1 ? "gptq_v2" : "gptq",
                quantization_of(config_), parsed_.version == 1 ? "gptq" : "gptq_v2")};
  }

  static void unpack(const std::byte* words, std::int64_t n, std::int64_t k, int bits, std::int64_t first,
                     std::int64_t count, std::uint8_t* codes) {
    if (32 % bits != 0) {
      for (std::int64_t r = 0; r < count; ++r)
        for (std::int64_t i = 0; i < k; ++i)
          codes[r * k + i] = static_cast<std::uint8_t>(dense_code(words + (first + r) * 4, n, bits, i));
      return;
    }
    const std::int64_t each = 32 / bits;
    for (std::int64_t w = 0; w < k / each; ++w)
      for (std::int64_t r = 0; r < count; ++r) {
        std::uint32_t word = 0;
        __builtin_memcpy(&word, words + (w * n + first + r) * 4, 4);
        for (std::int64_t i = 0; i < each; ++i, word >>= bits)
          codes[r * k + w * each + i] = static_cast<std::uint8_t>(word & ((1u << bits) - 1));
      }
  }

  Config parsed_;
};

Result<std::unique_ptr<LinearReader>> open(const Source& source, const nlohmann::json& quantization,
                                           const ModelConfig& model, const std::string& config) {
  auto parsed = read_config(quantization, config);
  if (!parsed) return parsed.status();
  return std::unique_ptr<LinearReader>(std::make_unique<Reader>(source, model, config, std::move(*parsed)));
}

}  // namespace

const Convention gptq_convention{
    "gptq", [](const nlohmann::json& quantization) { return has_method(quantization, {"gptq"}); }, open};

}  // namespace gatefold
