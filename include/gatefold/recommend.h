#pragma once
/// \file
/// Which scheme for which layer: the least loss within a budget of bits.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "gatefold/calibrate.h"
#include "gatefold/recipe.h"

namespace gatefold {

/// What it costs to store the routed experts of one layer in a scheme, and leave all others as they are.
struct Sensitivity {
  int layer = 0;
  SchemeId scheme = SchemeId::bf16;
  std::uint64_t bytes = 0;     ///< of the experts, scales counted
  double bits_per_weight = 0;  ///< the same
  double kl = 0;               ///< mean KL(unquantized || quantized), nats per token
  bool chosen = false;
};

struct RecommendOptions {
  double budget = 4.5;                 ///< bits per weight of the routed experts, on average over all layers
  std::vector<SchemeId> schemes = {};  ///< to choose from; empty: all that leave activations as they are
                                       ///< (smoothquant: all that do not) and fit the model
  std::optional<Method> method = {};   ///< with which the recipe will be followed; none: round to nearest
  QuantizeOptions quantize = {};       ///< of round to nearest
  CalibrateOptions calibrate = {};     ///< window, damping, min_samples, threads and cancelled are taken
  int whole = 4;  ///< at most so many of the best recipes are measured as a whole; 0: none
  /// After each measurement; at most `total` of them are to be made.
  std::function<void(std::int64_t done, std::int64_t total)> progress = {};
};

struct Recommendation {
  Recipe recipe;
  std::vector<Sensitivity> measured;    ///< by layer, then scheme
  double bits_per_weight = 0;           ///< of the recipe
  double kl = 0;                        ///< predicted: the sum of the chosen ones
  std::optional<double> whole_kl = {};  ///< of the recipe as a whole, if that was measured
};

/// Measures every scheme in every MoE layer by itself, on the text alone, and chooses one for each layer so
/// that the sum of what they lose is least within the budget (least_loss.h). What layers lose does not just
/// add up: of this recipe, those that come next among all that differ from it in two layers, and the best
/// single scheme, that one is taken which loses least as a whole, its layers quantized one after the other.
/// With a method, layers are calibrated on the first three quarters of the text and measured on the last one;
/// without, all of it is measured. Time: for every pair of layer and scheme the layer is quantized, and the
/// text runs through the layers behind it; for every recipe, all layers. Memory: the hidden states of all
/// tokens, some six times, and the unquantized logits (beyond 256 MiB in a temporary file).
///
/// Errors: those of calibrate, a budget below the smallest schemes, a scheme that a layer cannot store.
Result<Recommendation> recommend(const Checkpoint& source, std::span<const std::int32_t> tokens,
                                 const RecommendOptions& options);

}  // namespace gatefold
