// Compiled with AVX512_BF16 and VBMI: nothing here may be inline outside the unnamed namespace (isa.h).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own intrinsics
#endif
#include <immintrin.h>

#include <cmath>
#include <limits>

#include "cpu/panel.h"
#include "gatefold/codec.h"

namespace gatefold {
namespace {

/// 32 bf16: 16 rows, 2 columns. The low half of 32-bit lane r is row r's even column.
using Unit = __m512bh;

/// Tables are made by the codec; each takes what its instruction indexes with.
struct alignas(64) Table16 {
  std::uint16_t at[32];
};
struct alignas(64) Table8 {
  std::uint8_t at[128];
};

constexpr std::uint16_t bf16(float value) {
  return static_cast<std::uint16_t>(encode<formats::bf16>(value));
}

template <Format F>
constexpr Table16 nibble_table(float scale, float offset) {
  Table16 table{};
  for (std::uint32_t i = 0; i < 32; ++i) table.at[i] = bf16(decode<F>(i & 15) * scale + offset);
  return table;
}

template <Format F>
constexpr Table8 byte_table(int shift) {
  Table8 table{};
  for (std::uint32_t i = 0; i < 128; ++i)
    table.at[i] = static_cast<std::uint8_t>(bf16(decode<F>(i)) >> shift);
  return table;
}

/// load -> decode: one 64-byte load to the units of its columns. `kUnits` columns pairs; int8 takes two units
/// for each, one per nibble (kNibbles).
template <Format F>
struct Decode;

template <>
struct Decode<formats::bf16> {
  static constexpr int kUnits = 1, kParts = 1;
  void operator()(const std::byte* p, Unit* units) const {
    units[0] = reinterpret_cast<Unit>(_mm512_load_si512(p));
  }
};

/// vpermw looks at the low 5 bits of a lane, and the table repeats after 16 entries: no mask is needed.
struct Nibbles {
  static void run(const std::byte* p, __m512i even, __m512i odd, Unit* units) {
    const __m512i v = _mm512_load_si512(p);
    units[0] = reinterpret_cast<Unit>(_mm512_permutexvar_epi16(v, even));
    units[1] = reinterpret_cast<Unit>(_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), odd));
    units[2] = reinterpret_cast<Unit>(_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), even));
    units[3] = reinterpret_cast<Unit>(_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), odd));
  }
};

template <Format F>
requires(F.bits == 4) struct Decode<F> {
  static constexpr int kUnits = 4, kParts = 1;
  // Unsigned codes are centred: their zero points are, too.
  static constexpr Table16 kTable = nibble_table<F>(1, F.kind == Kind::unsigned_integer ? -8 : 0);
  const __m512i table = _mm512_load_si512(&kTable);
  void operator()(const std::byte* p, Unit* units) const { Nibbles::run(p, table, table, units); }
};

/// An int8 is 16 * its signed high nibble + its unsigned low nibble; both are exact, so is their sum.
template <>
struct Decode<formats::int8> {
  static constexpr int kUnits = 2, kParts = 2;
  static constexpr Table16 kLow = nibble_table<formats::uint4>(1, 0),
                           kHigh = nibble_table<formats::int4>(16, 0);
  const __m512i low = _mm512_load_si512(&kLow), high = _mm512_load_si512(&kHigh);
  void operator()(const std::byte* p, Unit* units) const { Nibbles::run(p, low, high, units); }
};

