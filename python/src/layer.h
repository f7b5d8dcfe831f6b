#pragma once
/// \file
/// What the Python classes and the torch operators share: packed experts, plans with workspaces, and handles.

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gatefold/moe.h"
#include "workspaces.h"

namespace gatefold::python {

/// Called before anything that may start threads. Throws if this process was forked from one in which they
/// ran: they do not exist here, and a parallel region would wait for them forever.
void use_threads();

/// A plan, and workspaces for as many calls as run at once. Thread-safe.
class PlannedLayer {
 public:
  PlannedLayer(const MoeSpec& spec, const PlanOptions& options, const Device& device);

  const MoePlan& plan() const { return plan_; }
  /// What follows from outside of a plan's options.
  struct Surroundings {
    int threads;
    bool debug;
    friend bool operator==(const Surroundings&, const Surroundings&) = default;
  };
  const Surroundings& made_in() const { return made_in_; }
  /// MoePlan::run with a workspace of its own (Workspaces::lend).
  void run(const ExpertWeights& weights, const MoeInputs& inputs, const MoeOutputs& outputs,
           cuda::Stream stream, bool in_torch);

 private:
  MoePlan plan_;
  Surroundings made_in_;
  Workspaces workspaces_;
};

/// Packed experts, and the plans that torch operators use for them, by number of tokens.
class Layer : public std::enable_shared_from_this<Layer> {
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
  /// Another one, which follows from the name alone. Throws if another layer that lives has the name.
  std::int64_t publish(const std::string& name);
  /// Throws if there is no such layer any more.
  static std::shared_ptr<Layer> find(std::int64_t handle);
  static std::shared_ptr<Layer> make(ExpertWeights weights, const PlanOptions& options);
  /// Whether the plans of operators look after themselves (PlanOptions::debug_workspace), from now on.
  static void debug(bool on);

 private:
  ExpertWeights weights_;
  PlanOptions options_;
  std::int64_t handle_;
  std::mutex mutex_;
  std::array<std::shared_ptr<PlannedLayer>, 25> plans_;  ///< for up to 2^i tokens
};

}  // namespace gatefold::python
