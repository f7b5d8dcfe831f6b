// The functions of gatefold/cuda*.h in a build without CUDA.
#include "gatefold/cuda_quantize.h"

namespace gatefold::cuda {
namespace {
Status absent() {
  return {Code::unsupported, "this build has no CUDA backend (configure with -DGATEFOLD_CUDA=ON)"};
}
}  // namespace

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

Result<ActivationLayout> activation_layout(SchemeId, std::int64_t, std::int64_t) {
  return absent();
}
Status quantize_activations(SchemeId, const QuantizeInputs&, const QuantizeOutputs&, std::span<std::byte>,
                            Stream) {
  return absent();
}

}  // namespace gatefold::cuda
