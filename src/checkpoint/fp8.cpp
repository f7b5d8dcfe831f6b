// quant_method "fp8" (DeepSeek-V3 and those that follow it): <module>.weight F8_E4M3 [N, K] and
//   .weight_scale_inv [ceil(N / B), ceil(K / B)], a factor in spite of its name, where there is a
//   weight_block_size; U8 or F8_E8M0 [N, K / 32] is MXFP8
//   .weight_scale [1] and, if activation_scheme is static, .input_scale [1], where there is none.
// DeepSeek-V4 calls the scale .scale, and stores experts as I8 [N, K / 2], two codes of e2m1 in a byte, with
// exponents F8_E8M0 [N, K / 32].

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checkpoint/companion_reader.h"
#include "checkpoint/conventions.h"
#include "checkpoint/fields.h"
#include "checkpoint/json.h"
#include "format/matrix.h"

namespace gatefold {
namespace {

constexpr std::string_view kSuffixes[] = {".weight", ".weight_scale_inv", ".weight_scale", ".scale",
                                          ".input_scale"};
constexpr std::span<const std::string_view> kScales = std::span(kSuffixes).subspan(1, 3);
constexpr LayerSuffixes kLayer{.all = kSuffixes, .companions = kScales};

struct Config {
  std::int64_t block_n = 0, block_k = 0;  ///< 0: one scale per matrix
  bool static_input = false;
};

Result<Config> read_config(const nlohmann::json& quantization, const std::string& config) {
  Fields fields(quantization, quantization_of(config));
  Config parsed;
  const std::string format = fields.text({"fmt"}, "e4m3");
  if (format != "e4m3" && format != "float8_e4m3fn")
    fields.fail(fmt::format("fmt is {}; e4m3 is known", quote(format)), Code::unsupported);
  const std::string scheme = fields.text({"activation_scheme"}, "dynamic");
  if (scheme != "dynamic" && scheme != "static")
    fields.fail(fmt::format("activation_scheme is {}, neither dynamic nor static", quote(scheme)));
  parsed.static_input = scheme == "static";
  if (const nlohmann::json* block = fields.array({"weight_block_size"})) {
    const auto is_size = [](const nlohmann::json& size) {
      return size.is_number_unsigned() && size >= 1 && size <= 32767;
    };
    if (block->size() != 2 || !is_size((*block)[0]) || !is_size((*block)[1]))
      fields.fail(fmt::format("weight_block_size is {}, not [rows, columns]", show_json(*block)));
    else
      parsed.block_n = (*block)[0], parsed.block_k = (*block)[1];
    if (parsed.static_input)
      fields.fail("activation_scheme is static, which does not go with weight_block_size");
  }
  if (!fields.status().ok()) return fields.status();
  return parsed;
}

struct Parts {
  QuantizedMatrix matrix;
  const TensorEntry *values = nullptr, *scales = nullptr, *input_scale = nullptr;
};

class Reader final : public CompanionReader<Parts> {
 public:
  Reader(const Source& source, const ModelConfig& model, std::string config, const Config& parsed,
         ModuleList ignore)
      : CompanionReader(source, model, std::move(config), kLayer),
        parsed_(parsed),
        ignore_(std::move(ignore)) {}

  std::optional<Quantized> quantized(const std::string& module) const override {
    const TensorEntry* weight = entry(module, ".weight");
    if (weight == nullptr || weight->shape.size() != 2 || scale_suffix(module).empty()) return std::nullopt;
    if (weight->dtype == DType::i8)
      return Quantized{weight->shape[0], weight->shape[1] * 2, "fp8, experts in e2m1"};
    return Quantized{
        weight->shape[0], weight->shape[1],
        parsed_.block_n == 0 ? "fp8" : fmt::format("fp8, {} x {}", parsed_.block_n, parsed_.block_k)};
  }

 private:
  Status load(const Linear&, Parts& parts) const override {
    QuantizedMatrix& matrix = parts.matrix;
    matrix.values = read_bytes(source_, *parts.values);
    matrix.scales = read_bytes(source_, *parts.scales);
    if (matrix.scale_format == formats::f32 && parts.scales->dtype == DType::f8_e8m0) {
      matrix.scale_format = formats::ue8m0;  // as read
      convert_scales(matrix, formats::f32);
    }
    if (parts.input_scale != nullptr) {
      const auto value = read_single(source_, *parts.input_scale);
      if (!value) return value.status();
      matrix.input_scale = {*value, false};
    }
    return {};
  }

