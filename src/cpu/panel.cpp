#include "cpu/panel.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "format/matrix.h"

namespace gatefold {
namespace {

/// Row and column (within the columns of one load) of code `i` of a load, in order of bytes and nibbles.
struct Place {
  std::int64_t row, col;
};

Place place(int bits, std::int64_t i) {
  if (bits == 16) return {i / 2, i % 2};
  if (bits == 4) return {i / 4 / 2, i % 4 * 2 + i / 4 % 2};  // 16-bit lane i / 4, nibble i % 4
  // Bytes, as two unpack instructions spread them: within 16 bytes, the first 8 belong to columns 0 and 1.
  const std::int64_t lane = i / 16, at = i % 16, word = lane * 8 + at % 8;
  return {word / 2, at / 8 * 2 + word % 2};
}

/// int8 is multiplied as two nibbles, so its bytes lie as 16-bit lanes: the low byte is columns 0 and 1.
Place place_int8(std::int64_t i) {
  return {i / 2 / 2, i % 2 * 2 + i / 2 % 2};
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

std::string panels_refuse(const Scheme& scheme, const Operand& activation) {
  const Operand& w = scheme.weight;
  if (w.value == formats::f16) return "f16 weights are not exact in bf16";
  if (!activation.value.stored()) return "activations stay f32";
  if (activation.value == formats::f16) return "f16 activations are not exact in bf16";
  if (w.scale == formats::f16) return "f16 scales";
  const std::int64_t across = scheme.activation.group.k;
  if (w.group.k != 0 && across != 0 && w.group.k != across)
    return "weights and activations have different groups";
  if (w.group.n > 1 && w.group.n % kPanelRows != 0) return "a scale's rows are not whole panels";
  if (std::max<std::int64_t>(w.group.k, across) % 16 != 0) return "groups are not a multiple of 16";
  return {};
}

PanelShape panel_shape(const Scheme& scheme, Format scale_format, std::int64_t n, std::int64_t k) {
  const Operand& w = scheme.weight;
  const Operand& activation = scheme.activation;
  PanelShape shape;
  shape.n = n;
  shape.k = k;
  shape.panels = (n + kPanelRows - 1) / kPanelRows;
  shape.block = w.group.k != 0 ? w.group.k : activation.group.k != 0 ? activation.group.k : 64;
  shape.blocks = (k + shape.block - 1) / shape.block;
  shape.value_bytes = static_cast<std::size_t>(kPanelRows * shape.block * w.value.bits / 8);
  if (w.group.k != 0)
    shape.scale_bytes = w.group.n > 1             ? sizeof(float)
                        : scale_format == w.scale ? static_cast<std::size_t>(kPanelRows * w.scale.bits / 8)
                                                  : kPanelRows * sizeof(float);
  shape.zero_bytes = w.zero_point.stored() ? kPanelRows : 0;
  const std::size_t body =
      (shape.value_bytes + shape.scale_bytes + shape.zero_bytes) * static_cast<std::size_t>(shape.blocks);
  shape.panel_bytes = (body + 63) / 64 * 64 + (w.quantized() ? 64 : 0);
  return shape;
}

void pack_panels(const QuantizedMatrix& matrix, const PanelShape& shape, std::byte* out) {
  const Operand& w = scheme(matrix.scheme).weight;
  const QuantizedLayout layout = matrix.layout();
  const int bits = w.value.bits;
  const std::int64_t codes = 512 / bits, columns = codes / kPanelRows;
  const std::int64_t loads = shape.padded_k() / columns;
  const auto scale = [&](std::int64_t n, std::int64_t g) {
    float value = 1;
    const std::int64_t row = w.group.n == 0 ? 0 : n / w.group.n;
    if (w.quantized())
      load_scales(matrix.scale_format, matrix.scales.data(), row * layout.scale_cols + g, 1, &value);
    return value;
  };
  std::vector<Place> places;
  for (std::int64_t i = 0; i < codes; ++i)
    places.push_back(w.value == formats::int8 ? place_int8(i) : place(bits, i));
#pragma omp parallel for schedule(static)
  for (std::int64_t panel = 0; panel < shape.panels; ++panel) {
    std::byte* base = out + static_cast<std::size_t>(panel) * shape.panel_bytes;
    const std::int64_t first = panel * kPanelRows, rows = std::min(kPanelRows, shape.n - first);
    for (std::int64_t load = 0; load < loads; ++load)
      for (std::int64_t i = 0; i < codes; ++i) {
        const Place at = places[static_cast<std::size_t>(i)];
        const std::int64_t k = load * columns + at.col;
        if (at.row >= rows || k >= shape.k) continue;
        const std::uint32_t code = code_at(matrix, layout, bits, first + at.row, k);
        std::byte* to = base + load * 64 + i * bits / 8;
        if (bits == 4)
          *to |= static_cast<std::byte>(code << (i % 2 * 4));
        else
          std::memcpy(to, &code, static_cast<std::size_t>(bits / 8));
      }
    if (!w.quantized()) continue;
    float row_scales[kPanelRows] = {};
    for (std::int64_t r = 0; r < rows; ++r)
      row_scales[r] = w.group.k == 0 ? scale(first + r, 0) : matrix.tensor_scale.apply(1.0f);
    std::memcpy(base + shape.row_scales_at(), row_scales, sizeof(row_scales));
    for (std::int64_t g = 0; w.group.k != 0 && g < shape.blocks; ++g) {
      std::byte* to = base + shape.scales_at() + static_cast<std::size_t>(g) * shape.scale_bytes;
      for (std::int64_t r = 0; r < (w.group.n > 1 ? 1 : rows); ++r) {
        const Format format = w.group.n > 1 || matrix.scale_format != w.scale ? formats::f32 : w.scale;
        const std::uint32_t code =
            with_format(format, [&]<Format F>() { return encode<F>(scale(first + r, g)); });
        std::memcpy(to + r * (format.bits / 8), &code, format.bits / 8);
      }
      for (std::int64_t r = 0; w.zero_point.stored() && r < rows; ++r) {
        const auto pair =
            static_cast<std::uint8_t>(matrix.zero_points[(first + r) * layout.zero_row_bytes + g / 2]);
        base[shape.zeros_at() + static_cast<std::size_t>(g * kPanelRows + r)] =
            static_cast<std::byte>(g % 2 == 0 ? pair & 15 : pair >> 4);
      }
    }
  }
}

std::string_view panels_missing() {
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return "the CPU has no AVX-512";
  if (!__builtin_cpu_supports("avx512bf16")) return "the CPU has no avx512_bf16";
  if (!__builtin_cpu_supports("avx512vbmi")) return "the CPU has no avx512_vbmi";
  return {};
}

}  // namespace gatefold
