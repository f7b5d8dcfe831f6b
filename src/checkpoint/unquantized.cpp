// Unquantized linear layers: "<module>.weight" [n, k], or fused "<module>" [experts, rows, k].

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checkpoint/convention.h"

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
  const std::int64_t shape[] = {linear.fused->experts, linear.fused->rows, linear.k};
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

  Result<ExpertMatrix> read(const Linear& linear) const override {
    auto matrix = unquantized_matrix(source_, linear);
    if (!matrix) return matrix.status();
    return ExpertMatrix(*matrix);
  }

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

Result<MatrixView> unquantized_matrix(const Source& source, const Linear& linear) {
  auto entry = find_weight(source, linear);
  if (!entry) return entry.status();
  const TensorView tensor = source.view(**entry);
  if (!linear.fused) return MatrixView{tensor.data, tensor.dtype, linear.n, linear.k};
  const FusedSlice& slice = *linear.fused;
  if (slice.row_step != 1)
    return Status{Code::unsupported, source.where(**entry) + ": unquantized, with interleaved rows"};
  const std::int64_t row = slice.expert * slice.rows + slice.first_row;
  return MatrixView{tensor.data + row * linear.k * bits(tensor.dtype) / 8, tensor.dtype, linear.n, linear.k};
}

}  // namespace gatefold
