// The multiply over panels (panel.h). One or two tokens: each panel is one stream, decoded in registers.
// More: chunks of panels are decoded once into the innermost cache, and multiplied by all tokens from there.

#include <algorithm>

#include "cpu/panel_chunk.h"
#include "cpu/panel_tiles.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

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
  typename K::Total totals[M];
  for (int m = 0; m < M; ++m) totals[m] = K::first_total(inputs[m], shape.blocks);
  std::int64_t at = 0;  // of the activations
  for (std::int64_t b = 0, chunk = 0; b < shape.blocks; ++chunk) {
    typename K::Total parts[M];
    for (int m = 0; m < M; ++m) parts[m] = totals[m];
    if constexpr (K::kInput == InputScale::chunk)
      for (Rows& part : parts) part = rows(0);
    for (const std::int64_t end = std::min(b + chunk_blocks, shape.blocks); b < end; ++b) {
      blocks.enter(shape);
      typename K::Sum sums[M][K::kLimbs][chains];
      for (int m = 0; m < M; ++m)
        for (int l = 0; l < K::kLimbs; ++l)
          for (int c = 0; c < chains; ++c) sums[m][l][c] = K::zero();
      if constexpr (K::kBytes)
        for (int m = 0; m < M; ++m) sums[m][K::kLimbs - 1][0] = K::start(inputs[m], b);
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
        typename K::Total sum;
        if constexpr (!K::kBytes || K::kIntegers)
          sum = limbs[0];
        else
          sum = to_float(K::kLimbs == 2 ? shift_left<8>(limbs[0]) + limbs[1] : limbs[0]);
        parts[m] = K::add_block(parts[m], sum, scales, zeros, inputs[m], b);
      }
    }
    for (int m = 0; m < M; ++m) {
      if constexpr (K::kInput == InputScale::chunk)
        totals[m] = multiply_add(parts[m], rows(inputs[m].scales[chunk]), totals[m]);
      else
        totals[m] = parts[m];
    }
  }
  for (int m = 0; m < M; ++m) K::store(shape, panel, inputs[m], totals[m], out + m * stride);
}

/// multiply_chunk of `tokens` tokens, which are known when compiling from here on.
template <class A, int M = kTileTokens<A>>
void multiply_tile(std::int64_t tokens, const auto&... arguments) {
  if constexpr (M > 1)
    if (tokens < M) return multiply_tile<A, M - 1>(tokens, arguments...);
  multiply_chunk<A, M>(arguments...);
}

/// kPanels panels by any number of tokens up to kPanelTokens.
template <class K>
void by_chunks(const PanelShape& shape, const std::byte* first, std::int64_t apart, const PanelInput* inputs,
               std::int64_t tokens, float* out, std::int64_t stride, std::int64_t out_apart) {
  alignas(64) float totals[kPanelTokens][kPanels][kPanelRows];
  for (std::int64_t t = 0; t < tokens; ++t)
    for (float* total : {totals[t][0], totals[t][kPanels - 1]})
      store_total(total, K::first_total(inputs[t], shape.blocks));
  Blocks panels[kPanels];
  for (int p = 0; p < kPanels; ++p) panels[p] = Blocks(shape, first + p * apart);
  using A = typename K::A;
  Chunk<A> chunk;
  [[maybe_unused]] Tiles matrix_tiles;
  constexpr std::int64_t most = K::kTiles ? kTileRows : kTileTokens<A>;
  const std::int64_t chunk_blocks = K::kChunk / shape.block;
  chunk.block_units = shape.block / K::kColumns;
  const std::int64_t tiles = (tokens + most - 1) / most;
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
      if constexpr (K::kTiles)
        multiply_chunk_by_tiles<A>(matrix_tiles, chunk, inputs + token, m, b, number, totals + token);
      else
        multiply_tile<A>(m, chunk, inputs + token, b, number, &totals[token][0][0]);
      token += m;
    }
  }
  for (int p = 0; p < kPanels; ++p)
    for (std::int64_t t = 0; t < tokens; ++t)
      K::store(shape, first + p * apart, inputs[t], load_total<A>(totals[t][p]),
               out + t * stride + p * out_apart);
}

template <class K>
void multiply(const PanelShape& shape, const std::byte* first, std::int64_t apart, int panels,
              const PanelInput* inputs, std::int64_t tokens, float* out, std::int64_t stride,
              std::int64_t out_apart) {
  for (int panel = 0; panel < panels;) {
    const std::byte* at = first + panel * apart;
    float* to = out + panel * out_apart;
    if (tokens >= K::kLeastTokens) {
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
