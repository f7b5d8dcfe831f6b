// The multiply over panels (panel.h). One or two tokens: each panel is one stream, decoded in registers.
// More: chunks of panels are decoded once into the innermost cache, and multiplied by all tokens from there.

#include <algorithm>
#include <type_traits>

#include "cpu/panel.h"
#include "cpu/panel_values.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

/// What a multiply is made for. A step of weights becomes units of 4 columns in bytes, 2 in bf16, 1 in f32; a
/// unit meets 4 bytes of the activations. kShortBlock: columns, if they are few; else 0.
template <Format kValue, BlockScale kBlockScale, int kShortBlock, bool kZeros, PanelForm kPanelForm,
          InputScale kInputScale>
struct Kernel {
  using V = Values<kValue>;
  static constexpr BlockScale kScale = kBlockScale;
  static constexpr bool kZeroPoints = kZeros;
  static constexpr PanelForm kForm = kPanelForm;
  static constexpr InputScale kInput = kInputScale;

  static constexpr bool kBytes = kForm == PanelForm::limbs1 || kForm == PanelForm::limbs2;
  static constexpr int kLimbs = kForm == PanelForm::limbs2 ? 2 : 1;
  static constexpr int kColumns = kBytes ? 4 : kForm == PanelForm::pairs ? 2 : 1;  // of a unit
  static constexpr int kUnits = V::kColumns / kColumns;                            // of a step
  static constexpr std::int64_t kChunk =
      kBytes ? kPanelChunk : kPanelChunk / 2;  // columns that are decoded at once
  static constexpr int kBlockUnits = kShortBlock / kColumns;
  /// Whether a chunk can be multiplied as it lies in memory.
  static constexpr bool kDecoded =
      kScale == BlockScale::none &&
      (kBytes ? kValue == formats::int8 : kForm == PanelForm::pairs && kValue == formats::bf16);
  using Unit = std::conditional_t<kForm == PanelForm::floats, Rows, Codes>;
  using Sum = std::conditional_t<kBytes, Ints, Rows>;

  static void decode(const V& values, const std::byte* p, Unit* units) {
    if constexpr (kBytes)
      V::to_bytes(p, units);
    else if constexpr (kForm == PanelForm::pairs)
      values.to_pairs(p, units);
    else
      [&]<int... kColumn>(std::integer_sequence<int, kColumn...>) {
        ((units[kColumn] = V::template column<kColumn>(p)), ...);
      }
    (std::make_integer_sequence<int, kUnits>());
  }

  static Sum zero() {
    if constexpr (kBytes)
      return ints(0);
    else
      return rows(0);
  }

  /// sum + unit times the activations at x.
  static Sum accumulate(Sum sum, Unit unit, std::uint32_t x) {
    if constexpr (kBytes) return dot4<V::kNarrow>(sum, unit, static_cast<std::int32_t>(x));
#if defined(GATEFOLD_DOT2)
    else if constexpr (kForm == PanelForm::pairs)
      return dot2(sum, unit, x);
#endif
    else
      return multiply_add(unit, rows(std::bit_cast<float>(x)), sum);
  }

  /// part + the sum of block b, scaled.
  static Rows add_block(Rows part, Rows sum, Rows scales, Rows zeros, const PanelInput& in, std::int64_t b) {
    if constexpr (kZeroPoints) sum = multiply_add(zeros, rows(-in.block_sums[b]), sum);
    if constexpr (kInput == InputScale::block) sum = sum * rows(in.scales[b]);
    if constexpr (kScale == BlockScale::none) return part + sum;
    return multiply_add(sum, scales, part);
  }

  static void store(const PanelShape& shape, const std::byte* panel, const PanelInput& in, Rows total,
                    float* out) {
    const Rows row_scales = shape.row_scale_bytes != 0 ? load_rows(panel) : rows(1);
    store_rows(out, total * (row_scales * rows(in.row_scale * (V::kFactor * scale_factor(kScale)))));
  }
};

/// Walks the blocks of one panel.
class Blocks {
 public:
  Blocks() = default;
  Blocks(const PanelShape& shape, const std::byte* panel)
      : next(panel + shape.row_scale_bytes), in_record_(shape.record) {}