  std::string_view scale_suffix(const std::string& module) const {
    for (const std::string_view suffix : kScales)
      if (entry(module, suffix) != nullptr) return suffix;
    return {};
  }

  Result<Parts> find(const Linear& linear) const override {
    const std::int64_t n = linear.n, k = linear.k;
    const std::string_view suffix = scale_suffix(linear.module);
    const TensorEntry *scale = entry(linear.module, suffix), *weight = entry(linear.module, ".weight");
    const bool exponents = scale->dtype == DType::f8_e8m0 || scale->dtype == DType::u8;
    const bool fp4 = weight != nullptr && weight->dtype == DType::i8 && suffix == ".scale";
    const bool mx = exponents && (fp4 || scale->dtype == DType::u8);

    Operand operand = operands::scaled(formats::e4m3, formats::f32, operands::per_tensor);
    Operand activation = operand;
    if (mx) {
      operand =
          operands::scaled(fp4 ? formats::e2m1 : formats::e4m3, formats::ue8m0, operands::per_group(32));
      activation = fp4 ? operands::act16 : operand;
    } else if (parsed_.block_n != 0) {
      operand.group = {static_cast<std::int16_t>(parsed_.block_n),
                       static_cast<std::int16_t>(parsed_.block_k)};
      activation.group = {1, static_cast<std::int16_t>(parsed_.block_k)};
    }
    TensorFinder finder(source_, linear, asked_by());
    if (parsed_.block_n == 0) finder.refuse(".weight_scale_inv", "there is no weight_block_size");
    if (parsed_.block_n != 0) finder.refuse(".weight_scale", "there is a weight_block_size");
    if (!parsed_.static_input) finder.refuse(".input_scale", "activation_scheme is not static");

    Parts parts;
    if (fp4) {
      constexpr DType bytes[] = {DType::i8};
      parts.values = finder.require(".weight", {n, k / 2}, bytes);
    } else {
      parts.values = finder.require(".weight", {n, k}, kE4m3);
    }
    if (mx) {
      parts.scales = finder.require(suffix, {n, (k + 31) / 32}, kExponents);
    } else if (parsed_.block_n != 0) {
      constexpr DType types[] = {DType::f32, DType::bf16, DType::f16, DType::f8_e8m0};
      parts.scales = finder.require(
          suffix, {(n + parsed_.block_n - 1) / parsed_.block_n, (k + parsed_.block_k - 1) / parsed_.block_k},
          types);
    } else {
      parts.scales = finder.require(suffix, {1}, kWideDtypes);
    }
    if (parsed_.static_input) parts.input_scale = finder.require(".input_scale", {1}, kWideDtypes);
    finder.check_ignored(ignore_);
    if (!finder.status().ok()) return finder.status();

    const auto row = find_scheme(operand, activation);
    if (!row)
      return Status(Code::unsupported,
                    fmt::format("{}: no scheme has {} weights with {} activations", asked_by(),
                                describe(operand, true), describe(activation, false)));
    if (Status status = check_shape(*row, n, k); !status.ok())
      return Status(Code::bad_file, fmt::format("{}: {}", source_.where(*parts.values), status.message()));
    parts.matrix = matrix_of(*row, linear);
    parts.matrix.scale_format = mx                                      ? formats::ue8m0
                                : parts.scales->dtype == DType::f8_e8m0 ? formats::f32
                                                                        : wide_format(parts.scales->dtype);
    return parts;
  }

  std::string asked_by() const {
    if (parsed_.block_n == 0) return quantization_of(config_);
    return fmt::format("{}.weight_block_size [{}, {}]", quantization_of(config_), parsed_.block_n,
                       parsed_.block_k);
  }

  Config parsed_;
  ModuleList ignore_;
};

Result<std::unique_ptr<LinearReader>> open(const Source& source, const nlohmann::json& quantization,
                                           const ModelConfig& model, const std::string& config) {
  const auto parsed = read_config(quantization, config);
  if (!parsed) return parsed.status();
  auto ignore =
      ModuleList::read(quantization, {"modules_to_not_convert", "ignored_layers"}, quantization_of(config));
  if (!ignore) return ignore.status();
  return std::unique_ptr<LinearReader>(
      std::make_unique<Reader>(source, model, config, *parsed, std::move(*ignore)));
}

}  // namespace

const Convention fp8_convention{
    "fp8", [](const nlohmann::json& quantization) { return has_method(quantization, {"fp8"}); }, open};

}  // namespace gatefold
