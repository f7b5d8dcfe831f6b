#pragma once
/// \file
/// The multiply over panels by f32 for many tokens: a part of a panel is decoded into the innermost cache
/// once, and multiplied by all of them. Sums are those of streams (panel.lanes.cpp), bit for bit. For
/// *.lanes.cpp files only.

#include <algorithm>

#include "cpu/panel_kernel.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

/// Blocks of one panel in f32.
struct Columns {
  std::int64_t first = 0, blocks = 0, block = 0;  // the first one, how many, and the columns of each
  alignas(64) float scales[kPanelChunk / kLeastPanelBlock][kPanelRows];
  alignas(64) float at[kPanelChunk][kPanelRows];
};

template <class K>
void decode_columns(const PanelShape& shape, Blocks& panel, Columns& columns) {
  using V = typename K::V;
  float(*to)[kPanelRows] = columns.at;
  for (std::int64_t b = 0; b < columns.blocks; ++b) {
    panel.enter(shape);
    const Codes zeros = panel.zeros<K>();
    for (std::int64_t i = 0; i < columns.block; i += V::kColumns, panel.next += V::kBytes)
      unrolled<V::kColumns>([&](auto u) __attribute__((always_inline)) {
        store_rows(*to++, K::template column<u>(zeros, panel.next));
      });
    if constexpr (K::kScaled) store_rows(columns.scales[b], block_scales<K::kScale>(panel.scales));
  }
}

/// parts += columns by M tokens.
template <class K, int M>
void multiply_columns(const Columns& columns, Ahead& ahead, const PanelInput* inputs,
                      float (*parts)[kPanelRows]) {
  constexpr int chains = K::chains(M);
  const float(*column)[kPanelRows] = columns.at;
  std::int64_t at = K::position(columns.first * columns.block);  // of the activations
  for (std::int64_t b = 0; b < columns.blocks; ++b) {
    Rows sums[M][chains];
    for (auto& sum : sums)
      for (Rows& chain : sum) chain = rows(0);
    for (std::int64_t i = 0; i < columns.block; i += K::kStepColumns, at += K::position(K::kStepColumns)) {
      ahead.fetch(K::kStepBytes);
      unrolled<K::kStepColumns>([&](auto u) __attribute__((always_inline)) {
        const Rows weights = load_rows(*column++);
        unrolled<M>([&](auto m) __attribute__((always_inline)) {
          add_product(sums[m][u % chains], weights, rows(load_at<float>(inputs[m].codes + at, u)));
        });
      });
    }
    const Rows scales = K::kScaled ? load_rows(columns.scales[b]) : rows(1);
    for (int m = 0; m < M; ++m) {
      const Rows sum = sums[m][0] + sums[m][1];
      store_rows(parts[m], K::add_block(load_rows(parts[m]), sum, scales, inputs[m], columns.first + b));
    }
  }
}

/// The same for any number of tokens, some at a time.
template <class K, int M = K::kStreamTokens>
void multiply_columns(const Columns& columns, Ahead& ahead, const PanelInput* inputs, std::int64_t tokens,
                      float (*parts)[kPanelRows]) {
  for (std::int64_t left = (tokens + M - 1) / M; left > 0; --left) {
    const std::int64_t m = (tokens + left - 1) / left;
    if constexpr (M > 1)
      if (m < M) return multiply_columns<K, M - 1>(columns, ahead, inputs, tokens, parts);
    multiply_columns<K, M>(columns, ahead, inputs, parts);
    inputs += M;
    parts += M;
    tokens -= M;
  }
}

/// One panel by any number of tokens up to kPanelTokens.
template <class K>
void multiply_by_columns(const PanelShape& shape, const std::byte* panel, Ahead ahead,
                         const PanelInput* inputs, std::int64_t tokens, float* out, std::int64_t stride) {
  alignas(64) float parts[kPanelTokens][kPanelRows];
  for (std::int64_t t = 0; t < tokens; ++t) store_rows(parts[t], K::first_total(inputs[t]));
  Blocks blocks(shape, panel);
  Columns columns;
  columns.block = shape.block;
  for (; columns.first < shape.blocks; columns.first += columns.blocks) {
    columns.blocks = std::min(kPanelChunk / shape.block, shape.blocks - columns.first);
    decode_columns<K>(shape, blocks, columns);
    multiply_columns<K>(columns, ahead, inputs, tokens, parts);
  }
  for (std::int64_t t = 0; t < tokens; ++t)
    write(shape, out + t * stride, K::result(shape, panel, inputs[t], load_rows(parts[t])));
}

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