  void enter(const PanelShape& shape) {
    if (in_record_ == shape.record) {
      record_ = next;
      next += shape.values_at;
      in_record_ = 0;
    }
    scales = record_ + static_cast<std::size_t>(in_record_) * shape.scale_bytes;
    zeros = record_ + shape.zeros_at + in_record_ * kPanelRows;
    ++in_record_;
  }

  const std::byte* next = nullptr;  // values of the block; who reads them moves it on
  const std::byte* scales = nullptr;
  const std::byte* zeros = nullptr;

 private:
  const std::byte* record_ = nullptr;
  std::int64_t in_record_ = 0;
};

/// One panel by M tokens.
template <class K, int M>
void stream(const PanelShape& shape, const std::byte* panel, const PanelInput* inputs, float* out,
            std::int64_t stride) {
  using V = typename K::V;
  // Two chains, as a single sum waits for itself; blocks of 32 are short enough to overlap. Floats always
  // have two, so that a token's result does not depend on its neighbours.
  constexpr int chains = K::kBytes && K::kBlockUnits != 0 ? 1 : 2;
  const V values{};
  const std::int64_t steps = K::kBlockUnits != 0 ? K::kBlockUnits / K::kUnits
                                                 : static_cast<std::int64_t>(shape.value_bytes) / V::kBytes;
  const std::int64_t chunk_blocks = K::kChunk / shape.block;
  Blocks blocks(shape, panel);
  Rows totals[M];
  for (Rows& total : totals) total = rows(0);
  std::int64_t at = 0;  // of the activations
  for (std::int64_t b = 0, chunk = 0; b < shape.blocks; ++chunk) {
    Rows parts[M];
    for (int m = 0; m < M; ++m) parts[m] = K::kInput == InputScale::chunk ? rows(0) : totals[m];
    for (const std::int64_t end = std::min(b + chunk_blocks, shape.blocks); b < end; ++b) {
      blocks.enter(shape);
      typename K::Sum sums[M][K::kLimbs][chains];
      for (int m = 0; m < M; ++m)
        for (int l = 0; l < K::kLimbs; ++l)
          for (int c = 0; c < chains; ++c) sums[m][l][c] = K::zero();
      if constexpr (K::kBytes)
        for (int m = 0; m < M; ++m) sums[m][K::kLimbs - 1][0] = ints(inputs[m].starts[b]);
      for (std::int64_t i = 0; i < steps; ++i) {
        for (int line = 0; line < V::kBytes; line += 64)
          __builtin_prefetch(blocks.next + line + shape.prefetch);
        typename K::Unit units[K::kUnits];
        K::decode(values, blocks.next, units);
        blocks.next += V::kBytes;
        for (int u = 0; u < K::kUnits; ++u, at += 4)
          for (int m = 0; m < M; ++m)
            for (int l = 0; l < K::kLimbs; ++l) {
              auto& sum = sums[m][l][u % chains];
              sum = K::accumulate(sum, units[u],
                                  load_at<std::uint32_t>(inputs[m].codes + l * inputs[0].plane + at));
            }
      }
      const Rows scales = block_scales<K::kScale>(blocks.scales);
      const Rows zeros = K::kZeroPoints ? zero_points(blocks.zeros) : rows(0);
      for (int m = 0; m < M; ++m) {
        typename K::Sum limbs[K::kLimbs];
        for (int l = 0; l < K::kLimbs; ++l)
          limbs[l] = chains == 2 ? sums[m][l][0] + sums[m][l][1] : sums[m][l][0];
        Rows sum;
        if constexpr (!K::kBytes)
          sum = limbs[0];
        else
          sum = to_float(K::kLimbs == 2 ? shift_left<8>(limbs[0]) + limbs[1] : limbs[0]);
        parts[m] = K::add_block(parts[m], sum, scales, zeros, inputs[m], b);
      }
    }
    for (int m = 0; m < M; ++m)
      totals[m] = K::kInput == InputScale::chunk
                      ? multiply_add(parts[m], rows(inputs[m].scales[chunk]), totals[m])
                      : parts[m];
  }
  for (int m = 0; m < M; ++m) K::store(shape, panel, inputs[m], totals[m], out + m * stride);
}

