#include "plans.h"

#include <pthread.h>

#include <atomic>

namespace gatefold::python {
namespace {

std::atomic<bool> threads_ran{false}, forked{false}, debugging{false};

}  // namespace

void use_threads() {
  if (forked)
    throw StatusError{{Code::unsupported,
                       "this process was forked after Gatefold had started threads, which do not exist here: "
                       "start it with multiprocessing's method 'spawn'"}};
  if (!threads_ran.exchange(true)) pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

void debug_operators(bool on) {
  debugging = on;
}

bool debugging_operators() {
  return debugging;
}

Workspaces::Workspace Workspaces::take(cuda::Stream stream) {
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
  if (device_.kind == Device::Kind::cuda)
    made.device = value(cuda::Memory::allocate(bytes_, "a workspace", device_.index));
  else
    made.host.resize(bytes_);
  return made;
}

void Workspaces::give_back(Workspace workspace) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(workspace));
}

}  // namespace gatefold::python
