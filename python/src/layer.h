#pragma once
/// \file
/// What the Python classes and the torch operators share: packed experts, plans with workspaces, and handles.

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "gatefold/moe.h"

namespace gatefold::python {

/// Called before anything that may start threads. Throws if this process was forked from one in which they
/// ran: they do not exist here, and a parallel region would wait for them forever.
void use_threads();

/// A plan, and workspaces for as many calls as run at once. Thread-safe.
class PlannedLayer {
 public:
  PlannedLayer(const MoeSpec& spec, const PlanOptions& options, const Device& device);

  const MoePlan& plan() const { return plan_; }
  int threads() const { return threads_; }  ///< that it was made for
  /// MoePlan::run with a workspace of its own. `workspace` is used instead if it is given.
  void run(const ExpertWeights& weights, const MoeInputs& inputs, const MoeOutputs& outputs,
           cuda::Stream stream, std::span<std::byte> workspace = {});

 private:
  struct Workspace {
    cuda::Stream stream = nullptr;  ///< the order in which it may be used again
    std::vector<std::byte> host;
    cuda::Memory device;
  };
  Workspace take(cuda::Stream stream);
  void give_back(Workspace workspace);

  MoePlan plan_;
  int threads_;
  std::mutex mutex_;
  std::vector<Workspace> free_;
};

/// Packed experts, and the plans that torch operators use for them, by number of tokens.
class Layer {
 public:
  Layer(ExpertWeights weights, const PlanOptions& options);
  ~Layer();
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  const ExpertWeights& weights() const { return weights_; }
  const PlanOptions& options() const { return options_; }
  /// A plan for at least this many tokens.
  std::shared_ptr<PlannedLayer> planned(std::int64_t tokens);

  /// A number for this layer, by which operators know it; never used again in this process.
  std::int64_t handle() const { return handle_; }
  /// Throws if there is no such layer any more.
  static std::shared_ptr<Layer> find(std::int64_t handle);
  static std::shared_ptr<Layer> make(ExpertWeights weights, const PlanOptions& options);

 private:
  ExpertWeights weights_;
  PlanOptions options_;
  std::int64_t handle_;
  std::mutex mutex_;
  std::array<std::shared_ptr<PlannedLayer>, 25> plans_;  ///< for up to 2^i tokens
};

}  // namespace gatefold::python
