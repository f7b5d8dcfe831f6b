#include "checkpoint/compressed_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_set>

#include "checkpoint/companion_reader.h"
#include "checkpoint/compressed_tensors_codec.h"
#include "checkpoint/conventions.h"
#include "checkpoint/integer_matrix.h"
#include "checkpoint/json.h"
#include "checkpoint/name_pattern.h"

namespace gatefold::compressed_tensors {
namespace {

constexpr std::string_view suffixes[] = {".weight",
                                         ".weight_packed",
                                         ".weight_shape",
                                         ".weight_scale",
                                         ".weight_zero_point",
                                         ".weight_global_scale",
                                         ".weight_g_idx",
                                         ".input_scale",
                                         ".input_zero_point",
                                         ".input_global_scale"};
constexpr std::string_view companions[] = {".weight_packed", ".weight_scale"};
constexpr LayerSuffixes layer_suffixes{.all = suffixes, .companions = companions};

/// Of all patterns of a config: they are tried on every expert of a model, so this bounds the time of opening
/// one. Published configs need a few hundred.
constexpr std::size_t max_states = 8192;

/// A list of `targets` or of `ignore`.
class NameList {
 public:
  /// `states`: of all patterns so far.
  Status add(const std::string& entry, std::size_t& states) {
    if (!entry.starts_with("re:")) {
      names_.insert(entry);
      return {};
    }
    Result<NamePattern> pattern = NamePattern::compile(std::string_view(entry).substr(3));
    if (!pattern.ok()) return pattern.status();
    states += pattern->states();
    if (states > max_states)
      return {Code::unsupported, fmt::format("patterns of more than {} states", max_states)};
    patterns_.push_back(std::move(*pattern));
    return {};
  }

  /// How closely an entry names this Linear: 3 by name, 2 by pattern, 1 as a Linear, 0 not at all.
  int match(const std::string& module) const {
    if (names_.count(module) != 0) return 3;
    for (const NamePattern& pattern : patterns_)
      if (pattern.matches(module)) return 2;
    return names_.count("Linear") != 0 ? 1 : 0;
  }

 private:
  std::unordered_set<std::string> names_;
  std::vector<NamePattern> patterns_;
};

struct Parts {
  QuantizedMatrix matrix;
  Packing packing = Packing::plain;
  IntegerFormat format;    ///< of integers
  bool own_layout = true;  ///< nothing has to be moved but words
  const TensorEntry *values = nullptr, *shape = nullptr, *scales = nullptr, *zeros = nullptr,
                    *groups = nullptr;
  const TensorEntry *tensor_scale = nullptr, *input_scale = nullptr;
};

class Reader final : public CompanionReader<Parts> {
 public:
  Reader(const Source& source, const ModelConfig& model, std::string config)
      : CompanionReader(source, model, std::move(config), layer_suffixes) {}

  Status init(const nlohmann::json& quantization) {
    Result<std::vector<Group>> groups = parse_groups(quantization, config_);
    if (!groups.ok()) return groups.status();
    std::size_t states = 0;
    for (Group& group : *groups) {
      NameList targets;
      for (const std::string& target : group.targets)
        if (Status status = targets.add(target, states); !status.ok())
          return {status.code(), fmt::format("{}.targets: {}", group.where, status.message())};
      groups_.push_back({std::move(group), std::move(targets)});
    }
    by_package_ = quantization.contains("version");
    kv_cache_ = parse_kv_cache(quantization, config_);
    const auto ignore = quantization.find("ignore");
    if (ignore == quantization.end() || ignore->is_null()) return {};
    if (!ignore->is_array())
      return {Code::bad_file, fmt::format("{}: quantization_config.ignore is not a list", config_)};
    for (const nlohmann::json& entry : *ignore) {
      const Status status = entry.is_string() ? ignore_.add(entry.get<std::string>(), states)
                                              : Status(Code::bad_file, show_json(entry) + " is not a string");
      if (!status.ok())
        return {status.code(), fmt::format("{}: quantization_config.ignore: {}", config_, status.message())};
    }
    return {};
  }

  std::optional<Quantized> quantized(const std::string& module) const override {
    const Linear linear{.module = module, .n = 0, .k = 0, .fused = {}};
    if (!is_quantized(linear)) return std::nullopt;
    const TensorEntry *packed = entry(linear.module, ".weight_packed"),
                      *plain = entry(linear.module, ".weight"),
                      *shape = entry(linear.module, ".weight_shape");
    const TensorEntry* values = packed != nullptr ? packed : plain;
    if (values == nullptr || values->shape.size() != 2) return std::nullopt;
    const Result<const Target*> target = find_target(linear);
    Quantized found{values->shape[0], values->shape[1], "compressed-tensors"};
    if (target.ok()) found.stored_as = fmt::format("compressed-tensors {}", (*target)->group.format);
    if (packed != nullptr && packed->dtype == DType::u8) found.k *= 2;
    if (packed != nullptr && packed->dtype == DType::i32 && shape != nullptr && shape->shape.size() == 1 &&
        shape->shape[0] == 2 && (shape->dtype == DType::i64 || shape->dtype == DType::i32))
      found.k = stored_shape(*shape)[1];
    return found;
  }

