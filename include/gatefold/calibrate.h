#pragma once
/// \file
/// Quantization that looks at what a model computes: GPTQ, AWQ, SmoothQuant. docs/calibration.md has what
/// each does, what it gains and what it costs.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include "gatefold/checkpoint.h"
#include "gatefold/moe.h"
#include "gatefold/scheme.h"
#include "gatefold/status.h"

namespace gatefold {

enum class Method : std::uint8_t {
  gptq,         ///< rounds columns one after the other and passes each error on to those that follow
  awq,          ///< scales input channels up where activations are large, and folds that into what is before
  smoothquant,  ///< such scales for schemes that quantize activations, their static scales, and then gptq
};
/// How static scales of activations are found.
enum class ActivationScale : std::uint8_t {
  mse,         ///< the least squared error over a sample that has the largest inputs in it
  percentile,  ///< 99.99 % of the numbers are not cut off
};

std::string_view name(Method method);
/// "gptq"; nothing if there is none of that name.
std::optional<Method> find_method(std::string_view name);

struct CalibrateOptions {
  SchemeId scheme = SchemeId::int4_g128;  ///< of the routed experts
  /// Takes the place of `scheme`. What it quantizes outside of the routed experts is rounded to nearest, and
  /// the text runs through it as it is then.
  std::optional<Recipe> recipe = {};
  Method method = Method::gptq;
  ActivationScale activation_scale = ActivationScale::mse;
  /// Where experts are quantized; routing, attention and shared experts are on the CPU.
  Device device = Device::cpu();
  int window = 512;  ///< tokens that attend to each other
  /// gptq and smoothquant: this and 3 * inputs / tokens (at most 1) of the mean of the Hessian's diagonal,
  /// added to it. By default 0.1; with smoothquant, which stores more bits, 0.01.
  std::optional<double> damping = {};
  /// An expert that fewer tokens are routed to sees others as well, with a tenth of the weight. As many as
  /// there are tokens: every expert sees all of them.
  std::int64_t min_samples = 256;
  int threads = 0;  ///< 0: OpenMP's default
  std::uint64_t shard_bytes = 5'000'000'000;
  /// Go on where an interrupted run with the same source, tokens and options stopped.
  bool resume = false;
  std::function<bool()> cancelled = {};  ///< as in ConvertOptions
  /// Experts done, of all layers' (those of layers that --resume finds done do not count).
  std::function<void(std::int64_t done, std::int64_t total)> progress = {};

  double effective_damping() const { return damping.value_or(method == Method::smoothquant ? 0.01 : 0.1); }
};

struct CalibrateReport {
  ConvertReport written;
  std::int64_t rare_experts = 0;    ///< with less than min_samples tokens
  std::int64_t fewest_samples = 0;  ///< of any expert
  int resumed_layers = 0;
  double seconds = 0;
};

/// What an fp8 KV cache multiplies its codes by: the largest key, and value, of each layer over the text is
/// the largest number of e4m3. Errors: evaluate's.
Result<std::vector<KvScales>> search_kv_scales(const Checkpoint& checkpoint,
                                               std::span<const std::int32_t> tokens, int window = 512,
                                               int threads = 0);

/// Quantizes every routed expert of `source` (unquantized, of a family that the decoder runs) over `tokens`,
/// cut into windows, and writes `destination` as convert() does. Layer by layer: each sees what the layers
/// before it, as they are quantized, make of the text. The same input gives the same bytes, for every number
/// of threads.
///
/// A layer that is done is kept in a hidden directory beside the destination, which is removed at the end; an
/// interrupted run leaves it for `resume`. Memory: the hidden states of all tokens in f32, twice, and for
/// each thread one expert with its inputs. On a GPU, of whose bits the same holds but which are not the
/// CPU's: these states and at most 4 experts.
///
/// Errors: convert's, resolve's and Decoder::load's, cuda_layer_quantizer's, fewer tokens than a window, a
/// token outside the vocabulary, a method that has nothing to do in the scheme of a layer, one that scales
/// the inputs of a shared expert that a recipe quantizes (awq and smoothquant), layers of another run.
Result<CalibrateReport> calibrate(const Checkpoint& source, const std::filesystem::path& destination,
                                  std::span<const std::int32_t> tokens, const CalibrateOptions& options);

}  // namespace gatefold
