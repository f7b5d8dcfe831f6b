#include "checkpoint/compressed_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "checkpoint/compressed_tensors_codec.h"
#include "checkpoint/json.h"
#include "checkpoint/name_pattern.h"
#include "format/matrix.h"

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
constexpr std::string_view fused_suffixes[] = {""};
constexpr DType wide_dtypes[] = {DType::f32, DType::bf16, DType::f16};

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

class Reader final : public LinearReader {
 public:
  Reader(const Source& source, const ModelConfig& model, std::string config)
      : source_(source), model_(model), config_(std::move(config)) {}

  Status init(const nlohmann::json& quantization) {
    Result<std::vector<Group>> groups = parse_groups(quantization, config_);
    if (!groups.ok()) return groups.status();
    std::size_t states = 0;
    for (Group& group : *groups) {
      NameList targets;
      for (const std::string& target : group.targets)
        if (Status status = targets.add(target, states); !status.ok())
          return {status.code(), fmt::format("{}.targets: {}", group.where, status.message())};
      const Result<SchemeId> row = find_row(group);
      groups_.push_back({std::move(group), std::move(targets), row});
    }
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

  std::span<const std::string_view> suffixes(bool fused) const override {
    if (fused) return fused_suffixes;
    return compressed_tensors::suffixes;
  }

  Result<SchemeId> scheme(const Linear& linear) const override {
    if (!is_quantized(linear)) return unquantized_scheme(source_, linear, model_);
    const Result<Parts> parts = find(linear);
    if (!parts.ok()) return parts.status();
    return parts->matrix.scheme;
  }

  Result<ExpertMatrix> read(const Linear& linear) const override {
    if (!is_quantized(linear)) {
      const Result<MatrixView> view = unquantized_matrix(source_, linear);
      if (!view.ok()) return view.status();
      return ExpertMatrix(*view);
    }
    Result<Parts> parts = find(linear);
    if (!parts.ok()) return parts.status();
    if (Status status = load(*parts); !status.ok()) return status;
    return ExpertMatrix(std::move(parts->matrix));
  }

 private:
  struct Target {
    Group group;
    NameList targets;
    Result<SchemeId> row;
  };

  /// The tensors of one matrix, all of the right type and shape; `matrix` has no data yet.
  struct Parts {
    QuantizedMatrix matrix;
    Packing packing = Packing::plain;
    bool one_per_byte = false;  ///< 4-bit codes in a "weight" of I8
    const TensorEntry *values = nullptr, *shape = nullptr, *scales = nullptr, *zeros = nullptr;
    const TensorEntry *tensor_scale = nullptr, *input_scale = nullptr;
  };

  const TensorEntry* entry(const Linear& linear, std::string_view suffix) const {
    return source_.find(linear.module + std::string(suffix));
  }

  /// Presence of the companions decides, not `targets` and `ignore`, which published models get wrong.
  bool is_quantized(const Linear& linear) const {
    return !linear.fused &&
           (entry(linear, ".weight_packed") != nullptr || entry(linear, ".weight_scale") != nullptr);
  }

  Result<const Target*> find_target(const Linear& linear) const {
    const Target* best = nullptr;
    int closest = 0;
    for (const Target& target : groups_)
      if (const int match = target.targets.match(linear.module); match > closest)
        best = &target, closest = match;
    const bool ignored = ignore_.match(linear.module) != 0;
    if (best != nullptr && !ignored) return best;
    const TensorEntry* found = entry(linear, ".weight_packed");
    if (found == nullptr) found = entry(linear, ".weight_scale");
    return Status(Code::bad_file,
                  fmt::format("{} says that the layer is quantized, but {}: quantization_config.{}",
                              source_.where(*found), config_,
                              ignored ? "ignore names it" : "config_groups has no target for it"));
  }

  /// Finds a tensor and checks it against what the config asks for.
  struct Finder {
    const Reader& reader;
    const Linear& linear;
    const Group& group;
    Status status;

    const TensorEntry* require(std::string_view suffix, std::vector<std::int64_t> shape,
                               std::span<const DType> dtypes) {
      if (!status.ok()) return nullptr;
      const TensorEntry* entry = reader.entry(linear, suffix);
      // A single number is written as [1], [1, 1] or [].
      if (entry != nullptr && shape == std::vector<std::int64_t>{1} && entry->shape.size() <= 2 &&
          std::all_of(entry->shape.begin(), entry->shape.end(), [](std::int64_t d) { return d == 1; }))
        shape = entry->shape;
      const auto found = require_tensor(reader.source_, linear.module + std::string(suffix), shape, dtypes);
      if (found.ok()) return *found;
      status = {found.status().code(),
                fmt::format("{} (as {} asks for)", found.status().message(), group.where)};
      return nullptr;
    }

    void refuse(std::string_view suffix, std::string_view why, Code code = Code::bad_file) {
      const TensorEntry* entry = reader.entry(linear, suffix);
      if (status.ok() && entry != nullptr)
        status = {code, fmt::format("{}: {}: {}", reader.source_.where(*entry), group.where, why)};
    }
  };

  Result<Parts> find(const Linear& linear) const {
    const Result<const Target*> target = find_target(linear);
    if (!target.ok()) return target.status();
    const Group& group = (*target)->group;
    if (!(*target)->row.ok()) return (*target)->row.status();

    Parts parts;
    parts.matrix.scheme = *(*target)->row;
    parts.matrix.n = linear.n;
    parts.matrix.k = linear.k;
    const Scheme& row = gatefold::scheme(parts.matrix.scheme);
    const Operand& weight = row.weight;
    parts.matrix.scale_format = weight.scale;
    if (Status status = check_shape(parts.matrix.scheme, linear.n, linear.k); !status.ok())
      return Status(Code::bad_file, fmt::format("{}: {}: {}", group.where, linear.module, status.message()));

    Finder finder{*this, linear, group, {}};
    finder.refuse(".weight_g_idx", "activation order by group is not supported", Code::unsupported);
    finder.refuse(".input_zero_point", "input zero points are not supported", Code::unsupported);
    if (!weight.zero_point.stored()) finder.refuse(".weight_zero_point", "symmetric is true");
    if (!weight.tensor_scale.stored()) finder.refuse(".weight_global_scale", "strategy is not tensor_group");
    if (entry(linear, ".weight_packed") != nullptr) finder.refuse(".weight", "there is a weight_packed too");
    if (!group.static_input) {
      finder.refuse(".input_scale", "there is no static input_activations");
      finder.refuse(".input_global_scale", "there is no static input_activations");
    }
    find_values(row, finder, parts);
    find_scales(row, finder, parts);
    if (group.static_input)
      parts.input_scale = finder.require(input_suffix(row.activation), {1}, wide_dtypes);
    if (!finder.status.ok()) return finder.status;
    return parts;
  }

  static void find_values(const Scheme& row, Finder& finder, Parts& parts) {
    const std::int64_t n = parts.matrix.n, k = parts.matrix.k;
    const Format value = row.weight.value;
    const bool packed = finder.reader.entry(finder.linear, ".weight_packed") != nullptr;
    parts.packing = packing(row);
    // Integers come packed or not, whatever the activations are.
    if (value.is_integer()) parts.packing = packed ? Packing::words : Packing::plain;
    switch (parts.packing) {
      case Packing::plain: {
        const DType stored[] = {dtype(value)};
        parts.one_per_byte = value.bits == 4;
        parts.values = finder.require(".weight", {n, k}, stored);
        break;
      }
      case Packing::bytes: {
        constexpr DType stored[] = {DType::u8};
        parts.values = finder.require(".weight_packed", {n, k / 2}, stored);
        break;
      }
      case Packing::words: {
        constexpr DType stored[] = {DType::i32}, sizes[] = {DType::i64, DType::i32};
        parts.values = finder.require(".weight_packed", {n, words(k, value.bits)}, stored);
        parts.shape = finder.require(".weight_shape", {2}, sizes);
        break;
      }
    }
  }

  static void find_scales(const Scheme& row, Finder& finder, Parts& parts) {
    constexpr DType exponents[] = {DType::u8, DType::f8_e8m0}, e4m3[] = {DType::f8_e4m3},
                    one_f32[] = {DType::f32};
    constexpr DType i32[] = {DType::i32};
    const Operand& weight = row.weight;
    const std::vector<std::int64_t> shape = scale_shape(parts.matrix);
    std::span<const DType> dtypes = wide_dtypes;
    if (weight.scale == formats::ue8m0) dtypes = exponents;
    if (weight.scale == formats::ue4m3) dtypes = e4m3;
    parts.scales = finder.require(".weight_scale", shape, dtypes);
    if (parts.scales != nullptr && is_wide(weight.scale))
      for (const Format format : {formats::f32, formats::bf16, formats::f16})
        if (dtype(format) == parts.scales->dtype) parts.matrix.scale_format = format;
    if (weight.zero_point.stored()) {
      if (parts.packing != Packing::words)
        finder.refuse(".weight_zero_point", "zero points of an unpacked weight are not supported",
                      Code::unsupported);
      parts.zeros = finder.require(".weight_zero_point", {words(shape[0], 4), shape[1]}, i32);
    }
    if (weight.tensor_scale.stored())
      parts.tensor_scale = finder.require(".weight_global_scale", {1}, one_f32);
  }

  Status load(Parts& parts) const {
    QuantizedMatrix& matrix = parts.matrix;
    const Operand& weight = gatefold::scheme(matrix.scheme).weight;
    const QuantizedLayout layout = matrix.layout();
    if (parts.shape != nullptr)
      if (Status status = check_stored_shape(*parts.shape, matrix); !status.ok()) return status;
    if (Status status = load_values(parts, layout); !status.ok()) return status;

    const TensorView scales = source_.view(*parts.scales);
    matrix.scales.assign(scales.data, scales.data + scales.bytes);
    if (weight.scale == formats::ue4m3)
      for (std::size_t i = 0; i < matrix.scales.size(); ++i)
        if ((matrix.scales[i] & std::byte{0x80}) != std::byte{0})
          return {Code::bad_file, fmt::format("{}: scale {} is negative", source_.where(*parts.scales), i)};
    if (parts.zeros != nullptr) {
      const TensorView zeros = source_.view(*parts.zeros);
      matrix.zero_points = unpack_zeros(matrix, {zeros.data, zeros.bytes});
    }
    if (parts.tensor_scale != nullptr) {
      const Result<float> value = single(*parts.tensor_scale);
      if (!value.ok()) return value.status();
      matrix.tensor_scale = {*value, true};
    }
    if (parts.input_scale != nullptr) {
      const Result<float> value = single(*parts.input_scale);
      if (!value.ok()) return value.status();
      matrix.input_scale = {*value, gatefold::scheme(matrix.scheme).activation.tensor_scale.stored()};
    }
    return {};
  }

  Status load_values(Parts& parts, const QuantizedLayout& layout) const {
    QuantizedMatrix& matrix = parts.matrix;
    const TensorView view = source_.view(*parts.values);
    const std::span<const std::byte> stored(view.data, view.bytes);
    if (parts.one_per_byte) {
      matrix.values.resize(layout.value_bytes);
      for (std::size_t i = 0; i < stored.size(); ++i) {
        const auto byte = std::to_integer<int>(stored[i]);
        const int code = byte < 128 ? byte : byte - 256;
        if (code < -8 || code > 7)
          return {Code::bad_file,
                  fmt::format("{}: {} at {} is not a 4-bit code", source_.where(*parts.values), code, i)};
        matrix.values[i / 2] |= static_cast<std::byte>((code & 15) << (i % 2 * 4));
      }
    } else {
      matrix.values = unpack_values(matrix, parts.packing, stored);
    }
    return {};
  }

  Status check_stored_shape(const TensorEntry& entry, const QuantizedMatrix& matrix) const {
    const std::byte* data = source_.view(entry).data;
    std::int64_t shape[2];
    for (int i = 0; i < 2; ++i) {
      std::int32_t narrow = 0;
      if (entry.dtype == DType::i64)
        std::memcpy(&shape[i], data + i * 8, 8);
      else
        std::memcpy(&narrow, data + i * 4, 4), shape[i] = narrow;
    }
    if (shape[0] == matrix.n && shape[1] == matrix.k) return {};
    return {Code::bad_file, fmt::format("{}: holds {}, the model's config asks for {}", source_.where(entry),
                                        format_shape(shape), format_shape({{matrix.n, matrix.k}}))};
  }

  Result<float> single(const TensorEntry& entry) const {
    float value = 0;
    for (const Format format : {formats::f32, formats::bf16, formats::f16})
      if (dtype(format) == entry.dtype) load_scales(format, source_.view(entry).data, 0, 1, &value);
    if (std::isfinite(value) && value > 0) return value;
    return Status(Code::bad_file,
                  fmt::format("{}: {} is not a positive number", source_.where(entry), value));
  }

  const Source& source_;
  const ModelConfig& model_;
  std::string config_;
  std::vector<Target> groups_;
  NameList ignore_;
};

bool recognises(const nlohmann::json& quantization) {
  if (!quantization.is_object()) return false;
  const auto method = quantization.find("quant_method");
  return method != quantization.end() && *method == "compressed-tensors";
}

Result<std::unique_ptr<LinearReader>> open(const Source& source, const nlohmann::json& quantization,
                                           const ModelConfig& model, const std::string& config) {
  auto reader = std::make_unique<Reader>(source, model, config);
  if (Status status = reader->init(quantization); !status.ok()) return status;
  return std::unique_ptr<LinearReader>(std::move(reader));
}

}  // namespace

const Convention convention{"compressed-tensors", recognises, open};

}  // namespace gatefold::compressed_tensors
