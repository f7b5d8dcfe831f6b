#include "cpu/panel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "format/matrix.h"

namespace gatefold {
namespace {

/// Row and column (within the columns of one 64-byte line) of code `i` of a line, in order of bytes and
/// nibbles.
struct Place {
  std::int64_t row, col;
};

/// A 32-bit lane is a row. Nibbles: bytes are columns, low nibbles the first four. 8-bit floats become pairs
/// of bf16 by masks and shifts, which takes bytes 0 and 2, then 1 and 3. f16 is widened column by column.
Place place(Format format, std::int64_t i) {
  if (format == formats::f16) return {i % 16, i / 16};
  if (format.bits == 16) return {i / 2, i % 2};
  if (format.bits == 4) return {i / 8, i % 2 * 4 + i / 2 % 4};
  constexpr std::int64_t swapped[] = {0, 2, 1, 3};
  return {i / 4, format == formats::int8 ? i % 4 : swapped[i % 4]};
}

/// Signed integers are stored with their offset, so that all bytes are unsigned.
std::uint32_t stored(Format format, std::uint32_t code) {
  const bool is_signed = format == formats::int4 || format == formats::int8;
  return is_signed ? code ^ static_cast<std::uint32_t>(panel_offset(format)) : code;
}

std::uint32_t code_at(const QuantizedMatrix& matrix, const QuantizedLayout& layout, int bits, std::int64_t n,
                      std::int64_t k) {
  const std::byte* row = matrix.values.data() + n * layout.row_bytes;
  if (bits == 4) return static_cast<std::uint32_t>(row[k / 2]) >> (k % 2 * 4) & 15;
  std::uint32_t code = 0;
  std::memcpy(&code, row + k * bits / 8, static_cast<std::size_t>(bits / 8));
  return code;
}

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
  shape.block = w.group.k != 0 ? w.group.k : activation.group.k != 0 ? activation.group.k : 128;
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
  const Operand& w = scheme(matrix.scheme).weight;
  const QuantizedLayout layout = matrix.layout();
  const int bits = w.value.bits;
  const std::int64_t codes = 512 / bits, columns = codes / kPanelRows;
  const auto scale = [&](std::int64_t n, std::int64_t g) {
    float value = 1;
    const std::int64_t row = w.group.n == 0 ? 0 : n / w.group.n;
    if (w.quantized())
      load_scales(matrix.scale_format, matrix.scales.data(), row * layout.scale_cols + g, 1, &value);
    return value;
  };
  std::vector<Place> places;
  for (std::int64_t i = 0; i < codes; ++i) places.push_back(place(w.value, i));
#pragma omp parallel for schedule(static)
  for (std::int64_t panel = 0; panel < shape.panels; ++panel) {
    std::byte* base = out + static_cast<std::size_t>(panel) * stride;
    const std::int64_t first = panel * kPanelRows, rows = std::min(kPanelRows, shape.n - first);
    for (std::int64_t b = 0; b < shape.blocks; ++b) {
      std::byte* line = base + shape.record_at(b) + shape.values_at +
                        static_cast<std::size_t>(b % shape.record) * shape.value_bytes;
      for (std::int64_t at = b * shape.block; at < (b + 1) * shape.block; at += columns, line += 64)
        for (std::int64_t i = 0; i < codes; ++i) {
          const Place place = places[static_cast<std::size_t>(i)];
          const std::int64_t k = at + place.col;
          if (place.row >= rows || k >= shape.k) continue;
          const std::uint32_t code = stored(w.value, code_at(matrix, layout, bits, first + place.row, k));
          std::byte* to = line + i * bits / 8;
          if (bits == 4)
            *to |= static_cast<std::byte>(code << (i % 2 * 4));
          else
            std::memcpy(to, &code, static_cast<std::size_t>(bits / 8));
        }
    }
    if (!w.quantized()) continue;
    float row_scales[kPanelRows] = {};
    for (std::int64_t r = 0; r < rows; ++r)
      row_scales[r] = w.group.k == 0 ? scale(first + r, 0) : matrix.tensor_scale.apply(1.0f);
    std::memcpy(base, row_scales, sizeof(row_scales));
    for (std::int64_t g = 0; w.group.k != 0 && g < shape.blocks; ++g) {
      std::byte* record = base + shape.record_at(g);
      std::byte* to = record + static_cast<std::size_t>(g % shape.record) * shape.scale_bytes;
      for (std::int64_t r = 0; r < (w.group.n > 1 ? 1 : rows); ++r) {
        const Format format = w.group.n > 1 || matrix.scale_format != w.scale ? formats::f32 : w.scale;
        const std::uint32_t code =
            with_format(format, [&]<Format F>() { return encode<F>(scale(first + r, g)); });
        std::memcpy(to + r * (format.bits / 8), &code, format.bits / 8);
      }
      for (std::int64_t r = 0; w.zero_point.stored() && r < rows; ++r) {
        const auto pair =
            static_cast<std::uint8_t>(matrix.zero_points[(first + r) * layout.zero_row_bytes + g / 2]);
        record[shape.zeros_at + static_cast<std::size_t>(g % shape.record * kPanelRows + r)] =
            static_cast<std::byte>(g % 2 == 0 ? pair & 15 : pair >> 4);
      }
    }
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

const PanelKernels& panel_kernels(Isa isa) {
  switch (isa) {
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
  const PanelMultiply pairs = panel_kernels(isa).find(SchemeId::bf16, PanelForm::pairs, false, false);
  if (pairs == nullptr) return false;
  static const bool fast = [&] {
    const PanelMultiply floats = panel_kernels(isa).find(SchemeId::bf16, PanelForm::floats, false, false);
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
        for (int i = 0; i < 20; ++i) multiply(shape, panel, 0, 2, inputs, tokens, out, 2 * kPanelRows);
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
