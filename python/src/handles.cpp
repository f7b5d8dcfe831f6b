#include "handles.h"

#include <mutex>
#include <unordered_map>

namespace gatefold::python {
namespace {

struct Registry {
  std::mutex mutex;
  std::int64_t last = 0;
  struct Entry {
    const Handled* weights;  ///< also when they are being destroyed
    std::weak_ptr<Handled> alive;
  };
  std::unordered_map<std::int64_t, Entry> entries;
};
Registry& registry() {
  static Registry* one = new Registry;  // weights may outlive all else
  return *one;
}

}  // namespace

Handled::Handled() {
  const std::lock_guard lock(registry().mutex);
  handle_ = ++registry().last;
}
Handled::~Handled() {
  const std::lock_guard lock(registry().mutex);
  std::erase_if(registry().entries, [&](const auto& entry) { return entry.second.weights == this; });
}

void Handled::enter(const std::shared_ptr<Handled>& made) {
  const std::lock_guard lock(registry().mutex);
  registry().entries[made->handle()] = {made.get(), made};
}

std::int64_t Handled::publish(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  const auto handle =
      static_cast<std::int64_t>(hash >> 2 | std::uint64_t{1} << 62);  // none that counts has it
  const std::lock_guard lock(registry().mutex);
  const auto [at, is_new] = registry().entries.try_emplace(handle);
  if (!is_new && at->second.weights != this)
    invalid(fmt::format("'{}' is the name of other weights that are in use", name));
  at->second = {this, weak_from_this()};
  return handle;
}

std::shared_ptr<Handled> Handled::look_up(std::int64_t handle) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().entries.find(handle);
  return found == registry().entries.end() ? nullptr : found->second.alive.lock();
}

}  // namespace gatefold::python
