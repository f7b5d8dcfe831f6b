// The fast ways of encode.cuh have the bits of codec.h.
#include <cmath>
#include <random>

#include "cuda/elements.cuh"
#include "cuda/encode.cuh"
#include "gpu.h"

namespace gatefold {
namespace {

constexpr int kCount = 8;  // numbers of a thread

/// Finite numbers are enumerated by their bits: 2^20 signs, exponents and high mantissas, in eight versions
/// each.
__device__ float number(std::uint32_t index) {
  const std::uint32_t low[] = {0, 1, 2, 0x7ff, 0x800, 0x801, 0xffe, 0xfff};
  return __uint_as_float(index >> 3 << 12 | low[index & 7]);
}

template <class Tag>
__global__ void compare_codes(unsigned* wrong) {
  constexpr Format F = Tag::format;
  constexpr int per_word = 32 / F.bits;
  const std::uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) * per_word;
  float x[per_word];
  for (int i = 0; i < per_word; ++i) {
    x[i] = number(first + i);
    if (isnan(x[i])) x[i] = fabsf(x[i]);
  }
  const std::uint32_t packed = cuda::encode_word<F>(x);
  for (int i = 0; i < per_word; ++i)
    if ((packed >> (i * F.bits) & ((1u << F.bits) - 1)) != encode<F>(x[i])) atomicAdd(wrong, 1);
}

__global__ void compare_small_codes(unsigned* wrong) {
  const std::uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  float x[8];
  std::uint32_t signs[4] = {};
  for (int i = 0; i < 8; ++i) {
    x[i] = number(first + i);
    if (!(fabsf(x[i]) < 7)) x[i] = copysignf(0.0f, x[i]);
    signs[i / 2] |= (__float_as_uint(x[i]) >> 31 << 15 | 0x1234) << (i % 2 * 16);
  }
  const std::uint32_t packed = cuda::encode_e2m1_word_below_7(x, signs);
  for (int i = 0; i < 8; ++i)
    if ((packed >> (i * 4) & 15) != encode<formats::e2m1>(x[i])) atomicAdd(wrong, 1);
}

/// x / scales[blockIdx.y] of every 16-bit number, and of a neighbour in 32 bit.
template <class Tag, class Input>
__global__ void compare_quotients(const float* scales, unsigned* wrong) {
  constexpr Format F = Tag::format;
  const float scale = scales[blockIdx.y], divisor = scale > 0 ? scale : __uint_as_float(0x7f800000u);
  const std::uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = decode<Input::format>(index);
  const float longer = __uint_as_float(__float_as_uint(x) ^ (index * 2654435761u >> 19));
  const cuda::FastDivider fast_divider(scale);
  const cuda::AnyDivider any_divider(scale);
  unsigned errors = 0;
  for (const float any : {x, longer})
    if (isfinite(any) && fast_divider.fits(fabsf(any)))
      errors += encode<F>(fast_divider.quotient(any)) != encode<F>(any / divisor);
  errors += encode<F>(any_divider.quotient(x)) != encode<F>(x / divisor);
  errors += encode<F>(any_divider.quotient(longer)) != encode<F>(longer / divisor);
  if (errors != 0) atomicAdd(wrong, errors);
}

/// Every x / d that lies beside the middle of two floats of which one has at most 8 bits (FastDivider): with
/// M = m * 2^17 + 1 or - 1, m = 128 + blockIdx.x, and all j below 2^12 in magnitude, d * M + j = x * 2^a.
__global__ void compare_hard_quotients(unsigned* wrong, unsigned* tried) {
  const std::int64_t j = static_cast<std::int64_t>(blockIdx.y * blockDim.x + threadIdx.x) - 4096;
  for (const int side : {-1, 1}) {
    const std::uint32_t middle = ((128 + blockIdx.x) << 17) + side;
    std::uint32_t inverse = 1;  // of an odd number modulo 2^32: Newton's steps double the right bits
    for (int i = 0; i < 6; ++i) inverse *= 2 - middle * inverse;
    const std::uint32_t d = static_cast<std::uint32_t>(-j * inverse) & 0xffffff;
    if (d < 1u << 23) continue;
    const std::int64_t product = static_cast<std::int64_t>(d) * middle + j;
    const int a = product >> 48 != 0 ? 25 : 24;
    if ((product & ((std::int64_t{1} << a) - 1)) != 0 || product >> a >= 1 << 24) continue;
    const float scale = __uint_as_float(0x3f800000 | (d & 0x7fffff)),
                x = __uint_as_float(0x3f800000 | (static_cast<std::uint32_t>(product >> a) & 0x7fffff));
    const cuda::FastDivider divider(scale);
    if (!divider.fits(x)) continue;
    atomicAdd(tried, 1);
    if (__float_as_uint(divider.quotient(x)) != __float_as_uint(x / scale)) atomicAdd(wrong, 1);
  }
}

/// Powers of two and their neighbours, quotients of amax and limit, and any.
std::vector<float> scales() {
  std::vector<float> values = {0};
  for (int power = -149; power <= 126; power += 5)
    for (const float near : {1.0f, std::nextafterf(1.0f, 2.0f), std::nextafterf(1.0f, 0.0f), 1.5f})
      values.push_back(std::ldexp(near, power));
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    const float amax = round_to<formats::bf16>(
        std::ldexp(1.0f + static_cast<float>(random() % 1000) / 1000, static_cast<int>(random() % 20) - 10));
    for (const float limit : {448.0f, 127.0f, 6.0f}) values.push_back(amax / limit);
    values.push_back(std::ldexp(1.0f + std::ldexp(static_cast<float>(random() % (1 << 23)), -23),
                                static_cast<int>(random() % 20) - 10));
  }
  return values;
}

