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

std::atomic<bool> threads_ran{false}, forked{false};

struct Registry {
  std::mutex mutex;
  std::int64_t last = 0;
  std::unordered_map<std::int64_t, std::weak_ptr<Layer>> layers;
};
Registry& registry() {
  static Registry* one = new Registry;  // layers may outlive all else
  return *one;
}

int threads_of(const PlanOptions& options) {
  return options.threads == 0 ? omp_get_max_threads() : options.threads;
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
    : plan_(value(MoePlan::create(spec, options, device))), threads_(threads_of(options)) {}

PlannedLayer::Workspace PlannedLayer::take(cuda::Stream stream) {
  {
    const std::lock_guard lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->stream == stream) {
        Workspace found = std::move(*it);
        free_.erase(it);
        return found;
      }
  }
  Workspace made{stream, {}, {}};
  if (plan_.device().kind == Device::Kind::cuda)
    made.device = value(cuda::Memory::allocate(plan_.workspace_bytes(), "a workspace", plan_.device().index));
  else
    made.host.resize(plan_.workspace_bytes());
  return made;
}

void PlannedLayer::give_back(Workspace workspace) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(workspace));
}

void PlannedLayer::run(const ExpertWeights& weights, const MoeInputs& inputs, const MoeOutputs& outputs,
                       cuda::Stream stream, std::span<std::byte> workspace) {
  use_threads();
  if (!workspace.empty()) return check(plan_.run(weights, inputs, outputs, workspace, stream));
  Workspace mine = take(stream);
  const std::span<std::byte> bytes =
      mine.host.empty() ? std::span(mine.device.data(), mine.device.bytes()) : std::span(mine.host);
  Status done = plan_.run(weights, inputs, outputs, bytes, stream);
  give_back(std::move(mine));
  check(std::move(done));
}

Layer::Layer(ExpertWeights weights, const PlanOptions& options)
    : weights_(std::move(weights)), options_(options) {
  const std::lock_guard lock(registry().mutex);
  handle_ = ++registry().last;
}
Layer::~Layer() {
  const std::lock_guard lock(registry().mutex);
  registry().layers.erase(handle_);
}

std::shared_ptr<Layer> Layer::make(ExpertWeights weights, const PlanOptions& options) {
  auto layer = std::make_shared<Layer>(std::move(weights), options);
  const std::lock_guard lock(registry().mutex);
  registry().layers[layer->handle()] = layer;
  return layer;
}

std::shared_ptr<Layer> Layer::find(std::int64_t handle) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().layers.find(handle);
  std::shared_ptr<Layer> layer = found == registry().layers.end() ? nullptr : found->second.lock();
  if (layer == nullptr)
    invalid(fmt::format("experts = {} is the handle of no packed experts (any more)", handle));
  return layer;
}

std::shared_ptr<PlannedLayer> Layer::planned(std::int64_t tokens) {
  const int log2 = tokens <= 1 ? 0 : std::bit_width(static_cast<std::uint64_t>(tokens - 1));
  if (log2 >= static_cast<int>(plans_.size())) invalid(fmt::format("{} tokens are more than 2^24", tokens));
  const std::lock_guard lock(mutex_);
  std::shared_ptr<PlannedLayer>& plan = plans_[static_cast<std::size_t>(log2)];
  if (plan == nullptr || plan->threads() != threads_of(options_)) {
    PlanOptions options = options_;
    options.max_tokens = 1 << log2;
    plan = std::make_shared<PlannedLayer>(weights_.spec(), options, weights_.device());
  }
  return plan;
}

}  // namespace gatefold::python