  ScaleRule activation_rule() const override {
    return by_package_ ? ScaleRule::compressed_tensors : ScaleRule::standard;
  }

  Result<bool> fp8_kv_cache() const override { return kv_cache_; }

 private:
  struct Target {
    Group group;
    NameList targets;
  };

  Result<const Target*> find_target(const Linear& linear) const {
    const Target* best = nullptr;
    int closest = 0;
    for (const Target& target : groups_)
      if (const int match = target.targets.match(linear.module); match > closest)
        best = &target, closest = match;
    const bool ignored = ignore_.match(linear.module) != 0;
    if (best != nullptr && !ignored) return best;
    const TensorEntry* found = entry(linear.module, ".weight_packed");
    if (found == nullptr) found = entry(linear.module, ".weight_scale");
    return Status(Code::bad_file,
                  fmt::format("{} says that the layer is quantized, but {}: quantization_config.{}",
                              source_.where(*found), config_,
                              ignored ? "ignore names it" : "config_groups has no target for it"));
  }

  Result<Parts> find(const Linear& linear) const override {
    const Result<const Target*> target = find_target(linear);
    if (!target.ok()) return target.status();
    const Group& group = (*target)->group;
    const std::int64_t sizes[] = {linear.k, model_.moe.hidden, model_.moe.intermediate};
    const Result<SchemeId> row = find_row(group, expert_sizes(sizes, linear, model_));
    if (!row.ok()) return row.status();

    Parts parts;
    parts.matrix = matrix_of(*row, linear);
    const Scheme& scheme = gatefold::scheme(*row);
    const Operand& weight = scheme.weight;
    if (Status status = check_shape(*row, linear.n, linear.k); !status.ok())
      return Status(Code::bad_file, fmt::format("{}: {}: {}", group.where, linear.module, status.message()));

    const bool packed = entry(linear.module, ".weight_packed") != nullptr;
    TensorFinder finder(source_, linear, group.where);
    finder.refuse(".input_zero_point", "input zero points are not supported", Code::unsupported);
    if (!group.act_order) finder.refuse(".weight_g_idx", "actorder is not group");
    if (!weight.zero_point.stored()) finder.refuse(".weight_zero_point", "symmetric is true");
    if (!weight.tensor_scale.stored()) finder.refuse(".weight_global_scale", "strategy is not tensor_group");
    if (packed) finder.refuse(".weight", "there is a weight_packed too");
    if (!group.format.empty() && packed != group.packed)
      finder.fail(Code::bad_file, fmt::format("format is {}, but there is {} {}.weight_packed",
                                              quote(group.format), packed ? "a" : "no", linear.module));
    if (!group.static_input) {
      finder.refuse(".input_scale", "there is no static input_activations");
      finder.refuse(".input_global_scale", "there is no static input_activations");
    }
    if (weight.value.is_integer())
      find_integers(group, linear, packed, finder, parts);
    else
      find_floats(scheme, linear, finder, parts);
    if (parts.scales != nullptr && is_wide(weight.scale))
      parts.matrix.scale_format = wide_format(parts.scales->dtype);
    if (group.static_input)
      parts.input_scale = finder.require(input_suffix(scheme.activation), {1}, kWideDtypes);
    if (!finder.status().ok()) return finder.status();
    return parts;
  }

  static void find_floats(const Scheme& scheme, const Linear& linear, TensorFinder& finder, Parts& parts) {
    constexpr DType bytes[] = {DType::u8}, one_f32[] = {DType::f32};
    const Operand& weight = scheme.weight;
    const DType plain[] = {dtype(weight.value)};
    parts.packing = packing(scheme);
    parts.values = parts.packing == Packing::bytes
                       ? finder.require(".weight_packed", {linear.n, linear.k / 2}, bytes)
                       : finder.require(".weight", {linear.n, linear.k}, plain);
    std::span<const DType> dtypes = kWideDtypes;
    if (weight.scale == formats::ue8m0) dtypes = kExponents;
    if (weight.scale == formats::ue4m3) dtypes = kE4m3;
    parts.scales = finder.require(".weight_scale", scale_shape(parts.matrix), dtypes);
    if (weight.tensor_scale.stored())
      parts.tensor_scale = finder.require(".weight_global_scale", {1}, one_f32);
  }