/// fp8 by two look-ups of 128 entries, for the high and the low byte of the bf16; the sign is put in after.
template <Format F>
requires(F.bits == 8 && F.kind == Kind::floating) struct Decode<F> {
  static constexpr int kUnits = 2, kParts = 1;
  static constexpr Table8 kLow = byte_table<F>(0), kHigh = byte_table<F>(8);
  const __m512i low0 = _mm512_load_si512(&kLow), low1 = _mm512_load_si512(&kLow.at[64]);
  const __m512i high0 = _mm512_load_si512(&kHigh), high1 = _mm512_load_si512(&kHigh.at[64]);
  void operator()(const std::byte* p, Unit* units) const {
    const __m512i v = _mm512_load_si512(p);
    const __m512i low = _mm512_permutex2var_epi8(low0, v, low1);
    // high | (v & 0x80)
    const __m512i high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high0, v, high1), v,
                                                   _mm512_set1_epi8(static_cast<char>(0x80)), 0xF8);
    units[0] = reinterpret_cast<Unit>(_mm512_unpacklo_epi8(low, high));
    units[1] = reinterpret_cast<Unit>(_mm512_unpackhi_epi8(low, high));
  }
};

/// The 16 scales of a block.
template <class Scheme>
__m512 block_scales(const PanelShape& shape, const std::byte* panel, std::int64_t block) {
  constexpr Operand w = Scheme::scheme.weight;
  const std::byte* p = panel + shape.scales_at() + static_cast<std::size_t>(block) * shape.scale_bytes;
  if constexpr (w.group.n > 1) return _mm512_set1_ps(*reinterpret_cast<const float*>(p));
  if (w.scale == formats::f32 || shape.scale_bytes == 64) return _mm512_load_ps(p);
  if constexpr (w.scale == formats::bf16) {
    const __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
  }
  const __m512i codes = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (w.scale == formats::ue8m0) {  // 2^-127 is subnormal in f32: code 0 is 0x00400000
    const __m512i bits = _mm512_max_epu32(_mm512_slli_epi32(codes, 23), _mm512_set1_epi32(0x00400000));
    return _mm512_castsi512_ps(bits);
  }
  // ue4m3
  return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(codes, 20)), _mm512_set1_ps(0x1p120f));
}

/// 16 rows by M tokens.
template <class Scheme, bool kScaledInput, int M>
void panel(const PanelShape& shape, const std::byte* panel, const PanelInput* inputs, float* out,
           std::int64_t stride) {
  constexpr Operand w = Scheme::scheme.weight;
  using D = Decode<w.value>;
  constexpr int kLoaded = D::kUnits * D::kParts;
  // Sums in flight, one per unit of a load: the multiply takes several clocks. The same for every M, so that
  // a token's sums do not depend on its neighbours.
  constexpr int kChains = kLoaded;
  constexpr std::int64_t kAhead = 4096;  // bytes; the hardware does not prefetch across pages
  const D decode;
  const std::int64_t loads = static_cast<std::int64_t>(shape.value_bytes) / 64;
  const std::byte* values = panel;
  __m512 total[M];
  for (__m512& t : total) t = _mm512_setzero_ps();
  for (std::int64_t b = 0; b < shape.blocks; ++b) {
    __m512 part[M][kChains];
    for (auto& row : part)
      for (__m512& p : row) p = _mm512_setzero_ps();
    const std::int64_t first = b * shape.block;
    for (std::int64_t load = 0; load < loads; ++load, values += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(values + kAhead), _MM_HINT_T0);
      Unit units[kLoaded];
      decode(values, units);
      const std::int64_t at = first + load * 2 * D::kUnits;
      for (int u = 0; u < kLoaded; ++u)
        for (int m = 0; m < M; ++m) {
          const auto* pair = reinterpret_cast<const int*>(inputs[m].codes + at + 2 * (u / D::kParts));
          part[m][u] =
              _mm512_dpbf16_ps(part[m][u], units[u], reinterpret_cast<Unit>(_mm512_set1_epi32(*pair)));
        }
    }
    for (int m = 0; m < M; ++m) {
      __m512 sum = part[m][0];
      for (int c = 1; c < kChains; ++c) sum = _mm512_add_ps(sum, part[m][c]);
      if constexpr (w.zero_point.stored()) {
        const auto* zeros = reinterpret_cast<const __m128i*>(panel + shape.zeros_at() + b * kPanelRows);
        const __m512i centred =
            _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm_load_si128(zeros)), _mm512_set1_epi32(8));
        sum = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(centred), _mm512_set1_ps(inputs[m].block_sums[b]), sum);
      }
      if constexpr (kScaledInput) sum = _mm512_mul_ps(sum, _mm512_set1_ps(inputs[m].block_scales[b]));
      if constexpr (w.group.k != 0)
        total[m] = _mm512_fmadd_ps(sum, block_scales<Scheme>(shape, panel, b), total[m]);
      else
        total[m] = _mm512_add_ps(total[m], sum);
    }
  }
  __m512 row_scales = _mm512_set1_ps(1.0f);
  if constexpr (w.quantized()) row_scales = _mm512_load_ps(panel + shape.row_scales_at());
  for (int m = 0; m < M; ++m) {
    const __m512 scale = _mm512_mul_ps(row_scales, _mm512_set1_ps(inputs[m].row_scale));
    _mm512_storeu_ps(out + m * stride, _mm512_mul_ps(total[m], scale));
  }
}

