#pragma once
/// \file
/// One MoE layer under calibration.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "gatefold/calibrate.h"
#include "gatefold/quantize.h"
#include "quantize/layer_quantizer.h"

namespace gatefold {

/// The hidden states of all tokens, [T, H] each.
struct Stream {
  std::vector<float> residual;  ///< what one layer hands to the next
  std::vector<float> normed;    ///< what an MoE layer reads
};

struct QuantizedLayer {
  std::vector<QuantizedExpert> experts;
  /// [H]: gate and up are quantized times this; the norm before the layer is to be divided by it, what else
  /// reads the norm's output multiplied. Powers of two, so that this is exact. Empty: all 1.
  std::vector<float> fold;
  std::vector<std::int64_t> samples;  ///< tokens routed to each expert
};

/// Of one layer; `scheme` is that of its routed experts.
struct LayerOptions : CalibrateOptions {
  std::optional<SchemeId> shared;  ///< scheme that the shared expert is rounded to
};

/// Quantizes the experts of a layer, and adds the layer's output to the stream. `expert_done` is called for
/// each, one at a time; false stops.
Result<QuantizedLayer> calibrate_layer(const Checkpoint& checkpoint, int layer, const LayerOptions& options,
                                       Stream& stream, const std::function<bool()>& expert_done);

/// Only adds the output of a layer that is quantized already.
Status run_layer(const Checkpoint& checkpoint, int layer, const LayerOptions& options,
                 const QuantizedLayer& quantized, Stream& stream);

/// The experts of a layer, which must not be quantized, rounded to nearest.
Result<QuantizedLayer> rounded_layer(const Checkpoint& checkpoint, int layer, SchemeId scheme,
                                     const QuantizeOptions& options, int threads);

/// A matrix of a layer's shared expert, which must not be quantized.
Result<MatrixView> plain_shared_expert(const Checkpoint& checkpoint, int layer, Projection projection);

}  // namespace gatefold
