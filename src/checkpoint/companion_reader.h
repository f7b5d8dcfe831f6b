#pragma once
/// \file
/// What readers of conventions share: a layer is quantized if one of the convention's companion tensors
/// exists, and unquantized otherwise. A convention adds which tensors a quantized layer has, and how they are
/// decoded.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/linear_tensors.h"

namespace gatefold {

inline constexpr std::string_view kFusedUnquantized[] = {""};

/// How a convention names the tensors of a layer.
struct LayerSuffixes {
  std::span<const std::string_view> all, companions;
  std::span<const std::string_view> fused = kFusedUnquantized;
  bool fused_companions = false;  ///< else only layers that are not fused can be quantized
};

/// `Layer`, which a convention defines, is one quantized layer: its tensors, all of the right type and shape,
/// and `matrix`, a QuantizedMatrix without data.
template <class Layer>
class CompanionReader : public LinearReader {
 public:
  std::span<const std::string_view> suffixes(bool fused) const final {
    return fused ? suffixes_.fused : suffixes_.all;
  }

  Result<SchemeId> scheme(const Linear& linear) const final {
    if (!is_quantized(linear)) return unquantized(linear);
    const auto layer = find(linear);
    if (!layer) return layer.status();
    return layer->matrix.scheme;
  }

  Result<ExpertMatrix> read(const Linear& linear) const final {
    if (!is_quantized(linear)) return read_unquantized(source_, linear);
    auto layer = find(linear);
    if (!layer) return layer.status();
    if (Status status = load(linear, *layer); !status.ok()) return status;
    return ExpertMatrix(std::move(layer->matrix));
  }

  Result<std::vector<std::int32_t>> input_order(const Linear& linear) const final {
    if (!is_quantized(linear)) return std::vector<std::int32_t>();
    const auto layer = find(linear);
    if (!layer) return layer.status();
    return input_order(linear, *layer);
  }

 protected:
  CompanionReader(const Source& source, const ModelConfig& model, std::string config,
                  const LayerSuffixes& suffixes)
      : source_(source), model_(model), config_(std::move(config)), suffixes_(suffixes) {}

  /// The tensors of a quantized layer, and its scheme. Reads no data.
  virtual Result<Layer> find(const Linear& linear) const = 0;
  /// Fills layer.matrix.
  virtual Status load(const Linear& linear, Layer& layer) const = 0;
  virtual Result<std::vector<std::int32_t>> input_order(const Linear&, const Layer&) const {
    return std::vector<std::int32_t>();
  }

  const TensorEntry* entry(const std::string& module, std::string_view suffix) const {
    return source_.find(module + std::string(suffix));
  }

  /// Presence decides, not what a config lists: published models get that wrong.
  bool is_quantized(const Linear& linear) const {
    if (linear.fused.has_value() != suffixes_.fused_companions) return false;
    for (const std::string_view suffix : suffixes_.companions)
      if (entry(linear.module, suffix) != nullptr) return true;
    return false;
  }

  /// A matrix of a row and shape, without data.
  static QuantizedMatrix matrix_of(SchemeId row, const Linear& linear) {
    QuantizedMatrix matrix;
    matrix.scheme = row;
    matrix.n = linear.n;
    matrix.k = linear.k;
    matrix.scale_format = gatefold::scheme(row).weight.scale;
    return matrix;
  }

  const Source& source_;
  const ModelConfig& model_;
  const std::string config_;  ///< path of config.json

 private:
  Result<SchemeId> unquantized(const Linear& linear) const {
    if (!linear.fused)
      if (Status status = check_not_codes(source_, linear.module, suffixes_.companions); !status.ok())
        return status;
    return unquantized_scheme(source_, linear, model_);
  }

  const LayerSuffixes suffixes_;
};

}  // namespace gatefold
