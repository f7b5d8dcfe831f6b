// Packing and decoding on the device are what they are on the host.

#include <cstring>
#include <random>

#include "cuda/decode.h"
#include "cuda/weights.h"
#include "format/matrix.h"
#include "gpu.h"

namespace gatefold::cuda {
namespace {

using PackOnGpu = GpuTest;
using DecodeOnGpu = GpuTest;

template <class T>
__global__ void decode_words(const std::uint32_t* words, const std::uint32_t* terms, int count, Pair* out) {
  constexpr int per_row = T::P.value.bits / 4;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    Pair term = 0;
    if constexpr (T::P.folded) term = folded_term<T::P, T::M>(terms[i]);
    if constexpr (T::P.zeros) term = zero_term<T::P, T::M>(terms[i] & 15);
    decode8<T::P, T::M>(words + i * per_row, term, out + 4 * i);
  }
}

template <class S, bool kF16>
struct Decoded {
  static constexpr PackedFormat P = packed_format(S::scheme);
  static constexpr Format M = kF16 ? formats::f16 : formats::bf16;
};

template <class T>
void check_decode() {
  constexpr PackedFormat p = T::P;
  constexpr int per_row = p.value.bits / 4, count = 1 << 16;
  std::mt19937 random(3);
  std::vector<std::uint32_t> words(count * per_row), terms(count);
  for (auto& word : words) word = random();
  for (auto& term : terms) term = 1 + random() % 254;  // 255 is no power of two
  DeviceVector<std::uint32_t> device_words(words), device_terms(terms);
  DeviceVector<Pair> out(4 * count);
  decode_words<T><<<256, 256>>>(device_words.data(), device_terms.data(), count, out.data());
  const std::vector<Pair> decoded = out.host();
  for (int i = 0; i < count; ++i) {
    Pair term = 0, expected[4];
    if (p.folded) term = folded_term<T::P, T::M>(terms[i]);
    if (p.zeros) term = zero_term<T::P, T::M>(terms[i] & 15);
    decode8<T::P, T::M>(&words[i * per_row], term, expected);
    ASSERT_EQ(std::memcmp(expected, &decoded[4 * i], sizeof(expected)), 0) << std::hex << words[i * per_row];
  }
}

TEST_F(DecodeOnGpu, RandomWordsOfEveryFormat) {
  for_each_scheme([&]<class S>() {
    SCOPED_TRACE(S::scheme.name);
    check_decode<Decoded<S, false>>();
    check_decode<Decoded<S, true>>();
  });
}

TEST_F(PackOnGpu, SameBytesAsOnTheHost) {
  std::mt19937 random(1);
  for_each_scheme([&]<class S>() {
    const Granularity group = S::scheme.weight.group;
    const std::int64_t step = group.n == 1 && group.k != 0 ? group.k : 2, n = 37,
                       k = (202 + step - 1) / step * step;
    std::vector<QuantizedMatrix> matrices;
    for (int i = 0; i < 2; ++i) {
      matrices.push_back(make_matrix(S::id, n, k));
      for (auto* part : {&matrices[i].values, &matrices[i].scales, &matrices[i].zero_points})
        for (std::byte& byte : *part) byte = static_cast<std::byte>(random());
    }
    for (int count = 1; count <= 2; ++count) {
      PackJob job{.shape = {packed_format(S::scheme), n, k, count}};
      job.end_unit = job.shape.units;
      std::vector<std::byte> staged(2 * PackSource::bytes(matrices[0], {0, n})),
          expected(static_cast<std::size_t>(job.shape.bytes()));
      PackJob on_host = job;
      DeviceVector<std::byte> device_staged(staged.size()), out(expected.size(), 0);
      on_host.out = expected.data();
      job.out = out.data();
      stage({matrices.data(), static_cast<std::size_t>(count)}, {0, n}, staged.data());
      for (int i = 0; i < count; ++i) {
        const std::size_t at = i * PackSource::bytes(matrices[0], {0, n});
        on_host.sources[i] = {matrices[i], {0, n}, staged.data() + at};
        job.sources[i] = {matrices[i], {0, n}, device_staged.data() + at};
      }
      pack_on_host(on_host);
      ASSERT_TRUE(cuda::copy(device_staged.data(), staged.data(), staged.size()).ok());
      ASSERT_EQ(launch_pack(job, nullptr), cudaSuccess);
      EXPECT_EQ(out.host(), expected) << S::scheme.name << " " << count;
    }
  });
}

}  // namespace
}  // namespace gatefold::cuda
