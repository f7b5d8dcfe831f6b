#pragma once
/// \file
/// The seam between calibration and a device that does it: one MoE layer's experts, each quantized for the
/// tokens that it sees.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gatefold/calibrate.h"
#include "gatefold/quantize.h"
#include "quantize/gptq.h"
#include "quantize/smoothing.h"

namespace gatefold {

struct QuantizedExpert {
  QuantizedMatrix gate, up, down;
};

/// gate and up [I, H], down [H, I]; f32, f16 or bf16, in host memory.
struct PlainExpert {
  MatrixView gate, up, down;
};

/// Tokens that an expert is quantized for, in ascending order.
struct Samples {
  std::vector<std::int32_t> tokens;
  std::vector<float> weights;     ///< of the expert's output; 0: routed elsewhere
  std::vector<float> importance;  ///< of an error: the weight's square
  std::int64_t routed = 0;
  std::int64_t size() const { return static_cast<std::int64_t>(tokens.size()); }
};

/// What a layer is quantized for.
struct LayerInputs {
  SchemeId scheme;
  Method method = Method::gptq;
  std::int64_t tokens = 0, hidden = 0, inner = 0;  ///< T, H, I
  const float* normed = nullptr;                   ///< [T, H]: what experts read
  const float* residual = nullptr;                 ///< [T, H]: what their outputs are added to
  std::span<const float> fold = {};                ///< [H]: what gate and up are multiplied by, or nothing
  std::optional<TensorScale> input_scale = {};     ///< static, of gate's and up's inputs
  /// The same for inputs [rows, I] of down, in host memory; there if input_scale is.
  std::function<TensorScale(const std::vector<float>& y)> down_scale = {};
};

/// Several experts are quantized at a time, each by a worker, 0 .. workers - 1, which one thread uses at a
/// time.
class LayerQuantizer {
 public:
  struct Options {
    GptqOptions gate_up, down;
  };
  virtual ~LayerQuantizer() = default;

  /// Quantizes gate and up for the expert's inputs, then down for what they leave (and but for gptq, moves
  /// scales between up and down before). The expert's output waits for add().
  virtual Status quantize(int worker, const PlainExpert& expert, const Samples& samples,
                          const Options& options, QuantizedExpert& out) = 0;
  /// Only the output, of an expert that is quantized already.
  virtual Status run(int worker, const QuantizedExpert& expert, const Samples& samples) = 0;
  /// Adds the worker's output to the residual. One call at a time; their order is that of the sums.
  virtual Status add(int worker) = 0;
  /// The residual [T, H], to host memory.
  virtual Status finish(float* residual) = 0;
};

/// What model/smoothing.h's search_smoothing finds, on a GPU. Errors: cuda_layer_quantizer's. Memory: the
/// matrices.
Result<std::vector<float>> cuda_search_smoothing(SchemeId id, bool maxima, bool powers_of_two,
                                                 const Sample& sample,
                                                 std::span<const std::vector<float>> matrices, int device);

/// On a GPU. Two runs give the same bits. Memory: the inputs, and for each worker one expert with its inputs.
/// Errors: no GPU that the kernels run on, no cuBLAS (unsupported); no memory.
Result<std::unique_ptr<LayerQuantizer>> cuda_layer_quantizer(const LayerInputs& inputs, int workers,
                                                             int device);

}  // namespace gatefold