template <Format F>
void same_as_the_codec(const DeviceVector<float>& scales, const DeviceVector<unsigned>& wrong) {
  SCOPED_TRACE(name(F));
  compare_codes<cuda::FormatTag<F>><<<(1u << 23) / (32 / F.bits) / 256, 256>>>(wrong.data());
  EXPECT_EQ(wrong.host()[0], 0u);
  const dim3 all(65536 / 256, static_cast<unsigned>(scales.size()));
  compare_quotients<cuda::FormatTag<F>, cuda::FormatTag<formats::bf16>>
      <<<all, 256>>>(scales.data(), wrong.data());
  EXPECT_EQ(wrong.host()[0], 0u);
  compare_quotients<cuda::FormatTag<F>, cuda::FormatTag<formats::f16>>
      <<<all, 256>>>(scales.data(), wrong.data());
  EXPECT_EQ(wrong.host()[0], 0u);
}

class CudaEncode : public GpuTest {};

TEST_F(CudaEncode, AllBitsAreTheCodecs) {
  const DeviceVector<float> all(scales());
  const DeviceVector<unsigned> wrong(std::vector<unsigned>{0});
  same_as_the_codec<formats::e4m3>(all, wrong);
  same_as_the_codec<formats::e5m2>(all, wrong);
  same_as_the_codec<formats::e2m1>(all, wrong);
  same_as_the_codec<formats::int8>(all, wrong);
  same_as_the_codec<formats::int4>(all, wrong);
  compare_small_codes<<<(1u << 23) / 8 / 256, 256>>>(wrong.data());
  EXPECT_EQ(wrong.host()[0], 0u);
}

TEST_F(CudaEncode, QuotientsBesideTheMiddleOfTwoFloatsAreRoundedCorrectly) {
  const DeviceVector<unsigned> wrong(std::vector<unsigned>{0}), tried(std::vector<unsigned>{0});
  compare_hard_quotients<<<dim3(129, 8192 / 256), 256>>>(wrong.data(), tried.data());
  EXPECT_EQ(wrong.host()[0], 0u);
  EXPECT_GT(tried.host()[0], 100000u);
}

template <class Tag>
__global__ void compare_amax(unsigned* wrong) {
  constexpr Format F = Tag::format;
  cuda::Elements<F, kCount> elements;
  float expected = 0;
  bool all_finite = true;
  const std::uint32_t seed = (blockIdx.x * blockDim.x + threadIdx.x) * 2654435761u;
  for (std::uint32_t& word : elements.words) word = 0;
  for (int i = 0; i < kCount; ++i) {
    const std::uint32_t code = (seed ^ (seed >> 7)) * (2 * i + 1) >> (32 - F.bits);
    elements.words[i * F.bits / 32] |= code << (i * F.bits % 32);
    const float x = fabsf(decode<F>(code));
    if (isfinite(x)) expected = fmaxf(expected, x);
    all_finite = all_finite && isfinite(x);
    if (__float_as_uint(elements[i]) != __float_as_uint(decode<F>(code)) && !isnan(elements[i]))
      atomicAdd(wrong, 1);
  }
  const auto range = elements.range();
  if (range.amax != expected || range.finite != all_finite) atomicAdd(wrong, 1);
}

TEST_F(CudaEncode, LargestMagnitudeLeavesOutNaNAndInf) {
  const DeviceVector<unsigned> wrong(std::vector<unsigned>{0});
  compare_amax<cuda::FormatTag<formats::bf16>><<<4096, 256>>>(wrong.data());
  compare_amax<cuda::FormatTag<formats::f16>><<<4096, 256>>>(wrong.data());
  compare_amax<cuda::FormatTag<formats::f32>><<<4096, 256>>>(wrong.data());
  EXPECT_EQ(wrong.host()[0], 0u);
}

}  // namespace
}  // namespace gatefold