inline void store_unit(std::byte* p, Codes unit) {
  store_codes(p, unit);
}
inline void store_unit(std::byte* p, Rows unit) {
  store_rows(reinterpret_cast<float*>(p), unit);
}
inline void load_unit(const std::byte* p, Codes& unit) {
  unit = load_codes(p);
}
inline void load_unit(const std::byte* p, Rows& unit) {
  unit = load_rows(p);
}

/// P panels at once, so that each number of x is loaded once for several registers of rows; as many tokens as
/// their sums leave room for.
constexpr int kPanels = kRowsRegisters == 1 ? 2 : 1;
template <class K>
constexpr int kTileTokens = kRowsRegisters == 1   ? 6
                            : kRowsRegisters == 4 ? 2
                            : K::kBytes           ? 4
                                                  : 3;

/// A chunk of kPanels panels, decoded.
template <class K>
struct Chunk {
  static constexpr std::int64_t kBlocks = K::kChunk / kLeastPanelBlock;
  static constexpr std::int64_t kCodes = K::kDecoded ? 1 : K::kChunk / K::kColumns;
  const std::byte* units[kPanels];  // of 64 bytes
  std::int64_t blocks = 0, block_units = 0;
  alignas(64) float scales[kPanels][kBlocks][kPanelRows];
  alignas(64) float zeros[kPanels][kBlocks][kPanelRows];
  alignas(64) std::byte codes[kPanels][kCodes][64];
};

/// Decodes one panel's part of a chunk.
template <class K>
void decode_chunk(const PanelShape& shape, Blocks& panel, int p, Chunk<K>& chunk) {
  using V = typename K::V;
  const V values{};
  auto* codes = chunk.codes[p];
  for (std::int64_t b = 0; b < chunk.blocks; ++b) {
    panel.enter(shape);
    const std::byte* next = panel.next;
    for (const std::byte* end = next + shape.value_bytes; next < end; next += V::kBytes) {
      typename K::Unit units[K::kUnits];
      K::decode(values, next, units);
      for (const auto& unit : units) store_unit(*codes++, unit);
    }
    panel.next = next;
    if constexpr (K::kScale != BlockScale::none)
      store_rows(chunk.scales[p][b], block_scales<K::kScale>(panel.scales));
    if constexpr (K::kZeroPoints) store_rows(chunk.zeros[p][b], zero_points(panel.zeros));
  }
}

/// Sums of one block of a chunk for M tokens. High limbs first, then low ones: (sum << 8) + ...
template <class K, int M>
struct BlockSums {
  static constexpr int kChains = K::kBytes ? 1 : 2;
  typename K::Sum at[kPanels][M][kChains];

  void add(const Chunk<K>& chunk, std::int64_t in_chunk, const PanelInput* inputs, std::int64_t x) {
    const std::int64_t units = K::kBlockUnits != 0 ? K::kBlockUnits : chunk.block_units;
    const std::byte* codes[kPanels];
    for (int p = 0; p < kPanels; ++p) codes[p] = chunk.units[p] + in_chunk * units * 64;
    for (std::int64_t u = 0; u < units; u += kChains)
      for (int c = 0; c < kChains; ++c) {
        typename K::Unit weights[kPanels];
        for (int p = 0; p < kPanels; ++p) load_unit(codes[p] + (u + c) * 64, weights[p]);
        for (int m = 0; m < M; ++m) {
          const auto numbers = load_at<std::uint32_t>(inputs[m].codes + x + 4 * (u + c));
          for (int p = 0; p < kPanels; ++p) at[p][m][c] = K::accumulate(at[p][m][c], weights[p], numbers);
        }
      }
  }

  BlockSums(const Chunk<K>& chunk, std::int64_t in_chunk, const PanelInput* inputs, std::int64_t b) {
    for (auto& panel : at)
      for (auto& token : panel)
        for (auto& sum : token) sum = K::zero();
    const std::int64_t x = b * chunk.block_units * 4;
    add(chunk, in_chunk, inputs, x);
    if constexpr (K::kLimbs == 2) {
      for (auto& panel : at)
        for (auto& token : panel) token[0] = shift_left<8>(token[0]);
      add(chunk, in_chunk, inputs, x + inputs[0].plane);
    }
    if constexpr (K::kBytes)
      for (auto& panel : at)
        for (int m = 0; m < M; ++m) panel[m][0] = panel[m][0] + ints(inputs[m].starts[b]);
  }

