// quant_method "mxfp4" (gpt-oss): all experts of a layer in <module>_blocks U8 [E, rows, K / 32, 16], two
// codes of e2m1 in a byte, the lower nibble first, and <module>_scales U8 [E, rows, K / 32], exponent + 127.

#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/companion_reader.h"
#include "checkpoint/conventions.h"
#include "format/matrix.h"

namespace gatefold {
namespace {

constexpr std::string_view kSuffixes[] = {".weight"};
constexpr std::string_view kFusedSuffixes[] = {"", "_blocks", "_scales"};
constexpr LayerSuffixes kLayer{.all = kSuffixes,
                               .companions = std::span(kFusedSuffixes).subspan(1),
                               .fused = kFusedSuffixes,
                               .fused_companions = true};

constexpr SchemeId kRow =
    *find_scheme(operands::scaled(formats::e2m1, formats::ue8m0, operands::per_group(32)), operands::act16);

struct Parts {
  QuantizedMatrix matrix;
  const TensorEntry *blocks = nullptr, *scales = nullptr;
};

class Reader final : public CompanionReader<Parts> {
 public:
  Reader(const Source& source, const ModelConfig& model, std::string config, ModuleList ignore)
      : CompanionReader(source, model, std::move(config), kLayer), ignore_(std::move(ignore)) {}

  std::optional<Quantized> quantized(const std::string& module) const override {
    const TensorEntry* blocks = entry(module, "_blocks");
    if (blocks == nullptr || blocks->shape.size() != 4) return std::nullopt;
    return Quantized{blocks->shape[1], blocks->shape[2] * 32, "mxfp4 blocks"};
  }

 private:
  Status load(const Linear& linear, Parts& parts) const override {
    parts.matrix = make_matrix(kRow, linear.n, linear.k);
    copy_rows(*parts.blocks, *linear.fused, linear.k / 2, parts.matrix.values);
    copy_rows(*parts.scales, *linear.fused, linear.k / 32, parts.matrix.scales);
    return {};
  }

  Result<Parts> find(const Linear& linear) const override {
    constexpr DType bytes[] = {DType::u8};
    const std::int64_t experts = linear.fused->experts, rows = linear.fused->rows;
    TensorFinder finder(source_, linear, quantization_of(config_));
    if (linear.k % 32 != 0)
      finder.fail(Code::bad_file, fmt::format("k = {} is not a multiple of 32", linear.k));
    Parts parts;
    parts.matrix = matrix_of(kRow, linear);
    finder.refuse("", "there are _blocks too");
    parts.blocks = finder.require("_blocks", {experts, rows, linear.k / 32, 16}, bytes);
    parts.scales = finder.require("_scales", {experts, rows, linear.k / 32}, kExponents);
    finder.check_ignored(ignore_);
    if (!finder.status().ok()) return finder.status();
    return parts;
  }

  void copy_rows(const TensorEntry& entry, const FusedSlice& slice, std::int64_t row_bytes,
                 std::vector<std::byte>& out) const {
    const std::byte* expert = source_.view(entry).data + slice.expert * slice.rows * row_bytes;
    const auto size = static_cast<std::size_t>(row_bytes);
    for (std::size_t row = 0; row < out.size() / size; ++row)
      std::memcpy(&out[row * size],
                  expert + (slice.first_row + static_cast<std::int64_t>(row) * slice.row_step) * row_bytes,
                  size);
  }

  ModuleList ignore_;
};

Result<std::unique_ptr<LinearReader>> open(const Source& source, const nlohmann::json& quantization,
                                           const ModelConfig& model, const std::string& config) {
  auto ignore = ModuleList::read(quantization, {"modules_to_not_convert"}, quantization_of(config));
  if (!ignore) return ignore.status();
  return std::unique_ptr<LinearReader>(std::make_unique<Reader>(source, model, config, std::move(*ignore)));
}

}  // namespace

const Convention mxfp4_convention{
    "mxfp4", [](const nlohmann::json& quantization) { return has_method(quantization, {"mxfp4"}); }, open};

}  // namespace gatefold
