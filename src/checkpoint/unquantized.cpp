// Unquantized linear layers: "<module>.weight" [n, k], or fused "<module>" [experts, rows, k] or its
// transpose.

#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/convention.h"
#include "format/matrix.h"

namespace gatefold {
namespace {

constexpr DType dtypes[] = {DType::bf16, DType::f16, DType::f32};
constexpr std::string_view suffixes_of_expert[] = {".weight"};
constexpr std::string_view suffixes_of_fused[] = {""};

Result<const TensorEntry*> find_weight(const Source& source, const Linear& linear) {
  if (!linear.fused) {
    const std::int64_t shape[] = {linear.n, linear.k};
    return require_tensor(source, linear.module + ".weight", shape, dtypes);
  }
  const FusedSlice& slice = *linear.fused;
  const std::int64_t shape[] = {slice.experts, slice.transposed ? linear.k : slice.rows,
                                slice.transposed ? slice.rows : linear.k};
  return require_tensor(source, linear.module, shape, dtypes);
}

class UnquantizedReader final : public LinearReader {
 public:
  UnquantizedReader(const Source& source, const ModelConfig& model, std::string config)
      : source_(source), model_(model), config_(std::move(config)) {}

  std::span<const std::string_view> suffixes(bool fused) const override {
    if (fused) return suffixes_of_fused;
    return suffixes_of_expert;
  }

  Result<SchemeId> scheme(const Linear& linear) const override {
    auto scheme = unquantized_scheme(source_, linear, model_);
    if (scheme) return scheme;
    return Status{scheme.status().code(),
                  fmt::format("{} ({} has no quantization_config)", scheme.status().message(), config_)};
  }

  Result<ExpertMatrix> read(const Linear& linear) const override { return read_unquantized(source_, linear); }

  std::optional<Quantized> quantized(const std::string&) const override { return std::nullopt; }

 private:
  const Source& source_;
  const ModelConfig& model_;
  std::string config_;
};

bool recognises(const nlohmann::json& quantization) {
  return quantization.is_null();
}

Result<std::unique_ptr<LinearReader>> open(const Source& source, const nlohmann::json&,
                                           const ModelConfig& model, const std::string& config) {
  return std::unique_ptr<LinearReader>(std::make_unique<UnquantizedReader>(source, model, config));
}

}  // namespace

const Convention unquantized::convention{"unquantized", recognises, open};

Result<SchemeId> unquantized_scheme(const Source& source, const Linear& linear, const ModelConfig& model) {
  auto entry = find_weight(source, linear);
  if (!entry) return entry.status();
  if ((*entry)->dtype == DType::f32) return model.moe.scheme;
  return (*entry)->dtype == DType::f16 ? SchemeId::f16 : SchemeId::bf16;
}

Result<ExpertMatrix> read_unquantized(const Source& source, const Linear& linear) {
  auto entry = find_weight(source, linear);
  if (!entry) return entry.status();
  const TensorView tensor = source.view(**entry);
  if (!linear.fused) return ExpertMatrix(MatrixView{tensor.data, tensor.dtype, linear.n, linear.k});
  const FusedSlice& slice = *linear.fused;
  const std::int64_t size = bits(tensor.dtype) / 8;
  const std::byte* expert = tensor.data + slice.expert * slice.rows * linear.k * size;
  if (slice.row_step == 1 && !slice.transposed)
    return ExpertMatrix(
        MatrixView{expert + slice.first_row * linear.k * size, tensor.dtype, linear.n, linear.k});

  // Rows that lie apart are copied.
  if (tensor.dtype == DType::f32)
    return Status{Code::unsupported, source.where(**entry) + ": F32, and its rows lie apart"};
  QuantizedMatrix matrix =
      make_matrix(tensor.dtype == DType::f16 ? SchemeId::f16 : SchemeId::bf16, linear.n, linear.k);
  const std::int64_t row_step = slice.transposed ? 1 : linear.k,
                     column_step = slice.transposed ? slice.rows : 1;
  for (std::int64_t n = 0; n < linear.n; ++n)
    for (std::int64_t k = 0; k < linear.k; ++k)
      std::memcpy(matrix.values.data() + (n * linear.k + k) * size,
                  expert + ((slice.first_row + n * slice.row_step) * row_step + k * column_step) * size,
                  static_cast<std::size_t>(size));
  return ExpertMatrix(std::move(matrix));
}

}  // namespace gatefold