  Rows sum(int p, int m) const {
    if constexpr (K::kBytes)
      return to_float(at[p][m][0]);
    else
      return at[p][m][0] + at[p][m][1];
  }
};

/// totals [M][kPanels][16] += a chunk, whose first block is b, times M tokens.
template <class K, int M>
void multiply_chunk(const Chunk<K>& chunk, const PanelInput* inputs, std::int64_t b, std::int64_t number,
                    float* totals) {
  Rows parts[kPanels][M];
  const auto total = [&](int p, int m) { return totals + (m * kPanels + p) * kPanelRows; };
  for (int p = 0; p < kPanels; ++p)
    for (int m = 0; m < M; ++m)
      parts[p][m] = K::kInput == InputScale::chunk ? rows(0) : load_rows(total(p, m));
  for (std::int64_t i = 0; i < chunk.blocks; ++i) {
    const BlockSums<K, M> sums(chunk, i, inputs, b + i);
    for (int p = 0; p < kPanels; ++p) {
      const Rows scales = K::kScale != BlockScale::none ? load_rows(chunk.scales[p][i]) : rows(1);
      const Rows zeros = K::kZeroPoints ? load_rows(chunk.zeros[p][i]) : rows(0);
      for (int m = 0; m < M; ++m)
        parts[p][m] = K::add_block(parts[p][m], sums.sum(p, m), scales, zeros, inputs[m], b + i);
    }
  }
  for (int p = 0; p < kPanels; ++p)
    for (int m = 0; m < M; ++m)
      store_rows(total(p, m),
                 K::kInput == InputScale::chunk
                     ? multiply_add(parts[p][m], rows(inputs[m].scales[number]), load_rows(total(p, m)))
                     : parts[p][m]);
}

/// multiply_chunk of `tokens` tokens, which are known when compiling from here on.
template <class K, int M = kTileTokens<K>>
void multiply_tile(std::int64_t tokens, const auto&... arguments) {
  if constexpr (M > 1)
    if (tokens < M) return multiply_tile<K, M - 1>(tokens, arguments...);
  multiply_chunk<K, M>(arguments...);
}

/// kPanels panels by any number of tokens up to kPanelTokens.
template <class K>
void by_chunks(const PanelShape& shape, const std::byte* first, std::int64_t apart, const PanelInput* inputs,
               std::int64_t tokens, float* out, std::int64_t stride, std::int64_t out_apart) {
  alignas(64) float totals[kPanelTokens][kPanels][kPanelRows];
  std::fill_n(totals[0][0], tokens * kPanels * kPanelRows, 0.0f);
  Blocks panels[kPanels];
  for (int p = 0; p < kPanels; ++p) panels[p] = Blocks(shape, first + p * apart);
  Chunk<K> chunk;
  const std::int64_t chunk_blocks = K::kChunk / shape.block;
  chunk.block_units = shape.block / K::kColumns;
  const std::int64_t tiles = (tokens + kTileTokens<K> - 1) / kTileTokens<K>;
  for (std::int64_t b = 0, number = 0; b < shape.blocks; b += chunk_blocks, ++number) {
    chunk.blocks = std::min(chunk_blocks, shape.blocks - b);
    const bool last = b + chunk_blocks >= shape.blocks;
    const std::byte* begin = panels[0].next;
    for (int p = 0; p < kPanels; ++p) {
      if constexpr (K::kDecoded) {
        chunk.units[p] = panels[p].next;
        panels[p].next += static_cast<std::size_t>(chunk.blocks) * shape.value_bytes;
      } else {
        chunk.units[p] = chunk.codes[p][0];
        decode_chunk<K>(shape, panels[p], p, chunk);
      }
    }
    // The next chunk, or that of the next panels, is fetched while this one is multiplied.
    const std::int64_t bytes = panels[0].next - begin, skip = last ? (kPanels - 1) * apart : 0;
    if (last)
      for (std::int64_t t = 0; t < tokens; ++t)
        for (int p = 0; p < kPanels; ++p) __builtin_prefetch(out + t * stride + p * out_apart, 1);
    std::int64_t token = 0, fetched = 0;
    for (std::int64_t left = tiles; left > 0; --left) {
      const std::int64_t m = (tokens - token + left - 1) / left;
      for (const std::int64_t end = bytes * (tiles - left + 1) / tiles; fetched < end; fetched += 64)
        for (const Blocks& panel : panels) __builtin_prefetch(panel.next + skip + fetched);
      multiply_tile<K>(m, chunk, inputs + token, b, number, &totals[token][0][0]);
      token += m;
    }
  }
  for (int p = 0; p < kPanels; ++p)
    for (std::int64_t t = 0; t < tokens; ++t)
      K::store(shape, first + p * apart, inputs[t], load_rows(totals[t][p]),
               out + t * stride + p * out_apart);
}

