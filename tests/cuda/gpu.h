#pragma once
/// \file
/// What the tests of the CUDA backend share.

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "cuda/decode.h"
#include "gatefold/codec.h"
#include "gatefold/cuda.h"
#include "gatefold/scheme.h"

namespace gatefold {

/// A test that needs a GPU. Where there is none that the kernels run on, it is skipped, with the reason.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto device = cuda::device_info(); !device) GTEST_SKIP() << device.status().message();
  }
};

/// What warpgroups round weights to, codes by group scales, that they multiply by activations of this kind.
/// (Where activations are bytes, groups of 128 columns are multiplied in bytes.)
inline std::optional<Format> rounds_weights(const Scheme& scheme, const Operand& activation) {
  const cuda::PackedFormat format = cuda::packed_format(scheme, activation);
  const bool in_bytes = activation.quantized() && format.groups() == 1;
  const Format multiply = activation.value == formats::f16 ? formats::f16 : formats::bf16;
  if (in_bytes || !cuda::rounds_products(format, multiply)) return {};
  return multiply;
}

/// How far sums of k products by activations of this kind may be off, beside the norm of all and beyond f32.
/// Warpgroups' multiplies of e4m3 keep about 14 bits of a sum, and 128 products at a time become part of one
/// in f32: a model of such sums has an error of 2^-13, for products of any sizes and any number of them.
/// Where weights are e2m1, and with fast accumulation, each 32 products are added to all before, which loses
/// 2^-15 of those on average. Weights that are rounded to bf16 are off by 2^-8 at most, and half of that on
/// average; in f16 by an eighth of it.
inline double error_of_sums(const Scheme& scheme, const Operand& activation, std::int64_t k,
                            bool fast_accumulation = false) {
  if (const auto rounded = rounds_weights(scheme, activation))
    return *rounded == formats::bf16 ? 0x1p-9 : 0x1p-12;
  if (!(activation.value == formats::e4m3 && activation.scale == formats::f32)) return 0;
  return 0x1p-12 + (fast_accumulation || scheme.weight.value == formats::e2m1
                        ? static_cast<double>(k) / 32 * 0x1p-15
                        : 0);
}

/// Numbers in a 16-bit type.
template <Format F>
std::vector<std::uint16_t> codes_of(const std::vector<float>& numbers) {
  std::vector<std::uint16_t> codes;
  for (const float number : numbers) codes.push_back(static_cast<std::uint16_t>(encode<F>(number)));
  return codes;
}

/// A vector in device memory.
template <class T>
class DeviceVector {
 public:
  /// Every byte is `poison`.
  explicit DeviceVector(std::size_t count, unsigned char poison = 0xFF) : count_(count) {
    auto memory = cuda::Memory::allocate(count * sizeof(T), "a test");
    EXPECT_TRUE(memory.ok()) << memory.status().message();
    if (memory) memory_ = std::move(*memory);
    EXPECT_TRUE(cuda::fill(data(), poison, count * sizeof(T)).ok());
  }
  explicit DeviceVector(const std::vector<T>& values) : DeviceVector(values.size()) {
    EXPECT_TRUE(cuda::copy(data(), values.data(), values.size() * sizeof(T)).ok());
  }

  T* data() const { return memory_.as<T>(); }
  std::size_t size() const { return count_; }

  /// Waits for the default stream.
  std::vector<T> host() const {
    std::vector<T> values(count_);
    const Status copied = cuda::copy(values.data(), data(), count_ * sizeof(T));
    EXPECT_TRUE(copied.ok()) << copied.message();
    const Status done = cuda::synchronize();
    EXPECT_TRUE(done.ok()) << done.message();
    return values;
  }

 private:
  std::size_t count_;
  cuda::Memory memory_;
};

}  // namespace gatefold
