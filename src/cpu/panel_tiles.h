#pragma once
/// \file
/// Chunks of panels multiplied by AMX: a unit of a panel is a row of a tile of weights, a token's activations
/// are a row of the other. For *.lanes.cpp files only.

#include "cpu/panel_chunk.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

inline constexpr std::int64_t kTileRows = 32;  // tokens of two tiles

#if defined(__AMX_TILE__)

/// Tiles 0 to 3: sums of 16 tokens and 16 rows, [2 of tokens][2 panels]. 4, 5: weights. 6, 7: activations.
inline void configure_tiles(std::int64_t tokens) {
  TileConfig config;
  const std::int64_t low = tokens < 16 ? tokens : 16, high = tokens > 16 ? tokens - 16 : 1;
  const std::int64_t rows[8] = {low, low, high, high, 16, 16, low, high};
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = static_cast<std::uint8_t>(rows[tile]);
  load_tile_config(config);
}

/// Tiles 0 to 3 += 16 units of weights a step by tokens.
template <class A>
void multiply_tiles(const Chunk<A>& chunk, std::int64_t first, std::int64_t units, const std::byte* x,
                    std::int64_t stride, std::int64_t tokens) {
  const auto pitch = static_cast<std::size_t>(stride);
  for (std::int64_t u = 0; u < units; u += 16) {
    _tile_loadd(4, chunk.units[0] + (first + u) * 64, 64);
    _tile_loadd(5, chunk.units[1] + (first + u) * 64, 64);
    _tile_loadd(6, x + u * 4, pitch);
    if constexpr (A::kBytes) {
      _tile_dpbsud(0, 6, 4);
      _tile_dpbsud(1, 6, 5);
    } else {
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
    }
    if (tokens <= 16) continue;
    _tile_loadd(7, x + 16 * stride + u * 4, pitch);
    if constexpr (A::kBytes) {
      _tile_dpbsud(2, 7, 4);
      _tile_dpbsud(3, 7, 5);
    } else {
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
}

/// Configures the tiles for as long as it lives; the system need not save them after that.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }
  void configure(std::int64_t tokens) {
    if (tokens == tokens_) return;
    configure_tiles(tokens);
    tokens_ = tokens;
  }

 private:
  std::int64_t tokens_ = 0;
};

/// totals [tokens][kPanels][16] += a chunk, whose first block is b, times tokens whose activations are at
/// equal distances.
template <class A>
void multiply_chunk_by_tiles(Tiles& tiles, const Chunk<A>& chunk, const PanelInput* inputs,
                             std::int64_t tokens, std::int64_t b, std::int64_t number,
                             float (*totals)[kPanels][kPanelRows]) {
  const std::int64_t stride = tokens > 1 ? inputs[1].codes - inputs[0].codes : 64;
  const std::byte* x = inputs[0].codes + b * chunk.block_units * 4;
  tiles.configure(tokens);
  if constexpr (A::kPlain) {  // totals stay in the tiles for the whole chunk
    constexpr int pitch = sizeof(*totals);
    _tile_loadd(0, totals[0][0], pitch);
    _tile_loadd(1, totals[0][1], pitch);
    if (tokens > 16) {
      _tile_loadd(2, totals[16][0], pitch);
      _tile_loadd(3, totals[16][1], pitch);
    }
    multiply_tiles(chunk, 0, chunk.blocks * chunk.block_units, x, stride, tokens);
    _tile_stored(0, totals[0][0], pitch);
    _tile_stored(1, totals[0][1], pitch);
    if (tokens > 16) {
      _tile_stored(2, totals[16][0], pitch);
      _tile_stored(3, totals[16][1], pitch);
    }
  } else {
    Rows parts[kPanels][kTileRows];
    for (int p = 0; p < kPanels; ++p)
      for (std::int64_t m = 0; m < tokens; ++m)
        parts[p][m] = A::kInput == InputScale::chunk ? rows(0) : load_rows(totals[m][p]);
    for (std::int64_t i = 0; i < chunk.blocks; ++i) {
      typename A::Sum sums[A::kLimbs][kPanels][kTileRows];
      for (int l = 0; l < A::kLimbs; ++l) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        multiply_tiles(chunk, i * chunk.block_units, chunk.block_units,
                       x + l * inputs[0].plane + i * chunk.block_units * 4, stride, tokens);
        _tile_stored(0, sums[l][0], 64);
        _tile_stored(1, sums[l][1], 64);
        if (tokens <= 16) continue;
        _tile_stored(2, sums[l][0] + 16, 64);
        _tile_stored(3, sums[l][1] + 16, 64);
      }
      for (int p = 0; p < kPanels; ++p) {
        const Rows scales = A::kScaled ? load_rows(chunk.scales[p][i]) : rows(1);
        const Rows zeros = A::kZeroPoints ? load_rows(chunk.zeros[p][i]) : rows(0);
        for (std::int64_t m = 0; m < tokens; ++m) {
          Rows sum;
          if constexpr (!A::kBytes)
            sum = sums[0][p][m];
          else if constexpr (A::kLimbs == 1)
            sum = to_float(sums[0][p][m] + A::start(inputs[m], b + i));
          else
            sum = to_float(shift_left<8>(sums[0][p][m]) + sums[1][p][m] + A::start(inputs[m], b + i));
          parts[p][m] = A::add_block(parts[p][m], sum, scales, zeros, inputs[m], b + i);
        }
      }
    }
    for (int p = 0; p < kPanels; ++p)
      for (std::int64_t m = 0; m < tokens; ++m)
        store_rows(totals[m][p],
                   A::kInput == InputScale::chunk
                       ? multiply_add(parts[p][m], rows(inputs[m].scales[number]), load_rows(totals[m][p]))
                       : parts[p][m]);
  }
}

#else

struct Tiles {};

#endif

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
