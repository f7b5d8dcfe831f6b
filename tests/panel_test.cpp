// The multiply over panels alone: every code of every scheme on every instruction set that runs here, bit for
// bit against the codec, and not a byte read behind the weights or the activations.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <random>

#include "cpu/panel.h"
#include "format/matrix.h"
#include "moe/arena.h"

namespace gatefold {
namespace {

/// Memory that ends where no one may read.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    pages_ = (bytes + page - 1) / page * page;
    mapping_ = static_cast<std::byte*>(
        mmap(nullptr, pages_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(mprotect(mapping_ + pages_, page, PROT_NONE), 0);
    mapped_ = pages_ + page;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(mapping_, mapped_); }
  std::byte* data() const { return mapping_ + pages_ - bytes_; }

 private:
  std::byte* mapping_;
  std::size_t bytes_, pages_, mapped_;
};

/// A matrix of all codes that are finite, with scales of all codes that keep products in range.
QuantizedMatrix all_codes(SchemeId id, std::int64_t n, std::int64_t k) {
  const Operand& w = scheme(id).weight;
  QuantizedMatrix matrix = make_matrix(id, n, k);
  std::mt19937 random(1);
  with_format(w.value, [&]<Format F>() {
    const std::size_t count = matrix.values.size() * 8 / F.bits;
    for (std::size_t i = 0; i < count; ++i) {
      auto code = static_cast<std::uint32_t>(i * 5 % (std::uint64_t{1} << F.bits));
      if (!std::isfinite(decode<F>(code))) code = 0;
      if constexpr (F.bits == 4)
        matrix.values[i / 2] |= static_cast<std::byte>(code << (4 * (i % 2)));
      else
        std::memcpy(matrix.values.data() + i * (F.bits / 8), &code, F.bits / 8);
    }
  });
  if (!w.quantized()) return matrix;
  with_format(matrix.scale_format, [&]<Format F>() {
    for (std::size_t at = 0; at < matrix.scales.size(); at += F.bits / 8) {
      std::uint32_t code = 0;
      float scale = NAN;
      while (!(scale == 0 || (scale >= 0x1p-60f && scale <= 0x1p60f))) {
        code = static_cast<std::uint32_t>(random() % (std::uint64_t{1} << F.bits));
        scale = decode<F>(code);
      }
      std::memcpy(matrix.scales.data() + at, &code, F.bits / 8);
    }
  });
  for (std::byte& pair : matrix.zero_points) pair = static_cast<std::byte>(random());
  return matrix;
}

/// Activations that are 1 in one column each.
class Units {
 public:
  Units(PanelForm form, const PanelShape& shape, std::int32_t offset, std::int64_t first, std::int64_t tokens)
      : codes_(static_cast<std::size_t>(tokens) * row_bytes(form, shape)) {
    const auto blocks = static_cast<std::size_t>(shape.blocks);
    scales_.assign(blocks, 1.0f);
    starts_.assign(blocks * static_cast<std::size_t>(tokens), 0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t column = first + t;
      std::byte* row = codes_.data() + static_cast<std::size_t>(t) * row_bytes(form, shape);
      const auto block = static_cast<std::size_t>(t * shape.blocks + column / shape.block);
      const float one = 1;
      const std::uint16_t one_bf16 = 0x3F80;
      switch (form) {
        case PanelForm::limbs1:
        case PanelForm::limbs2:
          row[form == PanelForm::limbs1 ? column : low_limb(column)] = std::byte{1};
          starts_[block] = -offset;
          break;
        case PanelForm::pairs:
          std::memcpy(row + 2 * column, &one_bf16, 2);
          break;
        case PanelForm::floats:
          std::memcpy(row + 4 * column, &one, 4);
      }
      inputs_.push_back({row, scales_.data(), starts_.data() + t * shape.blocks, starts_[block], 1.0f});
    }
  }
  const PanelInput* inputs() const { return inputs_.data(); }

 private:
  static std::int64_t low_limb(std::int64_t column) {
    return (column / kLimbColumns * 2 + 1) * kLimbColumns + column % kLimbColumns;
  }
  static std::size_t row_bytes(PanelForm form, const PanelShape& shape) {
    constexpr int bytes[] = {1, 2, 2, 4};  // k is a multiple of kLimbColumns
    return static_cast<std::size_t>(shape.padded_k() * bytes[static_cast<int>(form)]);
  }

