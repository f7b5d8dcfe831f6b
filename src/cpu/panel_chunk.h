#pragma once
/// \file
/// Chunks of panels: decoded once into the innermost cache, multiplied by many tokens. For *.lanes.cpp files
/// only.

#include "cpu/panel_kernel.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

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

/// kPanels at once, so that each number of x is loaded once for several registers of rows; as many tokens as
/// their sums leave room for.
inline constexpr int kPanels = kRowsRegisters == 1 ? 2 : 1;
template <class A>
constexpr int kTileTokens = kRowsRegisters == 1   ? 6
                            : kRowsRegisters == 4 ? 2
                            : A::kBytes           ? 4
                                                  : 3;

/// A chunk of kPanels panels, decoded.
template <class A>
struct Chunk {
  static constexpr std::int64_t kBlocks = A::kChunk / kLeastPanelBlock;
  static constexpr std::int64_t kCodes = A::kChunk / A::kColumns;
  const std::byte* units[kPanels];  // of 64 bytes
  std::int64_t blocks = 0, block_units = 0;
  alignas(64) float scales[kPanels][kBlocks][kPanelRows];
  alignas(64) float zeros[kPanels][kBlocks][kPanelRows];
  alignas(64) std::byte codes[kPanels][kCodes][64];
};

/// Decodes one panel's part of a chunk.
template <class K>
void decode_chunk(const PanelShape& shape, Blocks& panel, int p, Chunk<typename K::A>& chunk) {
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
    if constexpr (K::kScaled) store_rows(chunk.scales[p][b], block_scales<K::kScale>(panel.scales));
    if constexpr (K::kZeroPoints) store_rows(chunk.zeros[p][b], zero_points(panel.zeros));
  }
}

/// Sums of one block of a chunk for M tokens. High limbs first, then low ones: (sum << 8) + ...
template <class A, int M>
struct BlockSums {
  static constexpr int kChains = A::kBytes ? 1 : 2;
  typename A::Sum at[kPanels][M][kChains];

  void add(const Chunk<A>& chunk, std::int64_t in_chunk, const PanelInput* inputs, std::int64_t x) {
    const std::int64_t units = A::kBlockUnits != 0 ? A::kBlockUnits : chunk.block_units;
    const std::byte* codes[kPanels];
    for (int p = 0; p < kPanels; ++p) codes[p] = chunk.units[p] + in_chunk * units * 64;
    for (std::int64_t u = 0; u < units; u += kChains)
      for (int c = 0; c < kChains; ++c) {
        typename A::Unit weights[kPanels];
        for (int p = 0; p < kPanels; ++p) load_unit(codes[p] + (u + c) * 64, weights[p]);
        for (int m = 0; m < M; ++m) {
          const auto numbers = load_at<std::uint32_t>(inputs[m].codes + x + 4 * (u + c));
          for (int p = 0; p < kPanels; ++p) at[p][m][c] = A::accumulate(at[p][m][c], weights[p], numbers);
        }
      }
  }

  BlockSums(const Chunk<A>& chunk, std::int64_t in_chunk, const PanelInput* inputs, std::int64_t b) {
    for (auto& panel : at)
      for (auto& token : panel)
        for (auto& sum : token) sum = A::zero();
    const std::int64_t x = b * chunk.block_units * 4;
    add(chunk, in_chunk, inputs, x);
    if constexpr (A::kLimbs == 2) {
      for (auto& panel : at)
        for (auto& token : panel) token[0] = shift_left<8>(token[0]);
      add(chunk, in_chunk, inputs, x + inputs[0].plane);
    }
    if constexpr (A::kBytes)
      for (auto& panel : at)
        for (int m = 0; m < M; ++m) panel[m][0] = panel[m][0] + A::start(inputs[m], b);
  }

  typename A::Total sum(int p, int m) const {
    if constexpr (A::kIntegers)
      return at[p][m][0];
    else if constexpr (A::kBytes)
      return to_float(at[p][m][0]);
    else
      return at[p][m][0] + at[p][m][1];
  }
};

/// Totals lie in memory as they are: f32, or integers in their place.
inline void store_total(float* p, Rows total) {
  store_rows(p, total);
}
inline void store_total(float* p, Ints total) {
  store_rows(p, as_float(total));
}
template <class A>
typename A::Total load_total(const float* p) {
  if constexpr (A::kIntegers)
    return as_ints(load_rows(p));
  else
    return load_rows(p);
}

/// totals [M][kPanels][16] += a chunk, whose first block is b, times M tokens.
template <class A, int M>
void multiply_chunk(const Chunk<A>& chunk, const PanelInput* inputs, std::int64_t b, std::int64_t number,
                    float* totals) {
  typename A::Total parts[kPanels][M];
  const auto total = [&](int p, int m) { return totals + (m * kPanels + p) * kPanelRows; };
  for (int p = 0; p < kPanels; ++p)
    for (int m = 0; m < M; ++m)
      parts[p][m] = A::kInput == InputScale::chunk ? A::zero_total() : load_total<A>(total(p, m));
  for (std::int64_t i = 0; i < chunk.blocks; ++i) {
    const BlockSums<A, M> sums(chunk, i, inputs, b + i);
    for (int p = 0; p < kPanels; ++p) {
      const Rows scales = A::kScaled ? load_rows(chunk.scales[p][i]) : rows(1);
      const Rows zeros = A::kZeroPoints ? load_rows(chunk.zeros[p][i]) : rows(0);
      for (int m = 0; m < M; ++m)
        parts[p][m] = A::add_block(parts[p][m], sums.sum(p, m), scales, zeros, inputs[m], b + i);
    }
  }
  for (int p = 0; p < kPanels; ++p)
    for (int m = 0; m < M; ++m) {
      if constexpr (A::kInput == InputScale::chunk)
        parts[p][m] = multiply_add(parts[p][m], rows(inputs[m].scales[number]), load_rows(total(p, m)));
      store_total(total(p, m), parts[p][m]);
    }
}

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
