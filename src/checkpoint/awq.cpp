// AWQ (AutoAWQ, GPTQModel) in the "gemm" layout: <module>.qweight I32 [K, N / 8] and .qzeros I32 [groups, N /
// 8] hold eight columns in a word, those in nibble i being 0, 2, 4, 6, 1, 3, 5, 7; .scales [groups, N].
// W[n][k] = (q - z) * s[k / group][n].

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checkpoint/awq.h"
#include "checkpoint/conventions.h"
#include "checkpoint/fields.h"
#include "checkpoint/integer_matrix.h"
#include "checkpoint/json.h"
#include "checkpoint/linear_tensors.h"
#include "checkpoint/module_list.h"

namespace gatefold {
namespace {

constexpr std::string_view kSuffixes[] = {".qweight", ".qzeros", ".scales", ".weight"};
constexpr std::string_view kFusedSuffixes[] = {""};

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
  std::string version = fields.text({"version"}, "gemm");
  for (char& c : version) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  if (version != "gemm")
    fields.fail(fmt::format("version is {}; gemm is known", quote(version)), Code::unsupported);
  if (!fields.status().ok()) return fields.status();
  return format;
}

class Reader final : public LinearReader {
 public:
  Reader(const Source& source, const ModelConfig& model, std::string config, const IntegerFormat& format,
         ModuleList ignore)
      : source_(source),
        model_(model),
        config_(std::move(config)),
        format_(format),
        ignore_(std::move(ignore)) {}

  std::span<const std::string_view> suffixes(bool fused) const override {
    if (fused) return kFusedSuffixes;
    return kSuffixes;
  }

  Result<SchemeId> scheme(const Linear& linear) const override {
    if (!is_quantized(linear)) return unquantized_scheme(source_, linear, model_);
    const auto parts = find(linear);
    if (!parts) return parts.status();
    return parts->row;
  }

  Result<ExpertMatrix> read(const Linear& linear) const override {
    if (!is_quantized(linear)) return read_unquantized(source_, linear);
    const auto parts = find(linear);
    if (!parts) return parts.status();
    const std::int64_t n = linear.n, k = linear.k, groups = format_.groups(k);
    IntegerSource from;
    from.format = format_;
    from.scale_format = wide_format(parts->scales->dtype);
    from.scales = transpose(source_.view(*parts->scales).data, groups, n, from.scale_format.bits / 8);
    from.zeros.resize(static_cast<std::size_t>(n * groups));
    const std::byte* zeros = source_.view(*parts->zeros).data;
    for (std::int64_t g = 0; g < groups; ++g)
      for (std::int64_t r = 0; r < n; ++r)
        from.zeros[static_cast<std::size_t>(r * groups + g)] = awq_code(zeros + g * n / 2, r);
    const std::byte* words = source_.view(*parts->codes).data;
    from.rows = [&](std::int64_t first, std::int64_t count, std::uint8_t* codes) {
      for (std::int64_t i = 0; i < k; ++i)
        for (std::int64_t r = 0; r < count; ++r) codes[r * k + i] = awq_code(words + i * n / 2, first + r);
    };
    auto matrix = integer_matrix(parts->row, n, k, from);
    if (!matrix) return matrix.status();
    return ExpertMatrix(std::move(*matrix));
  }

  std::optional<Quantized> quantized(const std::string& module) const override {
    const TensorEntry* codes = source_.find(module + ".qweight");
    if (codes == nullptr || codes->shape.size() != 2) return std::nullopt;
    return Quantized{codes->shape[1] * 8, codes->shape[0], "awq gemm, 4 bits"};
  }

 private:
  struct Parts {
    SchemeId row = SchemeId::bf16;
    const TensorEntry *codes = nullptr, *zeros = nullptr, *scales = nullptr;
  };

  bool is_quantized(const Linear& linear) const {
    if (linear.fused) return false;
    for (const char* suffix : {".qweight", ".qzeros", ".scales"})
      if (source_.find(linear.module + suffix) != nullptr) return true;
    return false;
  }

  Result<Parts> find(const Linear& linear) const {
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
    if (ignore_.names(linear.module))
      finder.fail(Code::bad_file, fmt::format("the layer is quantized, but {} names it", ignore_.key()));
    if (!finder.status().ok()) return finder.status();
    const std::int64_t sizes[] = {linear.k, model_.moe.hidden, model_.moe.intermediate};
    const auto row = integer_row(format_, {}, expert_sizes(sizes, linear, model_));
    if (!row) return Status(row.status().code(), quantization_of(config_) + ": " + row.status().message());
    parts.row = *row;
    return parts;
  }

  const Source& source_;
  const ModelConfig& model_;
  std::string config_;
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
