#pragma once
/// \file
/// Runs kernels between canaries, in poisoned buffers.

#include <fmt/format.h>

#include <vector>

#include "gatefold/moe.h"
#include "moe/workspace.h"

namespace gatefold {

/// Canaries and poison of a workspace in device memory are made and checked in a copy on the host.
class DebugWorkspace {
 public:
  DebugWorkspace(const WorkspaceLayout& layout, std::byte* base, const Device& device, cuda::Stream stream)
      : layout_(layout), base_(base), stream_(stream) {
    if (device.kind == Device::Kind::cuda) copy_.resize(layout.bytes());
  }
  Status poison() {
    layout_.poison(copy_.empty() ? base_ : copy_.data());
    if (copy_.empty()) return {};
    if (Status status = cuda::copy(base_, copy_.data(), layout_.used_bytes(), stream_); !status.ok())
      return status;
    return cuda::synchronize(stream_);
  }
  Result<const WorkspaceLayout::Region*> damaged() {
    if (copy_.empty()) return layout_.damaged(base_);
    if (Status status = cuda::copy(copy_.data(), base_, layout_.used_bytes(), stream_); !status.ok())
      return status;
    if (Status status = cuda::synchronize(stream_); !status.ok()) return status;
    return layout_.damaged(copy_.data());
  }

 private:
  const WorkspaceLayout& layout_;
  std::byte* base_;
  cuda::Stream stream_;
  std::vector<std::byte> copy_;
};

/// `launch` in a workspace of which every buffer is poisoned before. Error: `name` wrote outside of a buffer.
template <class Launch>
Status run_in_debug_workspace(DebugWorkspace debug, std::string_view name, const Launch& launch) {
  if (Status status = debug.poison(); !status.ok()) return status;
  if (Status status = launch(); !status.ok()) return status;
  const auto damaged = debug.damaged();
  if (!damaged) return damaged.status();
  if (const auto* region = *damaged)
    return {Code::internal, fmt::format("{} wrote outside its workspace, near buffer '{}' ({} bytes at {})",
                                        name, region->name, region->bytes, region->offset)};
  return {};
}

}  // namespace gatefold
