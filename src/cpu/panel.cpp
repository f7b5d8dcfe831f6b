#include "cpu/panel.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "format/matrix.h"

namespace gatefold {
namespace {

/// Four bytes of a row in the canonical layout to those of its 32-bit lane.
std::uint32_t lane(Format format, std::uint32_t word) {
  if (format.bits ==
      4) {  // byte j: column j, and column 4 + j in the high nibble; signed codes with their offset
    const auto spread = [](std::uint32_t nibbles) {
      nibbles = (nibbles | nibbles << 8) & 0x00FF00FF;
      return (nibbles | nibbles << 4) & 0x0F0F0F0F;
    };
    if (format == formats::int4) word ^= 0x11111111u * static_cast<unsigned>(panel_offset(format));
    return spread(word & 0xFFFF) | spread(word >> 16) << 4;
  }
  if (format == formats::int8) return word ^ 0x01010101u * static_cast<unsigned>(panel_offset(format));
  return word;
}

/// Packs one panel: rows [first, first + rows) of the matrix.
class PanelPacker {
 public:
  PanelPacker(const QuantizedMatrix& matrix, const PanelShape& shape)
      : matrix_(matrix),
        shape_(shape),
        w_(scheme(matrix.scheme).weight),
        layout_(matrix.layout()),
        row_(static_cast<std::size_t>(shape.padded_k() * w_.value.bits / 8)),
        scales_(std::max<std::size_t>(1, layout_.scale_cols)) {}

  void pack(std::int64_t first, std::byte* panel) {
    const std::int64_t rows = std::min(kPanelRows, shape_.n - first);
    for (std::int64_t r = 0; r < rows; ++r) {
      pack_values(first + r, r, panel);
      if (!w_.quantized()) continue;
      const std::int64_t band = w_.group.n == 0 ? 0 : (first + r) / w_.group.n;
      load_scales(matrix_.scale_format, matrix_.scales.data(), band * layout_.scale_cols, layout_.scale_cols,
                  scales_.data());
      const float row_scale = !finite(first + r) ? std::numeric_limits<float>::quiet_NaN()
                              : w_.group.k == 0  ? scales_[0]
                                                 : matrix_.tensor_scale.apply(1.0f);
      std::memcpy(panel + r * sizeof(float), &row_scale, sizeof(float));
      if (w_.group.k != 0 && (r == 0 || w_.group.n == 1)) pack_scales(r, panel);
      if (w_.zero_point.stored()) pack_zero_points(first + r, r, panel);
    }
  }

 private:
  /// Whether row n is: one NaN makes all its outputs NaN, so that it need not be decoded. Inf does so as
  /// well, but for e5m2 only, where checkpoints have none.
  bool finite(std::int64_t n) const {
    for (const float scale : scales_)
      if (!std::isfinite(scale)) return false;
    if (w_.value != formats::e4m3 && w_.value != formats::e5m2) return true;
    const std::uint8_t least = w_.value == formats::e4m3 ? 0x7F : 0x7C;
    const auto* codes = reinterpret_cast<const std::uint8_t*>(matrix_.values.data() + n * layout_.row_bytes);
    bool all = true;
    for (std::int64_t i = 0; i < layout_.row_bytes; ++i) all &= (codes[i] & 0x7F) < least;
    return all;
  }

  void pack_values(std::int64_t n, std::int64_t r, std::byte* panel) {
    std::memcpy(row_.data(), matrix_.values.data() + n * layout_.row_bytes, layout_.row_bytes);
    const std::byte* word = row_.data();
    for (std::int64_t b = 0; b < shape_.blocks; ++b) {
      std::byte* line = panel + shape_.record_at(b) + shape_.values_at +
                        static_cast<std::size_t>(b % shape_.record) * shape_.value_bytes;
      for (const std::byte* end = line + shape_.value_bytes; line < end; line += 64, word += 4) {
        if (w_.value == formats::f16) {  // is widened column by column
          std::memcpy(line + 2 * r, word, 2);
          std::memcpy(line + 32 + 2 * r, word + 2, 2);
        } else if (w_.value.bits == 8 && w_.value.kind == Kind::floating) {  // see unpacked() in lanes
          std::byte* rows = line + r / 4 * 16 + r % 4 * 2;
          std::memcpy(rows, word, 2);
          std::memcpy(rows + 8, word + 2, 2);
        } else {
          std::uint32_t codes = 0;
          std::memcpy(&codes, word, 4);
          codes = lane(w_.value, codes);
          std::memcpy(line + 4 * r, &codes, 4);
        }
      }
    }
  }

  void pack_scales(std::int64_t r, std::byte* panel) const {
    const Format format = w_.group.n > 1 || matrix_.scale_format != w_.scale ? formats::f32 : w_.scale;
    with_format(format, [&]<Format F>() {
      for (std::int64_t b = 0; b < shape_.blocks; ++b) {
        const std::uint32_t code = encode<F>(scales_[static_cast<std::size_t>(b)]);
        std::memcpy(panel + shape_.record_at(b) +
                        static_cast<std::size_t>(b % shape_.record) * shape_.scale_bytes + r * (F.bits / 8),
                    &code, F.bits / 8);
      }
    });
  }

