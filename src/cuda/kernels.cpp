#include <fmt/format.h>

#include "cuda/layer.h"
#include "cuda/weights.h"

namespace gatefold {
namespace {

std::size_t layout_bytes(SchemeId id, Format scale_format, std::int64_t n, std::int64_t k) {
  const cuda::PackedFormat format = cuda::packed_format(scheme(id), cuda::is_wide(id, scale_format));
  return static_cast<std::size_t>(cuda::PackedShape(format, n, k, 1).bytes());
}

const WeightLayout layout{"cuda records 8", layout_bytes, cuda::DeviceWeights::allocate, cuda::packed_scales};
static_assert(cuda::kPackedVersion == 8, "the layout's name says the version");

}  // namespace

std::span<const KernelInfo> cuda_kernels() {
  static const std::vector<KernelInfo> list = [] {
    std::vector<KernelInfo> kernels;
    for_each_scheme([&]<class S>() {
      kernels.push_back({fmt::format("cuda.sm_90a.{}", S::scheme.name), S::id, Device::Kind::cuda, &layout,
                         cuda::refuses, cuda::layer_workspace, cuda::layer, cuda::prepare_layer});
    });
    return kernels;
  }();
  return list;
}

}  // namespace gatefold
