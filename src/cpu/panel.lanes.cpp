#include <algorithm>

#include "cpu/lanes.h"
#include "cpu/panel.h"
#include "gatefold/codec.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

/// Scales of a block: none (they are per row), one f32 for all rows, or 16 in a format.
enum class BlockScale { none, one_f32, f32, bf16, ue8m0, ue4m3 };

/// How a format's codes are multiplied. A step is kBytes of a panel, kColumns columns; it becomes units of 4
/// columns in bytes (kOffset + code, or + twice the value: kFactor), units of 2 columns in bf16, or columns
/// in f32.
template <Format F>
struct Values;

template <Format F>
requires(F.bits == 4) struct Values<F> {
  static constexpr int kBytes = 64, kColumns = 8, kUnits = 2;
  static constexpr bool kNarrow = true, kDoubled = F.kind == Kind::floating;
  static constexpr int kOffset = panel_offset(F);
  static constexpr float kFactor = kDoubled ? 0.5f : 1.0f;

  struct alignas(16) Table {
    std::uint8_t at[16];
  };
  static constexpr Table kTable = [] {
    Table table{};
    for (std::uint32_t i = 0; i < 16; ++i)
      table.at[i] = static_cast<std::uint8_t>(2 * decode<formats::e2m1>(i) + panel_offset(formats::e2m1));
    return table;
  }();

  static void to_bytes(const std::byte* p, Codes* units) {
    const Codes load = load_codes(p);
    units[0] = low_nibbles(load);
    units[1] = high_nibbles(load);
    if constexpr (kDoubled)
      for (int u = 0; u < kUnits; ++u) units[u] = look_up(kTable.at, units[u]);
  }
  template <int kColumn>
  static Rows column(const std::byte* p) {
    Codes units[kUnits];
    to_bytes(p, units);
    return to_float(byte<kColumn % 4>(units[kColumn / 4]) + ints(-kOffset));
  }
};

template <>
struct Values<formats::int8> {
  static constexpr int kBytes = 128, kColumns = 8, kUnits = 2, kOffset = panel_offset(formats::int8);
  static constexpr bool kNarrow = false;
  static constexpr float kFactor = 1.0f;
  static void to_bytes(const std::byte* p, Codes* units) {
    units[0] = load_codes(p);
    units[1] = load_codes(p + 64);
  }
  template <int kColumn>
  static Rows column(const std::byte* p) {
    return to_float(byte<kColumn % 4>(load_codes(p + kColumn / 4 * 64)) + ints(-kOffset));
  }
};

/// 8-bit floats: bytes 0 to 3 of a lane are columns 0, 2, 1, 3.
template <Format F>
requires(F.bits == 8 && F.kind == Kind::floating) struct Values<F> {
  static constexpr int kBytes = 64, kColumns = 4;
  static constexpr float kFactor = 1.0f;
#if defined(GATEFOLD_DOT2)
  struct alignas(64) Table {
    std::uint8_t at[128];
  };
  static constexpr Table table(int shift) {
    Table table{};
    for (std::uint32_t i = 0; i < 128; ++i)
      table.at[i] = static_cast<std::uint8_t>(encode<formats::bf16>(decode<F>(i)) >> shift);
    return table;
  }
  static constexpr Table kLow = table(0), kHigh = table(8);
  const PairTable pairs{kLow.at, kHigh.at};
  void to_pairs(const std::byte* p, Codes* units) const {
    pairs(load_codes(p), units);
  }
#endif
  /// The code moved to the top of an f32, less the shift of its narrower exponent, is value * 2^-(127 -
  /// bias), subnormals included.
  template <int kColumn>
  static Rows column(const std::byte* p) {
    constexpr int kByte = kColumn == 1 ? 2 : kColumn == 2 ? 1 : kColumn;
    constexpr bool e4m3 = F == formats::e4m3;
    const Ints bits = top_byte < kByte, e4m3 ? 4 : 3 > (load_codes(p), e4m3 ? 0x87F00000 : 0x8FE00000);
    return as_float(bits) * rows(e4m3 ? 0x1p120f : 0x1p112f);
  }
};