  /// Integers come packed or not, whatever the activations are.
  static void find_integers(const Group& group, const Linear& linear, bool packed, TensorFinder& finder,
                            Parts& parts) {
    constexpr DType bytes[] = {DType::i8}, sizes[] = {DType::i64, DType::i32};
    const Operand& row = gatefold::scheme(parts.matrix.scheme).weight;
    parts.format = integer_format(group);
    parts.packing = packed ? Packing::words : Packing::plain;
    const std::int64_t n = linear.n, k = linear.k, groups = parts.format.groups(k);
    const int bits = parts.format.bits;
    if (parts.format.group != 0 && k % parts.format.group != 0)
      finder.fail(Code::bad_file,
                  fmt::format("k = {} is not a multiple of group_size {}", k, parts.format.group));
    if (packed) {
      parts.values =
          finder.require(".weight_packed", {n, words_of(finder, ".weight_packed", 1, k, bits)}, kI32);
      parts.shape = finder.require(".weight_shape", {2}, sizes);
    } else {
      parts.values = finder.require(".weight", {n, k}, bytes);
    }
    const bool one_scale = group.weight.group == operands::per_tensor;
    parts.scales = finder.require(
        ".weight_scale", one_scale ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{n, groups},
        kWideDtypes);
    if (!parts.format.symmetric)
      parts.zeros = packed
                        ? finder.require(".weight_zero_point",
                                         {words_of(finder, ".weight_zero_point", 0, n, bits), groups}, kI32)
                        : finder.require(".weight_zero_point", {n, groups}, bytes);
    if (group.act_order) parts.groups = finder.require(".weight_g_idx", {k}, kI32);
    parts.own_layout =
        packed && row.value.bits == bits && row.group == group.weight.group && !group.act_order;
  }

  /// Words of `count` codes. Older writers leave the bits of a word unused that do not make a whole code.
  static std::int64_t words_of(const TensorFinder& finder, std::string_view suffix, std::size_t dimension,
                               std::int64_t count, int bits) {
    const TensorEntry* entry = finder.find(suffix);
    const std::int64_t older = (count + 32 / bits - 1) / (32 / bits);
    const bool is_older = entry != nullptr && entry->shape.size() == 2 && entry->shape[dimension] == older;
    return is_older ? older : words(count, bits);
  }

  Result<std::vector<std::int32_t>> input_order(const Linear& linear, const Parts& parts) const override {
    if (parts.groups == nullptr) return std::vector<std::int32_t>();
    auto order = column_order(read_i32(source_, *parts.groups), parts.format.groups(linear.k));
    if (order) return order;
    return Status(order.status().code(), source_.where(*parts.groups) + ": " + order.status().message());
  }

  Status load(const Linear&, Parts& parts) const override {
    QuantizedMatrix& matrix = parts.matrix;
    const Scheme& scheme = gatefold::scheme(matrix.scheme);
    if (parts.shape != nullptr)
      if (Status status = check_stored_shape(*parts.shape, matrix); !status.ok()) return status;
    if (scheme.weight.scale == formats::ue4m3)
      if (Status status = check_unsigned(source_, *parts.scales); !status.ok()) return status;
    if (scheme.weight.value.is_integer() && !parts.own_layout) {
      Result<QuantizedMatrix> loaded = load_integers(parts);
      if (!loaded.ok()) return loaded.status();
      matrix = std::move(*loaded);
    } else {
      const TensorView values = source_.view(*parts.values);
      matrix.values = unpack_values(matrix, parts.packing, {values.data, values.bytes});
      matrix.scales = read_bytes(source_, *parts.scales);
      if (parts.zeros != nullptr) {
        const TensorView zeros = source_.view(*parts.zeros);
        matrix.zero_points = unpack_zeros(matrix, {zeros.data, zeros.bytes});
      }
    }
    if (parts.tensor_scale != nullptr) {
      const Result<float> value = read_single(source_, *parts.tensor_scale);
      if (!value.ok()) return value.status();
      matrix.tensor_scale = {*value, true};
    }
    if (parts.input_scale != nullptr) {
      const Result<float> value = read_single(source_, *parts.input_scale);
      if (!value.ok()) return value.status();
      matrix.input_scale = {*value, scheme.activation.tensor_scale.stored()};
    }
    return {};
  }

