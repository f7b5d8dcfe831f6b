#pragma once
/// \file
/// The multiply over panels by AMX: a unit of a panel is a row of a tile of weights, a token's activations
/// are a row of the other. Chunks of two panels are decoded into a cache and multiplied by all tokens, 32 at
/// a time. For *.lanes.cpp files only.

#include "cpu/panel_kernel.h"

#if defined(__AMX_TILE__)

namespace gatefold::GATEFOLD_ISA {
namespace {

inline constexpr int kPanels = 2;
inline constexpr std::int64_t kTileTokens = 32;     // of two tiles
inline constexpr std::int64_t kTileColumns = 2048;  // of a chunk, where several times 32 tokens share it

/// A chunk of kPanels panels, decoded.
template <class A>
struct Chunk {
  static constexpr std::int64_t kBlocks = kTileColumns / kLimbColumns;
  static constexpr std::int64_t kCodes = kTileColumns / A::kColumns;
  const std::byte* units[kPanels];  // of 64 bytes
  std::int64_t blocks = 0, block_units = 0;
  alignas(64) float scales[kPanels][kBlocks][kPanelRows];
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
    const Codes zeros = panel.zeros<K>();
    const std::byte* next = panel.next;
    for (const std::byte* end = next + shape.value_bytes; next < end; next += V::kBytes) {
      Codes units[K::kUnits];
      K::decode(values, zeros, next, units);
      for (const auto& unit : units) store_codes(*codes++, unit);
    }
    panel.next = next;
    if constexpr (K::kScaled) store_rows(chunk.scales[p][b], block_scales<K::kScale>(panel.scales));
  }
}

/// What comes next, fetched into the second cache while a chunk is multiplied: a little for every unit, as a
/// burst would wait for itself.
struct TileAhead {
  const std::byte* next = nullptr;
  std::int64_t apart = 0;  // of panels
  std::int64_t step = 0;   // bytes of each per unit