template <class Scheme, bool kScaledInput>
void multiply(const PanelShape& shape, const std::byte* data, const PanelInput* inputs, std::int64_t tokens,
              float* out, std::int64_t stride) {
  using D = Decode<Scheme::scheme.weight.value>;
  constexpr int kMost = D::kUnits * D::kParts <= 2 ? 8 : 4;  // at most 16 sums in flight
  const auto run = [&]<int M>(std::int64_t t) {
    panel<Scheme, kScaledInput, M>(shape, data, inputs + t, out + t * stride, stride);
    return t + M;
  };
  std::int64_t t = 0;
  while (t + kMost <= tokens) t = run.template operator()<kMost>(t);
  if (t + 4 <= tokens) t = run.template operator()<4>(t);
  if (t + 2 <= tokens) t = run.template operator()<2>(t);
  if (t < tokens) run.template operator()<1>(t);
}

/// exp(x) for |x| <= 87: 2^n * e^r with |r| <= ln(2) / 2.
__m512 exponential(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

void swiglu(const float* gate, const float* up, std::int64_t count, float alpha, float beta, float limit,
            float* y) {
  const __m512 most = _mm512_set1_ps(limit), least = _mm512_set1_ps(-limit), one = _mm512_set1_ps(1.0f);
  for (std::int64_t i = 0; i < count; i += 16) {
    const auto lanes = static_cast<__mmask16>(count - i >= 16 ? 0xFFFF : (1u << (count - i)) - 1);
    const __m512 g = _mm512_min_ps(_mm512_maskz_loadu_ps(lanes, gate + i), most);
    const __m512 u = _mm512_max_ps(_mm512_min_ps(_mm512_maskz_loadu_ps(lanes, up + i), most), least);
    const __m512 x = _mm512_mul_ps(g, _mm512_set1_ps(-alpha));
    const __m512 bounded = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(87.0f)), _mm512_set1_ps(-87.0f));
    const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(one, exponential(bounded)));
    _mm512_mask_storeu_ps(y + i, lanes, _mm512_mul_ps(silu, _mm512_add_ps(u, _mm512_set1_ps(beta))));
  }
}

constexpr bool panels_hold(const Operand& w) {
  return w.value != formats::f16 && w.scale != formats::f16;
}

PanelKernels make_kernels() {
  PanelKernels kernels{};
  for_each_scheme([&]<class S>() {
    if constexpr (panels_hold(S::scheme.weight)) {
      kernels.multiply[static_cast<std::size_t>(S::id)] = multiply<S, S::scheme.activation.group.k != 0>;
      kernels.weights_only[static_cast<std::size_t>(S::id)] = multiply<S, false>;
    }
  });
  kernels.swiglu = swiglu;
  return kernels;
}

}  // namespace

const PanelKernels& panel_kernels() {
  static const PanelKernels kernels = make_kernels();
  return kernels;
}

}  // namespace gatefold
