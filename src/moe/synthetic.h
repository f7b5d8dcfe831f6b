#pragma once
/// \file
/// Layers of random weights to time plans with.

#include <random>

#include "gatefold/bench.h"
#include "gatefold/moe.h"

namespace gatefold {

double median(std::vector<double> values);

/// top_k different experts for every token of ids [T, top_k].
void random_routing(const MoeSpec& spec, std::mt19937& random, std::vector<std::int32_t>& ids);

struct SyntheticLayers {
  MoeSpec spec;
  std::vector<ExpertWeights> layers;

  /// As many layers of a shape, each with memory of its own, as hold `bytes`.
  static Result<SyntheticLayers> create(const BenchShape& shape, SchemeId scheme, std::uint64_t bytes,
                                        const Device& device = {});
};

/// Calls with the same number of tokens, uniform random routing, and another layer each time.
class SyntheticCalls {
 public:
  SyntheticCalls(const SyntheticLayers& layers, int tokens);

  /// Draws the next call.
  void next();
  /// Runs it; any number of plans may. Returns seconds.
  Result<double> run(const MoePlan& plan);

  const ExpertWeights& layer() const { return layers_.layers[call_ % layers_.layers.size()]; }
  /// A layer that was not used lately.
  const ExpertWeights& other_layer() const {
    return layers_.layers[(call_ + layers_.layers.size() / 2) % layers_.layers.size()];
  }
  std::uint64_t weight_bytes() const;  ///< of the experts that the call hits

 private:
  const SyntheticLayers& layers_;
  int tokens_;
  std::size_t call_ = 0;
  std::mt19937 random_{1};
  std::vector<float> hidden_, out_, weights_;
  std::vector<std::int32_t> ids_;
  std::vector<std::byte> workspace_;
};

}  // namespace gatefold