  void fetch(std::int64_t units) {
    for (const std::byte* end = next + units * step; next < end; next += 64)
      for (int p = 0; p < kPanels; ++p) __builtin_prefetch(next + p * apart, 0, 2);
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

/// Tiles 0 to 3: sums of 16 tokens and 16 rows, [2 of tokens][2 panels]. 4, 5: weights. 6, 7: activations.
inline void configure_tiles(std::int64_t tokens) {
  TileConfig config;
  const std::int64_t low = tokens < 16 ? tokens : 16, high = tokens > 16 ? tokens - 16 : 1;
  const std::int64_t rows[8] = {low, low, high, high, 16, 16, low, high};
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = static_cast<std::uint8_t>(rows[tile]);
  load_tile_config(config);
}

/// Tiles 0 to 3 += units of weights, 16 a step, by up to 16 tokens, or by up to 32 (kTwo).
template <class A, bool kTwo>
void multiply_tiles(const Chunk<A>& chunk, std::int64_t first, std::int64_t units, const std::byte* x,
                    std::int64_t stride, TileAhead& ahead) {
  const auto pitch = static_cast<std::size_t>(stride);
  const std::byte *w0 = chunk.units[0] + first * 64, *w1 = chunk.units[1] + first * 64;
  for (std::int64_t u = 0; u < units; u += 16, x += A::position(16 * A::kColumns), w0 += 1024, w1 += 1024) {
    // Two steps ahead, into the innermost cache: its own prefetchers do not see the order of these loads.
    unrolled<16>([&](auto i) __attribute__((always_inline)) {
      __builtin_prefetch(w0 + 2048 + i * 64);
      __builtin_prefetch(w1 + 2048 + i * 64);
    });
    ahead.fetch(16);
    _tile_loadd(4, w0, 64);
    _tile_loadd(6, x, pitch);
    if constexpr (kTwo) _tile_loadd(7, x + 16 * stride, pitch);
    if constexpr (A::kBytes) {
      _tile_dpbsud(0, 6, 4);
      if constexpr (kTwo) _tile_dpbsud(2, 7, 4);
      _tile_loadd(5, w1, 64);
      _tile_dpbsud(1, 6, 5);
      if constexpr (kTwo) _tile_dpbsud(3, 7, 5);
    } else {
      _tile_dpbf16ps(0, 6, 4);
      if constexpr (kTwo) _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, w1, 64);
      _tile_dpbf16ps(1, 6, 5);
      if constexpr (kTwo) _tile_dpbf16ps(3, 7, 5);
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

/// Sums of up to 32 tokens, or totals of all.
template <class T>
using TileSums = T[kTileTokens];
using Totals = float[kPanels][kPanelRows];

/// totals += a chunk times activations. Sums stay in the tiles.
template <class A, bool kTwo>
void multiply_plain(const Chunk<A>& chunk, const std::byte* x, std::int64_t stride, TileAhead& ahead,
                    Totals* totals) {
  constexpr int pitch = sizeof(*totals);
  _tile_loadd(0, totals[0][0], pitch);
  _tile_loadd(1, totals[0][1], pitch);
  if constexpr (kTwo) {
    _tile_loadd(2, totals[16][0], pitch);
    _tile_loadd(3, totals[16][1], pitch);
  }
  multiply_tiles<A, kTwo>(chunk, 0, chunk.blocks * chunk.block_units, x, stride, ahead);
  _tile_stored(0, totals[0][0], pitch);
  _tile_stored(1, totals[0][1], pitch);
  if constexpr (kTwo) {
    _tile_stored(2, totals[16][0], pitch);
    _tile_stored(3, totals[16][1], pitch);
  }
}

/// sums = block i of a chunk times activations.
template <class A, bool kTwo>
void multiply_block(const Chunk<A>& chunk, std::int64_t i, const std::byte* x, std::int64_t stride,
                    TileAhead& ahead, TileSums<typename A::Sum> (&sums)[kPanels]) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  multiply_tiles<A, kTwo>(chunk, i * chunk.block_units, chunk.block_units, x, stride, ahead);
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if constexpr (kTwo) {
    _tile_stored(2, sums[0] + 16, 64);
    _tile_stored(3, sums[1] + 16, 64);
  }
}

/// totals += a chunk, whose first block is b, times activations. Sums of every block are scaled.
template <class A, bool kTwo>
void multiply_scaled(const Chunk<A>& chunk, const std::byte* x, std::int64_t stride, const PanelInput* inputs,
                     std::int64_t tokens, std::int64_t b, TileAhead& ahead, Totals* totals) {
  const std::int64_t block = chunk.block_units * A::kColumns, chunk_blocks = kPanelChunk / block;
  Rows parts[kPanels][kTileTokens];
  for (int p = 0; p < kPanels; ++p)
    for (std::int64_t m = 0; m < tokens; ++m)
      parts[p][m] = A::kInput == InputScale::chunk ? rows(0) : load_rows(totals[m][p]);
  for (std::int64_t i = 0; i < chunk.blocks; ++i) {
    TileSums<typename A::Sum> sums[A::kLimbs][kPanels];
    for (int l = 0; l < A::kLimbs; ++l)
      multiply_block<A, kTwo>(chunk, i, x + l * kLimbColumns + A::position(i * block), stride, ahead,
                              sums[l]);
    for (int p = 0; p < kPanels; ++p) {
      const Rows scales = A::kScaled ? load_rows(chunk.scales[p][i]) : rows(1);
      for (std::int64_t m = 0; m < tokens; ++m) {
        Rows sum;
        if constexpr (!A::kBytes)
          sum = sums[0][p][m];
        else if constexpr (A::kLimbs == 1)
          sum = to_float(sums[0][p][m] + A::start(inputs[m], b + i));
        else
          sum = to_float(shift_left<8>(sums[0][p][m]) + sums[1][p][m] + A::start(inputs[m], b + i));
        parts[p][m] = A::add_block(parts[p][m], sum, scales, inputs[m], b + i);
      }
    }
    if constexpr (A::kInput == InputScale::chunk) {
      if ((i + 1) % chunk_blocks != 0 && i + 1 < chunk.blocks) continue;
      for (int p = 0; p < kPanels; ++p)
        for (std::int64_t m = 0; m < tokens; ++m) {
          store_rows(totals[m][p], multiply_add(parts[p][m], rows(inputs[m].scales[(b + i) / chunk_blocks]),
                                                load_rows(totals[m][p])));
          parts[p][m] = rows(0);
        }
    }
  }
  if constexpr (A::kInput != InputScale::chunk)
    for (int p = 0; p < kPanels; ++p)
      for (std::int64_t m = 0; m < tokens; ++m) store_rows(totals[m][p], parts[p][m]);
}

/// The same for up to 32 tokens, whose activations are at equal distances.
template <class A, bool kTwo>
void multiply_chunk(const Chunk<A>& chunk, const PanelInput* inputs, std::int64_t tokens, std::int64_t b,
                    TileAhead& ahead, Totals* totals) {
  const std::int64_t stride = tokens > 1 ? inputs[1].codes - inputs[0].codes : 64;
  const std::byte* x = inputs[0].codes + A::position(b * chunk.block_units * A::kColumns);
  if constexpr (A::kPlain)
    multiply_plain<A, kTwo>(chunk, x, stride, ahead, totals);
  else
    multiply_scaled<A, kTwo>(chunk, x, stride, inputs, tokens, b, ahead, totals);
}

/// kPanels panels by any number of tokens up to kPanelTokens.
template <class K>
void by_tiles(Tiles& tiles, const PanelShape& shape, const std::byte* first, std::int64_t apart,
              const PanelInput* inputs, std::int64_t tokens, float* out, std::int64_t stride,
              std::int64_t out_apart) {
  using A = typename K::A;
  alignas(64) Totals totals[kPanelTokens];
  for (std::int64_t t = 0; t < tokens; ++t)
    for (float* total : totals[t]) store_total(total, K::first_total(inputs[t]));
  Blocks at[kPanels];
  for (int p = 0; p < kPanels; ++p) at[p] = Blocks(shape, first + p * apart);
  Chunk<A> chunk;
  chunk.block_units = shape.block / K::kColumns;
  const std::int64_t rounds = (tokens + kTileTokens - 1) / kTileTokens;
  // Few tokens wait for memory: they want a chunk soon.
  const std::int64_t chunk_blocks = (rounds > 1 ? kTileColumns : kPanelChunk) / shape.block;
  for (std::int64_t b = 0; b < shape.blocks; b += chunk_blocks) {
    chunk.blocks = std::min(chunk_blocks, shape.blocks - b);
    const std::byte* begin = at[0].next;
    for (int p = 0; p < kPanels; ++p) {
      if constexpr (K::kDecoded) {
        chunk.units[p] = at[p].next;
        at[p].next += static_cast<std::size_t>(chunk.blocks) * shape.value_bytes;
      } else {
        chunk.units[p] = chunk.codes[p][0];
        decode_chunk<K>(shape, at[p], p, chunk);
      }
    }
    const bool last = b + chunk_blocks >= shape.blocks;
    if (last && !shape.write_around)
      for (std::int64_t t = 0; t < tokens; ++t)
        for (int p = 0; p < kPanels; ++p) __builtin_prefetch(out + t * stride + p * out_apart, 1);
    // The next chunk, or that of the next panels, is fetched while this one is multiplied.
    const std::int64_t units = chunk.blocks * chunk.block_units * K::kLimbs;
    TileAhead ahead{at[0].next + (last ? (kPanels - 1) * apart : 0), at[kPanels - 1].next - at[0].next,
                    (at[0].next - begin + rounds * units - 1) / (rounds * units)};
    std::int64_t token = 0;
    for (std::int64_t left = rounds; left > 0; --left) {
      const std::int64_t m = (tokens - token + left - 1) / left;
      tiles.configure(m);
      if (m > 16)
        multiply_chunk<A, true>(chunk, inputs + token, m, b, ahead, totals + token);
      else
        multiply_chunk<A, false>(chunk, inputs + token, m, b, ahead, totals + token);
      token += m;
    }
  }
  for (std::int64_t t = 0; t < tokens; ++t)
    for (int p = 0; p < kPanels; ++p) {
      const Rows y = K::result(shape, first + p * apart, inputs[t], load_total<A>(totals[t][p]));
      write(shape, out + t * stride + p * out_apart, y);
    }
}

/// Panels by any number of tokens up to kPanelTokens.
template <class K>
void by_tiles(const PanelShape& shape, const std::byte* first, std::int64_t apart, int panels,
              const PanelInput* inputs, std::int64_t tokens, float* out, std::int64_t stride,
              std::int64_t out_apart) {
  Tiles tiles;
  for (int panel = 0; panel < panels; panel += kPanels) {
    const bool alone = panels - panel < kPanels;  // then it is computed twice
    by_tiles<K>(tiles, shape, first + panel * apart, alone ? 0 : apart, inputs, tokens,
                out + panel * out_apart, stride, alone ? 0 : out_apart);
  }
  if (shape.write_around) order_streams();
}

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA

#endif
