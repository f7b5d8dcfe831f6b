#pragma once
/// \file
/// Calls of layers in turn on a GPU, to be timed.

#include <random>

#include "moe/synthetic.h"

namespace gatefold {

/// Device arrays of several calls, each with another layer and another routing.
class GpuCalls {
 public:
  /// As many as read several times what the L2 cache holds. Any plan of the same layer, device and number of
  /// tokens may run them.
  static Result<GpuCalls> create(const SyntheticLayers& layers, int tokens, BenchFrom from,
                                 BenchRouting routing, const MoePlan& plan);

  std::size_t count() const { return routings_.size(); }
  double mean_weight_bytes() const;
  /// All calls, and bare reads of the weights that they read.
  Status run(const MoePlan& plan, cuda::Stream stream) const;
  Status read(cuda::Stream stream) const;

 private:
  struct Routed {
    explicit Routed(std::vector<std::int32_t> of_slots);
    std::vector<std::int32_t> ids, distinct;  ///< distinct: experts of this layer
  };

  GpuCalls(const SyntheticLayers& layers, int tokens, BenchFrom from)
      : layers_(&layers), tokens_(tokens), from_(from) {}

  std::size_t slots() const {
    return static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(layers_->spec.top_k);
  }
  std::size_t logits_of_call() const {
    return from_ == BenchFrom::logits ? static_cast<std::size_t>(tokens_ * layers_->spec.experts) : 0;
  }
  const ExpertWeights& layer(std::size_t call) const {
    return layers_->layers[call % layers_->layers.size()];
  }
  std::uint64_t weight_bytes(std::size_t call) const {
    return bytes_of(layer(call), routings_[call].distinct.size());
  }
  void add(BenchRouting routing);
  Status copy(const MoePlan& plan);
  Status quantize_hidden();
  /// Calls that are routed by hidden states alone: finds which experts each has.
  Status find_routings(const MoePlan& plan);
  Status run(const MoePlan& plan, std::size_t call, std::int32_t* topk_ids, cuda::Stream stream) const;
  /// Of a call. Those of the next one begin a row later, so that they choose other experts.
  MatrixView hidden(std::size_t call) const {
    const auto skipped = call * static_cast<std::size_t>(layers_->spec.hidden) * 2;
    return {hidden_.data() + skipped, layers_->spec.act_dtype, tokens_, layers_->spec.hidden};
  }

  const SyntheticLayers* layers_;
  int tokens_;
  BenchFrom from_;
  std::mt19937 random_{1};
  std::vector<Routed> routings_;
  cuda::Memory hidden_, out_, ids_, weights_, logits_, workspace_;
  cuda::Memory codes_, scales_, token_scales_;  ///< of hidden states
};

}  // namespace gatefold