template <class K>
void multiply(const PanelShape& shape, const std::byte* first, std::int64_t apart, int panels,
              const PanelInput* inputs, std::int64_t tokens, float* out, std::int64_t stride,
              std::int64_t out_apart) {
  for (int panel = 0; panel < panels;) {
    const std::byte* at = first + panel * apart;
    float* to = out + panel * out_apart;
    if (tokens > 2) {
      const bool alone = panels - panel < kPanels;  // then it is computed twice
      by_chunks<K>(shape, at, alone ? 0 : apart, inputs, tokens, to, stride, alone ? 0 : out_apart);
      panel += kPanels;
    } else {
      tokens == 1 ? stream<K, 1>(shape, at, inputs, to, stride) : stream<K, 2>(shape, at, inputs, to, stride);
      ++panel;
    }
  }
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
template <class S, PanelForm kForm, InputScale kInput, bool kForeign>
constexpr PanelMultiply choose() {
  constexpr Operand w = S::scheme.weight, activation = S::scheme.activation;
  static_assert(w.group.k == 0 || (w.group.k >= kLeastPanelBlock && kMostPanelBlock % w.group.k == 0),
                "weights are scaled in groups of 16, 32, 64 or 128 columns");
  static_assert(activation.group.k == 0 || w.group.k == 0 || activation.group.k == w.group.k,
                "activations are scaled in the groups of the weights");
  constexpr bool by_block = activation.group.k != 0;
  constexpr bool possible = kInput == InputScale::block   ? by_block && kForm != PanelForm::floats
                            : kInput == InputScale::chunk ? kForm == PanelForm::limbs2
                                                          : kForm != PanelForm::limbs2;
  constexpr int short_block = w.group.k <= 32 ? w.group.k : 0;
  if constexpr (possible && can_multiply<w.value>(kForm))
    return multiply<
        Kernel<w.value, block_scale(w, kForeign), short_block, w.zero_point.stored(), kForm, kInput>>;
  return nullptr;
}

constexpr int kForms = 4, kInputScales = 3;
struct Table {
  PanelMultiply at[std::size(operands::table)][kForms][kInputScales][2];
};

constexpr Table table = [] {
  Table all{};
  for_each_scheme([&]<class S>() {
    [&]<int... kEach>(std::integer_sequence<int, kEach...>) {
      const auto fill = [&]<int kForm, int kInput>() {
        constexpr auto form = static_cast<PanelForm>(kForm);
        constexpr auto input = static_cast<InputScale>(kInput);
        auto& row = all.at[static_cast<std::size_t>(S::id)][kForm][kInput];
        row[0] = choose<S, form, input, false>();
        row[1] = choose<S, form, input, true>();
      };
      (fill.template operator()<kEach / kInputScales, kEach % kInputScales>(), ...);
    }
    (std::make_integer_sequence<int, kForms * kInputScales>());
  });
  return all;
}();

PanelMultiply find(SchemeId id, PanelForm form, InputScale scale, bool foreign) {
  return table.at[static_cast<std::size_t>(id)][static_cast<int>(form)][static_cast<int>(scale)][foreign];
}

}  // namespace

extern const PanelKernels panel_kernels;
const PanelKernels panel_kernels{find};

}  // namespace gatefold::GATEFOLD_ISA