  Guarded codes_;
  std::vector<float> scales_;
  std::vector<std::int32_t> starts_;
  std::vector<PanelInput> inputs_;
};

/// vdpbf16ps takes numbers below the least normal one for zero.
float flushed(PanelForm form, float x) {
  return form == PanelForm::pairs && std::fabs(x) < 0x1p-126f ? 0.0f : x;
}

class Panels : public testing::TestWithParam<Isa> {};

TEST_P(Panels, DecodeEveryCode) {
  if (const auto why = missing(GetParam()); !why.empty()) GTEST_SKIP() << why;
  constexpr std::int64_t n = 150, k = 512;  // the last panel is not full
  for (std::size_t i = 0; i < all_schemes().size(); ++i) {
    const auto id = static_cast<SchemeId>(i);
    const QuantizedMatrix matrix = all_codes(id, n, k);
    PanelShape shape = panel_shape(scheme(id), matrix.scale_format, n, k);
    const Guarded packed(shape.bytes());
    pack_panels(matrix, shape, packed.data(), shape.panel_bytes);
    std::vector<float> weights(static_cast<std::size_t>(n * k));
    dequantize(matrix, weights.data());

    int forms = 0;
    for (const PanelForm form : {PanelForm::limbs1, PanelForm::limbs2, PanelForm::pairs, PanelForm::floats})
      for (const InputScale scale : {InputScale::none, InputScale::block, InputScale::chunk}) {
        const PanelMultiply multiply = panel_kernels(GetParam()).find(id, form, scale, false);
        if (multiply == nullptr) continue;
        ++forms;
        const bool doubled = scheme(id).weight.value == formats::e2m1;
        const std::int32_t offset = panel_offset(doubled ? formats::e2m1 : scheme(id).weight.value);
        int wrong = 0;
        for (const std::int64_t tokens : {1, 2, 3, 7, 32, 64, 101})
          for (std::int64_t first = 0; first + tokens <= k; first += std::max<std::int64_t>(tokens, 61)) {
            const Units units(form, shape, offset, first, tokens);
            const std::int64_t stride = shape.panels * kPanelRows;
            const Arena memory(static_cast<std::size_t>(tokens * stride) * sizeof(float));
            auto* out = reinterpret_cast<float*>(memory.data());
            std::fill_n(out, tokens * stride, NAN);
            shape.write_around = first % 2 != 0;
            multiply(shape, packed.data(), static_cast<std::int64_t>(shape.panel_bytes),
                     static_cast<int>(shape.panels), units.inputs(), tokens, out, stride, kPanelRows);
            for (std::int64_t t = 0; t < tokens; ++t)
              for (std::int64_t row = 0; row < n; ++row) {
                const float expected = flushed(form, weights[row * k + first + t]), y = out[t * stride + row];
                if (y == expected || wrong++ != 0) continue;
                ADD_FAILURE() << scheme(id).name << " form " << static_cast<int>(form) << " tokens " << tokens
                              << " row " << row << " column " << first + t << ": " << y << ", expected "
                              << expected;
              }
          }
        EXPECT_EQ(wrong, 0) << scheme(id).name << " form " << static_cast<int>(form);
      }
    EXPECT_GE(forms, 1) << scheme(id).name;
  }
}

TEST_P(Panels, NonfiniteWeightsMakeTheirRowNan) {
  if (const auto why = missing(GetParam()); !why.empty()) GTEST_SKIP() << why;
  const auto check = [](SchemeId id, auto&& spoil) {
    QuantizedMatrix matrix = all_codes(id, 32, 256);
    spoil(matrix);
    const PanelShape shape = panel_shape(scheme(id), matrix.scale_format, 32, 256);
    const Guarded packed(shape.bytes());
    pack_panels(matrix, shape, packed.data(), shape.panel_bytes);
    for (const PanelForm form : {PanelForm::limbs2, PanelForm::pairs, PanelForm::floats}) {
      const InputScale scale = form == PanelForm::limbs2 ? InputScale::chunk : InputScale::none;
      const PanelMultiply multiply = panel_kernels(GetParam()).find(id, form, scale, false);
      if (multiply == nullptr) continue;
      const Units units(form, shape, panel_offset(scheme(id).weight.value), 200, 1);
      float out[32];
      multiply(shape, packed.data(), static_cast<std::int64_t>(shape.panel_bytes), 2, units.inputs(), 1, out,
               32, kPanelRows);
      for (int row = 0; row < 32; ++row) EXPECT_EQ(std::isnan(out[row]), row == 3) << scheme(id).name << row;
    }
  };
  const auto spoil_value = [](QuantizedMatrix& m) { m.values[3 * 256 + 5] = std::byte{0x7F}; };
  check(SchemeId::fp8_channel, spoil_value);
  check(SchemeId::fp8_e5m2, spoil_value);
  check(SchemeId::mxfp4, [](QuantizedMatrix& m) { m.scales[3 * 256 / 32 + 1] = std::byte{0xFF}; });
  check(SchemeId::nvfp4, [](QuantizedMatrix& m) { m.scales[3 * 256 / 16 + 1] = std::byte{0x7F}; });
}

INSTANTIATE_TEST_SUITE_P(Targets, Panels, testing::ValuesIn(all_isas),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace gatefold
