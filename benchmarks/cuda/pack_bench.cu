// Packing of weights for the GPU beside plain copies of as many bytes: pack_bench [N K]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cuda/weights.h"
#include "format/matrix.h"
#include "format/median.h"

namespace gatefold {
namespace {

using Clock = std::chrono::steady_clock;

/// GB/s of `work` that moves so many bytes: the median of several times.
template <class Work>
double rate(std::size_t bytes, Work&& work) {
  std::vector<double> seconds;
  for (int i = -1; i < 9; ++i) {
    const auto start = Clock::now();
    work();
    cudaDeviceSynchronize();
    if (i >= 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return static_cast<double>(bytes) / median(seconds) / 1e9;
}

int run(std::int64_t n, std::int64_t k) {
  const auto device = cuda::device_info();
  if (!device) {
    std::printf("%s\n", device.status().message().c_str());
    return 1;
  }
  constexpr std::size_t plain_bytes = 256 << 20;
  double plain = 0;
  {
    const auto from = cuda::Memory::allocate(plain_bytes, "a copy", 0, cuda::Place::pinned);
    const auto to = cuda::Memory::allocate(plain_bytes, "a copy");
    if (!from || !to) return 1;
    std::fill_n(from->data(), plain_bytes, std::byte{1});
    plain = rate(plain_bytes, [&] { (void)cuda::copy(to->data(), from->data(), plain_bytes); });
  }
  std::printf("%s, plain copy of page-locked memory: %.1f GB/s\n", device->name.c_str(), plain);
  std::printf("4 pairs of %ld x %ld in turn, as many bytes, GB/s\n%-20s%10s%12s%12s\n", static_cast<long>(n),
              static_cast<long>(k), "scheme", "packed", "of copy", "on the GPU");
  std::vector<cuda::PackedFormat> seen;
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    const auto id = static_cast<SchemeId>(i);
    const cuda::PackedFormat format = cuda::packed_format(scheme(id));
    if (std::find(seen.begin(), seen.end(), format) != seen.end()) continue;
    seen.push_back(format);
    std::vector<std::vector<QuantizedMatrix>> pairs;
    for (int p = 0; p < 4; ++p) {
      pairs.emplace_back(2, make_matrix(id, n, k));
      for (QuantizedMatrix& m : pairs.back())
        for (std::size_t at = 0; at < m.values.size(); ++at)
          m.values[at] = static_cast<std::byte>(at * 31 >> 3);
    }
    const cuda::PackedShape shape(format, n, k, 2);
    const auto packed_bytes = static_cast<std::size_t>(shape.bytes());
    auto memory = cuda::DeviceWeights::allocate(packed_bytes, Device::cuda());
    if (!memory) {
      std::printf("%s\n", memory.status().message().c_str());
      return 1;
    }
    std::size_t bytes = 0;
    for (const auto& pair : pairs)
      for (const QuantizedMatrix& m : pair) bytes += cuda::PackSource::bytes(m, {0, n});
    const std::size_t turns = (plain_bytes + bytes - 1) / bytes;
    const double whole = rate(turns * bytes, [&] {
      PackedMatrix packed[2];
      for (std::size_t turn = 0; turn < turns; ++turn)
        for (const auto& pair : pairs) (void)(*memory)->pack(pair.data(), 2, 0, packed);
    });
    // The kernels alone.
    const std::size_t each = bytes / pairs.size() / 2;
    const auto staged = cuda::Memory::allocate(2 * each, "staged matrices");
    const auto out = cuda::Memory::allocate(packed_bytes, "packed matrices");
    if (!staged || !out) return 1;
    cuda::PackJob job{.shape = shape, .end_unit = shape.units, .out = out->data()};
    for (int m = 0; m < 2; ++m) job.sources[m] = {pairs[0][m], {0, n}, staged->data() + m * each};
    const double kernel = rate(2 * each, [&] { (void)cuda::launch_pack(job, nullptr); });
    std::printf("%-20s%10.1f%12.2f%12.0f\n", std::string(scheme(id).name).c_str(), whole, whole / plain,
                kernel);
  }
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

}  // namespace
}  // namespace gatefold

int main(int argc, char** argv) {
  return argc == 3 ? gatefold::run(std::atoll(argv[1]), std::atoll(argv[2])) : gatefold::run(2048, 7168);
}
