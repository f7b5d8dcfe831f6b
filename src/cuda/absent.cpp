// The functions of gatefold/cuda*.h, and the list of kernels, in a build without CUDA.
#include "gatefold/cuda_linear.h"
#include "gatefold/cuda_quantize.h"

#include <vector>

#include "cuda/measure.h"
#include "moe/kernel.h"
#include "quantize/layer_quantizer.h"

namespace gatefold::cuda {
namespace {
Status absent() {
  return {Code::unsupported, "this build has no CUDA backend (configure with -DGATEFOLD_CUDA=ON)"};
}
}  // namespace

DeviceGuard::DeviceGuard(int device) : device_(device), previous_(device) {}
DeviceGuard::~DeviceGuard() {}

Result<DeviceInfo> device_info(int) {
  return absent();
}

Memory& Memory::operator=(Memory&&) noexcept = default;
Memory::~Memory() {}  // nothing was allocated
Result<Memory> Memory::allocate(std::size_t, std::string_view, int, Place) {
  return absent();
}

Status copy(void*, const void*, std::size_t, Stream) {
  return absent();
}
Status fill(void*, unsigned char, std::size_t, Stream) {
  return absent();
}
Status synchronize(Stream) {
  return absent();
}

struct Graph::State {};
Result<Graph> Graph::record(const std::function<Status(Stream)>&, int) {
  return absent();
}
Status Graph::launch(Stream) const {
  return absent();
}

Result<ActivationLayout> activation_layout(SchemeId, std::int64_t, std::int64_t) {
  return absent();
}
Status quantize_activations(SchemeId, const QuantizeInputs&, const QuantizeOutputs&, std::span<std::byte>,
                            Stream) {
  return absent();
}

struct LinearWeights::State {
  LinearShape shape;
};
Result<LinearWeights> LinearWeights::pack(std::span<const QuantizedMatrix* const>, const LinearOptions&,
                                          int) {
  return absent();
}
const LinearShape& LinearWeights::shape() const {
  return state_->shape;
}
int LinearWeights::device() const {
  return 0;
}
std::size_t LinearWeights::packed_bytes() const {
  return 0;
}
struct LinearPlan::State {
  LinearShape shape;
};
Result<LinearPlan> LinearPlan::create(const LinearShape&, const LinearOptions&, int) {
  return absent();
}
std::size_t LinearPlan::workspace_bytes() const {
  return 0;
}
Status LinearPlan::grouped_gemm(const LinearWeights&, const LinearInputs&, const MutableMatrixView&,
                                std::span<std::byte>, Stream) const {
  return absent();
}
Status LinearPlan::scaled_mm(const LinearWeights&, const LinearInputs&, const MutableMatrixView&,
                             std::span<std::byte>, Stream) const {
  return absent();
}
const LinearShape& LinearPlan::shape() const {
  return state_->shape;
}
std::vector<CudaCandidate> LinearPlan::candidates(int) const {
  return {};
}

struct Timer::State {};
Result<Timer> Timer::create(int) {
  return absent();
}
Result<double> Timer::launched(const Work&) {
  return absent();
}
Result<std::vector<double>> Timer::replayed(const Work&, int) {
  return absent();
}
Result<std::vector<double>> Timer::rested(const Work&, int) {
  return absent();
}
Status launch_read(const ReadArgs&, int, Stream) {
  return absent();
}
Result<double> dense_gflop_per_s(Format, int) {
  return absent();
}
Result<Clocks> read_clocks(int) {
  return absent();
}

}  // namespace gatefold::cuda

namespace gatefold {

Result<std::unique_ptr<LayerQuantizer>> cuda_layer_quantizer(const LayerInputs&, int, int) {
  return cuda::device_info().status();
}

Result<std::vector<float>> cuda_search_smoothing(SchemeId, bool, bool, const Sample&,
                                                 std::span<const std::vector<float>>, int) {
  return cuda::device_info().status();
}

std::span<const KernelInfo> cuda_kernels() {
  static const std::vector<KernelInfo> list = [] {
    std::vector<KernelInfo> kernels;
    for_each_scheme([&]<class S>() {
      kernels.push_back({"cuda.sm_90a." + std::string(S::scheme.name), S::id, Device::Kind::cuda, nullptr,
                         [](const MoeSpec&, const PlanOptions&, const Device&) {
                           return cuda::device_info().status().message();
                         },
                         nullptr, nullptr});
    });
    return kernels;
  }();
  return list;
}

}  // namespace gatefold
