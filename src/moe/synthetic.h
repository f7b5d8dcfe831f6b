#pragma once
/// \file
/// Layers of random weights to time plans with.

#include <random>

#include "gatefold/bench.h"
#include "gatefold/moe.h"

namespace gatefold {

/// top_k different experts for every token of ids [T, top_k]; -1: of another part (MoeSpec::ep_size).
void random_routing(const MoeSpec& spec, BenchRouting routing, std::mt19937& random,
                    std::vector<std::int32_t>& ids);
/// Logits [T, E] whose top_k largest are those of ids, in their order; the others are random.
std::vector<float> random_logits(const MoeSpec& spec, std::mt19937& random,
                                 const std::vector<std::int32_t>& ids);

/// [E, H] an order of its own for each expert (LayerVectors::input_order).
std::vector<std::int32_t> random_orders(const MoeSpec& spec);

/// Multiplies and adds of a call, in the mean.
double flop(const MoeSpec& spec, int tokens);
/// Sets us_read, us_multiply and us_floor of a row from the rates.
void set_floor(BenchRow& row, const MoeSpec& spec);
/// Packed bytes of so many routed experts, and of the shared one if there is one.
std::uint64_t bytes_of(const ExpertWeights& layer, std::size_t experts);

struct SyntheticLayers {
  MoeSpec spec;
  std::vector<ExpertWeights> layers;

  /// As many layers of a shape, each with memory of its own, as hold `bytes`.
  static Result<SyntheticLayers> create(const BenchShape& shape, SchemeId scheme, std::uint64_t bytes,
                                        const Device& device = {}, const BenchLayers& like = {});
};

/// Calls with the same number of tokens, random routing, and another layer each time.
class SyntheticCalls {
 public:
  SyntheticCalls(const SyntheticLayers& layers, int tokens, BenchFrom from = BenchFrom::ids,
                 BenchRouting routing = BenchRouting::uniform);

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
  void draw();

  const SyntheticLayers& layers_;
  int tokens_;
  BenchFrom from_;
  BenchRouting routing_;
  std::size_t call_ = 0;
  std::mt19937 random_{1};
  std::vector<float> hidden_, out_, weights_, logits_;
  std::vector<std::int32_t> ids_;
  std::vector<std::byte> workspace_;
};

}  // namespace gatefold
