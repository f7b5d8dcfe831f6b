#include "moe/debug_workspace.h"

#include <fmt/format.h>

namespace gatefold {

DebugWorkspace::DebugWorkspace(const WorkspaceLayout& layout, std::byte* base, const Device& device,
                               cuda::Stream stream)
    : layout_(layout), base_(base), stream_(stream) {
  if (device.kind == Device::Kind::cuda) copy_.resize(layout.bytes());
}

Status DebugWorkspace::poison() {
  layout_.poison(copy_.empty() ? base_ : copy_.data());
  if (copy_.empty()) return {};
  if (Status status = cuda::copy(base_, copy_.data(), layout_.used_bytes(), stream_); !status.ok())
    return status;
  return cuda::synchronize(stream_);
}

Status DebugWorkspace::check(std::string_view name) {
  const std::byte* here = base_;
  if (!copy_.empty()) {
    if (Status status = cuda::copy(copy_.data(), base_, layout_.used_bytes(), stream_); !status.ok())
      return status;
    if (Status status = cuda::synchronize(stream_); !status.ok()) return status;
    here = copy_.data();
  }
  if (const WorkspaceLayout::Region* region = layout_.damaged(here))
    return {Code::internal, fmt::format("{} wrote outside its workspace, near buffer '{}' ({} bytes at {})",
                                        name, region->name, region->bytes, region->offset)};
  return {};
}

}  // namespace gatefold