  /// Integers that the row holds in another way.
  Result<QuantizedMatrix> load_integers(const Parts& parts) const {
    const std::int64_t n = parts.matrix.n, k = parts.matrix.k, groups = parts.format.groups(k);
    const int bits = parts.format.bits;
    IntegerSource from;
    from.format = parts.format;
    from.scale_format = parts.matrix.scale_format;
    from.scales = read_bytes(source_, *parts.scales);
    while (from.scales.size() < static_cast<std::size_t>(n * groups * from.scale_format.bits / 8))
      from.scales.insert(from.scales.end(), from.scales.begin(),
                         from.scales.begin() + from.scale_format.bits / 8);
    if (parts.groups != nullptr) from.group_of = read_i32(source_, *parts.groups);
    const std::byte* values = source_.view(*parts.values).data;
    const std::byte* zeros = parts.zeros == nullptr ? nullptr : source_.view(*parts.zeros).data;
    if (parts.packing == Packing::plain) {
      if (Status status = check_codes(*parts.values, bits); !status.ok()) return status;
      if (zeros != nullptr)
        if (Status status = check_codes(*parts.zeros, bits); !status.ok()) return status;
    }
    // Code i of `count`, in words or bytes that are `stride` apart.
    const auto code = [&](const std::byte* data, std::int64_t stride, std::int64_t i, std::int64_t count,
                          std::int64_t stored) {
      if (parts.packing == Packing::plain)
        return std::to_integer<std::uint32_t>(data[i * stride]) + parts.format.middle();
      if (stored == words(count, bits)) return dense_code(data, stride, bits, i);
      const std::int64_t each = 32 / bits;
      return dense_code(data + i / each * stride * 4, 1, bits, i % each);
    };
    if (zeros != nullptr) {
      from.zeros.resize(static_cast<std::size_t>(n * groups));
      const std::int64_t size = parts.packing == Packing::plain ? 1 : 4;
      for (std::int64_t r = 0; r < n; ++r)
        for (std::int64_t g = 0; g < groups; ++g)
          from.zeros[static_cast<std::size_t>(r * groups + g)] =
              static_cast<std::uint8_t>(code(zeros + g * size, groups, r, n, parts.zeros->shape[0]));
    }
    const std::int64_t row = static_cast<std::int64_t>(source_.view(*parts.values).bytes) / n;
    from.rows = [&](std::int64_t first, std::int64_t count, std::uint8_t* codes) {
      for (std::int64_t r = 0; r < count; ++r)
        for (std::int64_t i = 0; i < k; ++i)
          codes[r * k + i] =
              static_cast<std::uint8_t>(code(values + (first + r) * row, 1, i, k, parts.values->shape[1]));
    };
    Result<QuantizedMatrix> matrix = integer_matrix(parts.matrix.scheme, n, k, from);
    if (matrix.ok()) return matrix;
    return Status(matrix.status().code(),
                  source_.where(parts.groups == nullptr ? *parts.values : *parts.groups) + ": " +
                      matrix.status().message());
  }

  /// Codes of fewer bits that have a byte each.
  Status check_codes(const TensorEntry& entry, int bits) const {
    const TensorView view = source_.view(entry);
    const int limit = 1 << (bits - 1);
    for (std::size_t i = 0; i < view.bytes; ++i) {
      const auto byte = std::to_integer<int>(view.data[i]);
      const int code = byte < 128 ? byte : byte - 256;
      if (code < -limit || code >= limit)
        return {Code::bad_file,
                fmt::format("{}: {} at {} is not a {}-bit code", source_.where(entry), code, i, bits)};
    }
    return {};
  }

  std::array<std::int64_t, 2> stored_shape(const TensorEntry& entry) const {
    const std::byte* data = source_.view(entry).data;
    std::array<std::int64_t, 2> shape{};
    for (std::size_t i = 0; i < 2; ++i) {
      std::int32_t narrow = 0;
      if (entry.dtype == DType::i64)
        std::memcpy(&shape[i], data + i * 8, 8);
      else
        std::memcpy(&narrow, data + i * 4, 4), shape[i] = narrow;
    }
    return shape;
  }

  Status check_stored_shape(const TensorEntry& entry, const QuantizedMatrix& matrix) const {
    const auto shape = stored_shape(entry);
    if (shape[0] == matrix.n && shape[1] == matrix.k) return {};
    return {Code::bad_file, fmt::format("{}: holds {}, the model's config asks for {}", source_.where(entry),
                                        format_shape(shape), format_shape({{matrix.n, matrix.k}}))};
  }

  std::vector<Target> groups_;
  NameList ignore_;
  Result<bool> kv_cache_ = false;
  bool by_package_ = false;  ///< written by the package itself, which says its version; we do not
};

Result<std::unique_ptr<LinearReader>> open(const Source& source, const nlohmann::json& quantization,
                                           const ModelConfig& model, const std::string& config) {
  auto reader = std::make_unique<Reader>(source, model, config);
  if (Status status = reader->init(quantization); !status.ok()) return status;
  return std::unique_ptr<LinearReader>(std::move(reader));
}

}  // namespace

const Convention convention{
    "compressed-tensors",
    [](const nlohmann::json& quantization) { return has_method(quantization, {"compressed-tensors"}); },
    open};

}  // namespace gatefold::compressed_tensors
