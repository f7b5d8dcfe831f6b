#pragma once
/// \file
/// Runs kernels between canaries, in poisoned buffers.

#include <vector>

#include "gatefold/moe.h"
#include "moe/workspace.h"

namespace gatefold {

/// Canaries and poison of a workspace in device memory are made and checked in a copy on the host.
class DebugWorkspace {
 public:
  DebugWorkspace(const WorkspaceLayout& layout, std::byte* base, const Device& device, cuda::Stream stream);

  /// Poisons every buffer, then launches. Error: `name` wrote outside of a buffer.
  template <class Launch>
  Status run(std::string_view name, const Launch& launch) {
    if (Status status = poison(); !status.ok()) return status;
    if (Status status = launch(); !status.ok()) return status;
    return check(name);
  }

 private:
  Status poison();
  Status check(std::string_view name);

  const WorkspaceLayout& layout_;
  std::byte* base_;
  cuda::Stream stream_;
  std::vector<std::byte> copy_;
};

}  // namespace gatefold