  void pack_zero_points(std::int64_t n, std::int64_t r, std::byte* panel) const {
    for (std::int64_t b = 0; b < shape_.blocks; ++b) {
      const auto pair = static_cast<std::uint8_t>(matrix_.zero_points[n * layout_.zero_row_bytes + b / 2]);
      panel[shape_.record_at(b) + shape_.zeros_at +
            static_cast<std::size_t>(b % shape_.record * kPanelRows + r)] =
          static_cast<std::byte>(panel_offset(formats::uint4) - (b % 2 == 0 ? pair & 15 : pair >> 4));
    }
  }

  const QuantizedMatrix& matrix_;
  const PanelShape& shape_;
  const Operand& w_;
  const QuantizedLayout layout_;
  std::vector<std::byte> row_;  // padded with zeros
  std::vector<float> scales_;
};

}  // namespace

std::int64_t panel_prefetch() {
  static const std::int64_t bytes = [] { return __builtin_cpu_is("amd") != 0 ? 0 : 4096; }();
  return bytes;
}

PanelShape panel_shape(const Scheme& scheme, Format scale_format, std::int64_t n, std::int64_t k) {
  const Operand& w = scheme.weight;
  const Operand& activation = scheme.activation;
  PanelShape shape;
  shape.n = n;
  shape.k = k;
  shape.panels = (n + kPanelRows - 1) / kPanelRows;
  shape.block = w.group.k != 0 ? w.group.k : activation.group.k != 0 ? activation.group.k : kMostPanelBlock;
  shape.blocks = (k + shape.block - 1) / shape.block;
  shape.value_bytes = static_cast<std::size_t>(kPanelRows * shape.block * w.value.bits / 8);
  if (w.group.k != 0)
    shape.scale_bytes = w.group.n > 1             ? sizeof(float)
                        : scale_format == w.scale ? static_cast<std::size_t>(kPanelRows * w.scale.bits / 8)
                                                  : kPanelRows * sizeof(float);
  const std::size_t zero_bytes = w.zero_point.stored() ? kPanelRows : 0;
  // As many blocks as fill whole lines with scales; all are powers of two, times 3 with zero points.
  shape.record = 1;
  while (shape.record < shape.blocks &&
         static_cast<std::size_t>(shape.record) * (shape.scale_bytes + zero_bytes) % 64 != 0)
    shape.record *= 2;
  const auto record = static_cast<std::size_t>(shape.record);
  shape.zeros_at = shape.scale_bytes * record;
  shape.values_at = (shape.zeros_at + zero_bytes * record + 63) / 64 * 64;
  shape.row_scale_bytes = w.quantized() ? kPanelRows * sizeof(float) : 0;
  const std::size_t last = static_cast<std::size_t>(shape.blocks - 1) % record + 1;
  shape.panel_bytes = shape.record_at(shape.blocks - 1) + shape.values_at + shape.value_bytes * last;
  return shape;
}

void pack_panels(const QuantizedMatrix& matrix, const PanelShape& shape, std::byte* out, std::size_t stride) {
#pragma omp parallel
  {
    PanelPacker packer(matrix, shape);
#pragma omp for schedule(static)
    for (std::int64_t panel = 0; panel < shape.panels; ++panel)
      packer.pack(panel * kPanelRows, out + static_cast<std::size_t>(panel) * stride);
  }
}

namespace portable {
extern const PanelKernels panel_kernels;
}
namespace avx2 {
extern const PanelKernels panel_kernels;
}
namespace avxvnni {
extern const PanelKernels panel_kernels;
}
namespace avx512 {
extern const PanelKernels panel_kernels;
}
namespace avx512vnni {
extern const PanelKernels panel_kernels;
}
namespace avx512bf16 {
extern const PanelKernels panel_kernels;
}
namespace amx {
extern const PanelKernels panel_kernels;
}

const PanelKernels& panel_kernels(Isa isa) {
  switch (isa) {
    case Isa::amx:
      return amx::panel_kernels;
    case Isa::avx512bf16:
      return avx512bf16::panel_kernels;
    case Isa::avx512vnni:
      return avx512vnni::panel_kernels;
    case Isa::avx512:
      return avx512::panel_kernels;
    case Isa::avxvnni:
      return avxvnni::panel_kernels;
    case Isa::avx2:
      return avx2::panel_kernels;
    default:
      return portable::panel_kernels;
  }
}

bool pairs_are_fast(Isa isa) {
  const PanelMultiply pairs =
      panel_kernels(isa).find(SchemeId::bf16, PanelForm::pairs, InputScale::none, false);
  if (pairs == nullptr) return false;
  static const bool fast = [&] {
    const PanelMultiply floats =
        panel_kernels(isa).find(SchemeId::bf16, PanelForm::floats, InputScale::none, false);
    constexpr std::int64_t k = 256, tokens = 8;  // 8 + 8 KiB: in the innermost cache
    const PanelShape shape = panel_shape(scheme(SchemeId::bf16), {}, kPanelRows, k);
    std::vector<std::byte> memory(shape.bytes() + 64 + tokens * k * sizeof(float));
    const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
    const std::byte* panel = memory.data() + (64 - misaligned);
    PanelInput inputs[tokens];
    float out[tokens * 2 * kPanelRows];
    for (PanelInput& in : inputs) in.codes = panel + shape.bytes();
    const auto seconds = [&](PanelMultiply multiply) {
      double best = 1;
      for (int run = 0; run < 10; ++run) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < 20; ++i)
          multiply(shape, panel, 0, 2, inputs, tokens, out, 2 * kPanelRows, kPanelRows);
        best =
            std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      }
      return best;
    };
    return seconds(pairs) < seconds(floats);
  }();
  return fast;
}

}  // namespace gatefold