template <>
struct Values<formats::bf16> {
  static constexpr int kBytes = 128, kColumns = 4;
  static constexpr float kFactor = 1.0f;
  static void to_pairs(const std::byte* p, Codes* units) {
    units[0] = load_codes(p);
    units[1] = load_codes(p + 64);
  }
  template <int kColumn>
  static Rows column(const std::byte* p) {
    const Codes pair = load_codes(p + kColumn / 2 * 64);
    return kColumn % 2 == 0 ? low_bf16(pair) : high_bf16(pair);
  }
};

/// One column after the other.
template <>
struct Values<formats::f16> {
  static constexpr int kBytes = 64, kColumns = 2;
  static constexpr float kFactor = 1.0f;
  template <int kColumn>
  static Rows column(const std::byte* p) {
    return load_f16(p + 32 * kColumn);
  }
};

template <class T>
T load_input(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

/// The sums of one block for M tokens, by the form of the activations. step() adds one step of weights, whose
/// first column is `at`. Sums of integers are exact. Those of floats are kept in as many chains for every M,
/// so that a token's result does not depend on its neighbours.
template <Format F, PanelForm kForm, int P, int M>
struct Block {
  using V = Values<F>;
  static constexpr int kLimbs = kForm == PanelForm::limbs2 ? 2 : 1;
  static constexpr int kChains = P * M <= 2 ? V::kUnits : 1;  // few sums wait for themselves
  Ints sums[P][M][kLimbs][kChains];

  void begin(const PanelInput* inputs, std::int64_t b) {
    for (auto& panel : sums)
      for (int m = 0; m < M; ++m)
        for (int l = 0; l < kLimbs; ++l)
          for (int c = 0; c < kChains; ++c)
            panel[m][l][c] = ints(c == 0 ? inputs[m].starts[b * kLimbs + l] : 0);
  }
  void step(const V&, const std::byte* const* weights, const PanelInput* inputs, std::int64_t at) {
    Codes units[P][V::kUnits];
    for (int p = 0; p < P; ++p) V::to_bytes(weights[p], units[p]);
    for (int u = 0; u < V::kUnits; ++u)
      for (int m = 0; m < M; ++m)
        for (int l = 0; l < kLimbs; ++l) {
          const auto x = load_input<std::int32_t>(inputs[m].codes + l * inputs[0].plane + at + 4 * u);
          for (int p = 0; p < P; ++p) {
            Ints& sum = sums[p][m][l][u % kChains];
            sum = dot4<V::kNarrow>(sum, units[p][u], x);
          }
        }
  }
  Ints limb(int p, int m, int l) const {
    if constexpr (kChains == 2) return sums[p][m][l][0] + sums[p][m][l][1];
    return sums[p][m][l][0];
  }
  Rows end(int p, int m) const {
    if constexpr (kLimbs == 2) return to_float(shift_left<8>(limb(p, m, 0)) + limb(p, m, 1));
    return to_float(limb(p, m, 0));
  }
};

/// Sums of floats, in two chains.
template <int P, int M>
struct FloatSums {
  Rows sums[P][M][2];
  void begin(const PanelInput*, std::int64_t) {
    for (auto& panel : sums)
      for (auto& token : panel)
        for (Rows& sum : token) sum = rows(0);
  }
  Rows end(int p, int m) const { return sums[p][m][0] + sums[p][m][1]; }
};

#if defined(GATEFOLD_DOT2)
template <Format F, int P, int M>
struct Block<F, PanelForm::pairs, P, M> : FloatSums<P, M> {
  void step(const Values<F>& values, const std::byte* const* weights, const PanelInput* inputs,
            std::int64_t at) {
    Codes units[P][2];
    for (int p = 0; p < P; ++p) values.to_pairs(weights[p], units[p]);
    for (int u = 0; u < 2; ++u)
      for (int m = 0; m < M; ++m) {
        const auto x = load_input<std::uint32_t>(inputs[m].codes + 2 * at + 4 * u);
        for (int p = 0; p < P; ++p) this->sums[p][m][u] = dot2(this->sums[p][m][u], units[p][u], x);
      }
  }
};
#endif

template <Format F, int P, int M>
struct Block<F, PanelForm::floats, P, M> : FloatSums<P, M> {
  template <int kColumn>
  void column(const std::byte* const* weights, const PanelInput* inputs, std::int64_t at) {
    Rows w[P];
    for (int p = 0; p < P; ++p) w[p] = Values<F>::template column<kColumn>(weights[p]);
    for (int m = 0; m < M; ++m) {
      const Rows x = rows(load_input<float>(inputs[m].codes + 4 * (at + kColumn)));
      for (int p = 0; p < P; ++p)
        this->sums[p][m][kColumn % 2] = multiply_add(w[p], x, this->sums[p][m][kColumn % 2]);
    }
  }
  void step(const Values<F>&, const std::byte* const* weights, const PanelInput* inputs, std::int64_t at) {
    [&]<int... kColumn>(std::integer_sequence<int, kColumn...>) {
      (column<kColumn>(weights, inputs, at), ...);
    }
    (std::make_integer_sequence<int, Values<F>::kColumns>());
  }
};

/// The 16 scales of a block.
template <BlockScale kScale>
Rows block_scales(const std::byte* p) {
  if constexpr (kScale == BlockScale::one_f32) return rows(load_input<float>(p));
  if constexpr (kScale == BlockScale::bf16) return as_float(shift_left<16>(load_words_16(p)));
  if constexpr (kScale == BlockScale::ue4m3)
    return as_float(shift_left<20>(load_bytes_16(p))) * rows(0x1p120f);
  if constexpr (kScale == BlockScale::ue8m0)  // 2^-127, code 0, is subnormal in f32
    return as_float(max(shift_left<23>(load_bytes_16(p)), ints(0x00400000)));
  return load_rows(p);
}

/// P panels by M tokens: load, decode and accumulate in step(), a block at a time.
template <Format F, BlockScale kScale, bool kZeroPoints, PanelForm kForm, bool kScaledInput, int P, int M>
void multiply_tile(const PanelShape& shape, const std::byte* first, std::int64_t apart,
                   const PanelInput* inputs, float* out, std::int64_t stride, std::int64_t out_apart) {
  using V = Values<F>;
  const V decoder{};
  const std::int64_t steps = static_cast<std::int64_t>(shape.value_bytes) / V::kBytes;
  const std::byte *next[P], *record[P];
  for (int p = 0; p < P; ++p) record[p] = next[p] = first + p * apart + shape.row_scale_bytes;
  Rows total[P][M];
  for (auto& panel : total)
    for (Rows& t : panel) t = rows(0);
  for (std::int64_t b = 0, in_record = 0; b < shape.blocks; ++b, ++in_record) {
    if (b == 0 || in_record == shape.record) {
      in_record = 0;
      for (int p = 0; p < P; ++p) {
        record[p] = next[p];
        next[p] += shape.values_at;
      }
    }
    Block<F, kForm, P, M> block;
    block.begin(inputs, b);
    std::int64_t at = b * shape.block;
    for (std::int64_t i = 0; i < steps; ++i, at += V::kColumns) {
      if constexpr (P * M <= 2)
        for (int line = 0; line < V::kBytes; line += 64) __builtin_prefetch(next[0] + line + shape.prefetch);
      block.step(decoder, next, inputs, at);
      for (const std::byte*& p : next) p += V::kBytes;
    }
    for (int p = 0; p < P; ++p) {
      const Rows scales = block_scales<kScale>(record[p] + in_record * shape.scale_bytes);
      Rows zeros;
      if constexpr (kZeroPoints)
        zeros = to_float(load_bytes_16(record[p] + shape.zeros_at + in_record * kPanelRows) + ints(-8));
      for (int m = 0; m < M; ++m) {
        Rows sum = block.end(p, m);
        if constexpr (kZeroPoints) sum = multiply_add(zeros, rows(-inputs[m].block_sums[b]), sum);
        if constexpr (kScaledInput) sum = sum * rows(inputs[m].block_scales[b]);
        total[p][m] = kScale == BlockScale::none ? total[p][m] + sum : multiply_add(sum, scales, total[p][m]);
      }
    }
  }
  for (int p = 0; p < P; ++p) {
    const Rows row_scales = shape.row_scale_bytes != 0 ? load_rows(first + p * apart) : rows(1);
    for (int m = 0; m < M; ++m)
      store_rows(out + m * stride + p * out_apart,
                 total[p][m] * (row_scales * rows(inputs[m].row_scale * V::kFactor)));
  }
}

/// One or two tokens go panel by panel, one stream of memory. More take two panels at once, so that each
/// number of x is loaded once for 32 rows, in tiles of nearly the same size, as many tokens as the registers
/// hold.
template <Format F, BlockScale kScale, bool kZeroPoints, PanelForm kForm, bool kScaledInput>
void multiply(const PanelShape& shape, const std::byte* first, std::int64_t apart, int panels,
              const PanelInput* inputs, std::int64_t tokens, float* out, std::int64_t stride,
              std::int64_t out_apart) {
  const auto tile = [&]<int P, int M>(int panel, std::int64_t t) {
    multiply_tile<F, kScale, kZeroPoints, kForm, kScaledInput, P, M>(
        shape, first + panel * apart, apart, inputs + t, out + t * stride + panel * out_apart, stride,
        out_apart);
    return t + M;
  };
  int panel = 0;
  if constexpr (kRowsRegisters == 1) {
    constexpr std::int64_t kMost = 6;
    for (; tokens > 2 && panel + 2 <= panels; panel += 2)
      for (std::int64_t t = 0, left = (tokens + kMost - 1) / kMost; left > 0; --left) {
        switch ((tokens - t + left - 1) / left) {
          case 3:
            t = tile.template operator()<2, 3>(panel, t);
            break;
          case 4:
            t = tile.template operator()<2, 4>(panel, t);
            break;
          case 5:
            t = tile.template operator()<2, 5>(panel, t);
            break;
          default:
            t = tile.template operator()<2, 6>(panel, t);
        }
      }
  }
  for (; panel < panels; ++panel)
    for (std::int64_t t = 0; t < tokens;)
      t = t + 2 <= tokens ? tile.template operator()<1, 2>(panel, t)
                          : tile.template operator()<1, 1>(panel, t);
}

constexpr BlockScale block_scale(const Operand& w, bool foreign) {
  if (w.group.k == 0) return BlockScale::none;
  if (w.group.n > 1) return BlockScale::one_f32;
  return foreign                     ? BlockScale::f32
         : w.scale == formats::bf16  ? BlockScale::bf16
         : w.scale == formats::ue8m0 ? BlockScale::ue8m0
         : w.scale == formats::ue4m3 ? BlockScale::ue4m3
                                     : BlockScale::f32;
}

/// Whether format F can be multiplied in a form here.
template <Format F>
constexpr bool can_multiply(PanelForm form) {
  if (form == PanelForm::floats) return true;
  if (form != PanelForm::pairs) return F.bits == 4 || F == formats::int8;
#if defined(GATEFOLD_DOT2)
  return F == formats::bf16 || F == formats::e4m3 || F == formats::e5m2;
#else
  return false;
#endif
}

/// The multiply of a scheme's weights; nullptr if there is none.
template <class S, PanelForm kForm, bool kScaled, bool kForeign>
constexpr PanelMultiply choose() {
  constexpr Operand w = S::scheme.weight;
  constexpr bool has_block_scales = S::scheme.activation.group.k != 0;
  constexpr bool possible = kForm == PanelForm::limbs2   ? kScaled
                            : kForm == PanelForm::floats ? !kScaled
                                                         : !kScaled || has_block_scales;
  if constexpr (possible && can_multiply<w.value>(kForm))
    return multiply<w.value, block_scale(w, kForeign), w.zero_point.stored(), kForm, kScaled>;
  return nullptr;
}

constexpr int kForms = 4;
struct Table {
  PanelMultiply at[std::size(operands::table)][kForms][2][2];
};

constexpr Table table = [] {
  Table all{};
  for_each_scheme([&]<class S>() {
    [&]<int... kForm>(std::integer_sequence<int, kForm...>) {
      const auto fill = [&]<int kEach>() {
        auto& row = all.at[static_cast<std::size_t>(S::id)][kEach];
        constexpr auto form = static_cast<PanelForm>(kEach);
        row[0][0] = choose<S, form, false, false>();
        row[0][1] = choose<S, form, false, true>();
        row[1][0] = choose<S, form, true, false>();
        row[1][1] = choose<S, form, true, true>();
      };
      (fill.template operator()<kForm>(), ...);
    }
    (std::make_integer_sequence<int, kForms>());
  });
  return all;
}();

PanelMultiply find(SchemeId id, PanelForm form, bool scaled, bool foreign) {
  return table.at[static_cast<std::size_t>(id)][static_cast<int>(form)][scaled][foreign];
}

}  // namespace

extern const PanelKernels panel_kernels;
const PanelKernels panel_kernels{find};

}  // namespace gatefold::GATEFOLD_ISA
