// The codec gives the same bits on the device as on the host.
#include <cmath>

#include "gatefold/codec.h"
#include "gpu.h"

namespace gatefold {
namespace {

template <Format F>
struct Tag {
  static constexpr Format format = F;
};

template <class Tag>
__global__ void encode_all(const float* values, std::uint32_t* codes, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) codes[i] = encode<Tag::format>(values[i]);
}

template <class Tag>
__global__ void decode_all(float* values, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] = decode<Tag::format>(static_cast<std::uint32_t>(i));
}

/// Every f32 whose low bits are all 0, all 1 or 1: 2^18 signs, exponents and high mantissas, in four
/// versions. They hold every value of every narrow format, every midpoint, and both neighbours of each.
std::vector<float> many_floats() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 1u << 18; ++high)
    for (const std::uint32_t low : {0u, 1u, 0x1fffu, 0x3fffu})
      values.push_back(std::bit_cast<float>(high << 14 | low));
  return values;
}

template <Format F>
void same_as_on_the_host() {
  SCOPED_TRACE(name(F));
  const std::vector<float> values = many_floats();
  const auto count = static_cast<int>(values.size());
  const DeviceVector<float> input(values);
  const DeviceVector<std::uint32_t> output(values.size());
  encode_all<Tag<F>><<<(count + 255) / 256, 256>>>(input.data(), output.data(), count);
  const std::vector<std::uint32_t> codes = output.host();
  int wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i)
    if (codes[i] != encode<F>(values[i]) && ++wrong < 10)
      ADD_FAILURE() << std::hexfloat << values[i] << ": " << codes[i] << ", not " << encode<F>(values[i]);
  EXPECT_EQ(wrong, 0);

  if constexpr (F.bits <= 16) {
    constexpr int all = 1 << F.bits;
    const DeviceVector<float> decoded(all);
    decode_all<Tag<F>><<<(all + 255) / 256, 256>>>(decoded.data(), all);
    const std::vector<float> numbers = decoded.host();
    for (int code = 0; code < all; ++code) {
      const float expected = decode<F>(static_cast<std::uint32_t>(code));
      ASSERT_TRUE(std::bit_cast<std::uint32_t>(numbers[code]) == std::bit_cast<std::uint32_t>(expected) ||
                  (std::isnan(numbers[code]) && std::isnan(expected)))
          << code << ": " << numbers[code] << ", not " << expected;
    }
  }
}

class CudaCodec : public GpuTest {};

TEST_F(CudaCodec, SameBitsAsOnTheHost) {
  using namespace formats;
  same_as_on_the_host<f32>();
  same_as_on_the_host<bf16>();
  same_as_on_the_host<f16>();
  same_as_on_the_host<e4m3>();
  same_as_on_the_host<e5m2>();
  same_as_on_the_host<e2m1>();
  same_as_on_the_host<ue8m0>();
  same_as_on_the_host<ue4m3>();
  same_as_on_the_host<formats::int8>();
  same_as_on_the_host<formats::int4>();
  same_as_on_the_host<formats::uint4>();
}

}  // namespace
}  // namespace gatefold
