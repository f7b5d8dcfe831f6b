// AWQ (AutoAWQ, GPTQModel) in the "gemm" layout: <module>.qweight I32 [K, N / 8] and .qzeros I32 [groups, N /
// 8] hold eight columns in a word, those in nibble i being 0, 2, 4, 6, 1, 3, 5, 7; .scales [groups, N].
// W[n][k] = (q - z) * s[k / group][n].

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checkpoint/awq.h"
#include "checkpoint/companion_reader.h"
#include "checkpoint/conventions.h"
#include "checkpoint/fields.h"
#include "checkpoint/integer_matrix.h"
#include "checkpoint/json.h"

namespace gatefold {
namespace {

constexpr std::string_view kSuffixes[] = {".qweight", ".qzeros", ".scales", ".weight"};
constexpr LayerSuffixes kLayer{.all = kSuffixes, .companions = std::span(kSuffixes).first(3)};

Result<IntegerFormat> read_config(const nlohmann::json& quantization, const std::string& config) {
  Fields fields(quantization, quantization_of(config));
  IntegerFormat format;
  format.symmetric = false;
  if (const int bits = fields.integer({"bits", "w_bit"}, {1, 16}); bits != 4)
    fields.fail(fmt::format("bits is {}; AWQ's packing is known for 4", bits), Code::unsupported);
  const int group = fields.integer({"group_size", "q_group_size"}, {-1, 1 << 20});
  if (group == 0) fields.fail("group_size is 0");
  format.group = group == -1 ? 0 : group;
  if (!fields.boolean({"zero_point"}, true))
    fields.fail("zero_point is false, which is not supported", Code::unsupported);
  const std::string version = lower_case(fields.text({"version"}, "gemm"));
  if (version != "gemm")
    fields.fail(fmt::format("version is {}; gemm is known", quote(version)), Code::unsupported);
  if (!fields.status().ok()) return fields.status();
  return format;
}

struct Parts {
  QuantizedMatrix matrix;
  const TensorEntry *codes = nullptr, *zeros = nullptr, *scales = nullptr;
};

class Reader final : public CompanionReader<Parts> {
 public:
  Reader(const Source& source, const ModelConfig& model, std::string config, const IntegerFormat& format,
         ModuleList ignore)
      : CompanionReader(source, model, std::move(config), kLayer),
        format_(format),
        ignore_(std::move(ignore)) {}

  std::optional<Quantized> quantized(const std::string& module) const override {
    const TensorEntry* codes = entry(module, ".qweight");
    if (codes == nullptr || codes->shape.size() != 2) return std::nullopt;
    return Quantized{codes->shape[1] * 8, codes->shape[0], "awq gemm, 4 bits"};
  }

 private:
  Status load(const Linear& linear, Parts& parts) const override {
    const std::int64_t n = linear.n, k = linear.k, groups = format_.groups(k);
    IntegerSource from;
    from.format = format_;
    from.scale_format = wide_format(parts.scales->dtype);
    from.scales = transpose(source_.view(*parts.scales).data, groups, n, from.scale_format.bits / 8);
    from.zeros.resize(static_cast<std::size_t>(n * groups));
    const std::byte* zeros = source_.view(*parts.zeros).data;
    for (std::int64_t g = 0; g < groups; ++g)
      for (std::int64_t r = 0; r < n; ++r)
        from.zeros[static_cast<std::size_t>(r * groups + g)] = awq_code(zeros + g * n / 2, r);
    const std::byte* words = source_.view(*parts.codes).data;
    from.rows = [&](std::int64_t first, std::int64_t count, std::uint8_t* codes) {
      for (std::int64_t i = 0; i < k; ++i)
        for (std::int64_t r = 0; r < count; ++r) codes[r * k + i] = awq_code(words + i * n / 2, first + r);
    };
    auto matrix = integer_matrix(parts.matrix.scheme, n, k, from);
    if (!matrix) return matrix.status();
    parts.matrix = std::move(*matrix);
    return {};
  }

  Result<Parts> find(const Linear& linear) const override {
    Parts parts;
    const std::int64_t groups = format_.groups(linear.k);
    TensorFinder finder(source_, linear,
                        fmt::format("{} (awq, group_size {})", quantization_of(config_),
                                    format_.group == 0 ? -1 : format_.group));
    finder.refuse(".weight", "there is a qweight too");
    if (linear.n % 8 != 0)
      finder.fail(Code::unsupported, fmt::format("{} rows do not fill words of 8", linear.n));
    if (format_.group != 0 && linear.k % format_.group != 0)
      finder.fail(Code::bad_file, fmt::format("k = {} is not a multiple of the group", linear.k));
    parts.codes = finder.require(".qweight", {linear.k, linear.n / 8}, kI32);
    parts.scales = finder.require(".scales", {groups, linear.n}, kWideDtypes);
    parts.zeros = finder.require(".qzeros", {groups, linear.n / 8}, kI32);
    finder.check_ignored(ignore_);
    if (!finder.status().ok()) return finder.status();
    const std::int64_t sizes[] = {linear.k, model_.moe.hidden, model_.moe.intermediate};
    const auto row = integer_row(format_, {}, expert_sizes(sizes, linear, model_));
    if (!row) return Status(row.status().code(), quantization_of(config_) + ": " + row.status().message());
    parts.matrix = matrix_of(*row, linear);
    return parts;
  }

  IntegerFormat format_;
  ModuleList ignore_;
};

Result<std::unique_ptr<LinearReader>> open(const Source& source, const nlohmann::json& quantization,
                                           const ModelConfig& model, const std::string& config) {
  const auto format = read_config(quantization, config);
  if (!format) return format.status();
  auto ignore = ModuleList::read(quantization, {"modules_to_not_convert"}, quantization_of(config));
  if (!ignore) return ignore.status();
  return std::unique_ptr<LinearReader>(
      std::make_unique<Reader>(source, model, config, *format, std::move(*ignore)));
}

}  // namespace

const Convention awq_convention{
    "awq", [](const nlohmann::json& quantization) { return has_method(quantization, {"awq"}); }, open};

}  // namespace gatefold
