#include "layer.h"

#include <fmt/format.h>
#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <bit>
#include <unordered_map>

#include "errors.h"

namespace gatefold::python {
namespace {

std::atomic<bool> threads_ran{false}, forked{false}, debugging{false};

struct Registry {
  std::mutex mutex;
  std::int64_t last = 0;
  struct Entry {
    const Layer* layer;  ///< also when it is being destroyed
    std::weak_ptr<Layer> alive;
  };
  std::unordered_map<std::int64_t, Entry> layers;
};
Registry& registry() {
  static Registry* one = new Registry;  // layers may outlive all else
  return *one;
}

PlannedLayer::Surroundings surroundings(const PlanOptions& options) {
  return {options.threads == 0 ? omp_get_max_threads() : options.threads, options.debug_workspace};
}

}  // namespace

void use_threads() {
  if (forked)
    throw StatusError{{Code::unsupported,
                       "this process was forked after Gatefold had started threads, which do not exist here: "
                       "start it with multiprocessing's method 'spawn'"}};
  if (!threads_ran.exchange(true)) pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

PlannedLayer::PlannedLayer(const MoeSpec& spec, const PlanOptions& options, const Device& device)
    : plan_(value(MoePlan::create(spec, options, device))),
      made_in_(surroundings(options)),
      workspaces_(plan_.workspace_bytes(), device) {}

void PlannedLayer::run(const ExpertWeights& weights, const MoeInputs& inputs, const MoeOutputs& outputs,
                       cuda::Stream stream, bool in_torch) {
  use_threads();
  workspaces_.lend(stream, in_torch, [&](std::span<std::byte> workspace) {
    return plan_.run(weights, inputs, outputs, workspace, stream);
  });
}

Layer::Layer(ExpertWeights weights, const PlanOptions& options)
    : weights_(std::move(weights)), options_(options) {
  const std::lock_guard lock(registry().mutex);
  handle_ = ++registry().last;
}
Layer::~Layer() {
  const std::lock_guard lock(registry().mutex);
  std::erase_if(registry().layers, [&](const auto& entry) { return entry.second.layer == this; });
}

std::shared_ptr<Layer> Layer::make(ExpertWeights weights, const PlanOptions& options) {
  auto layer = std::make_shared<Layer>(std::move(weights), options);
  const std::lock_guard lock(registry().mutex);
  registry().layers[layer->handle()] = {layer.get(), layer};
  return layer;
}

std::int64_t Layer::publish(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  const auto handle =
      static_cast<std::int64_t>(hash >> 2 | std::uint64_t{1} << 62);  // none that counts has it
  const std::lock_guard lock(registry().mutex);
  const auto [at, is_new] = registry().layers.try_emplace(handle);
  if (!is_new && at->second.layer != this)
    invalid(fmt::format("'{}' is the name of other experts that are in use", name));
  at->second = {this, weak_from_this()};
  return handle;
}

void Layer::debug(bool on) {
  debugging = on;
}

std::shared_ptr<Layer> Layer::find(std::int64_t handle) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().layers.find(handle);
  std::shared_ptr<Layer> layer = found == registry().layers.end() ? nullptr : found->second.alive.lock();
  if (layer == nullptr)
    invalid(fmt::format("experts = {} is the handle of no packed experts (any more)", handle));
  return layer;
}

std::shared_ptr<PlannedLayer> Layer::planned(std::int64_t tokens) {
  const int log2 = tokens <= 1 ? 0 : std::bit_width(static_cast<std::uint64_t>(tokens - 1));
  if (log2 >= static_cast<int>(plans_.size())) invalid(fmt::format("{} tokens are more than 2^24", tokens));
  const std::lock_guard lock(mutex_);
  std::shared_ptr<PlannedLayer>& plan = plans_[static_cast<std::size_t>(log2)];
  PlanOptions options = options_;
  options.debug_workspace = debugging;
  if (plan == nullptr || plan->made_in() != surroundings(options)) {
    options.max_tokens = 1 << log2;
    plan = std::make_shared<PlannedLayer>(weights_.spec(), options, weights_.device());
  }
  return plan;
}

}  // namespace gatefold::python
