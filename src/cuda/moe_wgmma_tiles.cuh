#pragma once
/// \file
/// Which tiles a thread block multiplies (moe_wgmma.cuh).

#include <climits>

#include "cuda/moe_chain.h"
#include "cuda/moe_gemm_ring.cuh"

namespace gatefold::cuda {

/// A tile of an item; of no tokens: there are no more.
struct alignas(16) Tile {
  std::int16_t expert = 0, count = 0;
  std::int32_t first = 0, row = 0;  ///< position of results, and its row among tiles
  /// Of units; of columns (GemmArgs::parts); its place among FoundTiles; whether it is of the second multiply
  /// of a chain.
  std::uint32_t first_group : 24 = 0, part : 4 = 0, place : 3 = 0, second : 1 = 0;
};
static_assert(kMostParts <= 1 << 4);

/// The same kernel, whose blocks take tiles in turn.
template <class T>
struct InTurn : T {
  static constexpr bool counts = false;
};
/// Whether a launch may be two multiplies (moe_chain.h).
template <class T>
inline constexpr bool chains = T::counts&& T::few;
/// The multiply of a tile.
template <class T>
__device__ __forceinline__ const GemmArgs& multiply_of(const GemmChain& chain, const Tile& tile) {
  return chain.of[chains<T> ? tile.second : 0];
}

/// The row of a tile's first token among inputs.
template <class T>
__device__ __forceinline__ std::int32_t row_of_inputs(const GemmArgs& args, const Tile& tile) {
  return T::reads_codes && args.inputs.box_rows > 0 && args.items != nullptr ? tile.first : tile.row;
}

/// So many blocks share an item's tokens.
template <class T>
__device__ __forceinline__ int sharing(const GemmArgs& args) {
  return T::may_share ? args.sharing_blocks : 1;
}

__device__ __forceinline__ int item_count(const GemmArgs& args) {
  return args.items != nullptr ? *args.item_count : args.whole_items;
}

/// Tile i of all of so many items, or none. Bands of items are multiplied tile by tile, its parts one after
/// the other: a part's weights by all of them, then the next part's. Thread blocks that share an item's
/// tokens have neighbouring tiles, this one the tile of its rank, which may lie behind all weights.
template <class T>
__device__ __forceinline__ Tile tile_at(const GemmArgs& args, int i, int items) {
  const int blocks = sharing<T>(args), per_item = tiles_of_item(args.groups, T::groups, blocks) * args.parts;
  const bool cut = args.items != nullptr;
  const int near = i / per_item;  // of the same band
  // Read before it is known whether it is there, as loads that wait for each other are a kernel's start.
  CutItem item = cut ? args.items[min(near, args.most_items - 1)] : CutItem{};
  if (near >= items) return {};
  const int begin = near - (cut ? item.in_band : near % args.band_items),
            width = cut ? item.band_items : min(args.band_items, items - begin);
  const int rest = i - begin * per_item, at = begin + rest % width, piece = rest / width;
  // Without a division, which takes registers.
  const int tile = piece >> __popc(args.parts - 1), part = piece & (args.parts - 1);
  Tile found;
  found.first_group =
      static_cast<std::uint32_t>((tile * blocks + (T::may_share ? rank_in_cluster() : 0)) * T::groups);
  found.part = static_cast<std::uint32_t>(part);
  if (cut) {
    if (at != near) item = args.items[at];
    found.expert = item.expert;
    found.count = item.count;
    found.first = item.first;
    found.row = item.row;
  } else {
    found.first = found.row = at * args.tile_tokens;
    found.count = static_cast<std::int16_t>(min(args.tile_tokens, args.slots - found.row));
  }
  found.first += part * args.slots;
  return found;
}
/// Of both multiplies of a chain.
template <class T>
__device__ __forceinline__ Tile tile_at(const GemmChain& chain, int i, int items) {
  const int of_first = items * tiles_of_item(chain.of[0].groups, T::groups, 1);
  const bool second = chains<T> && chain.count == 2 && i >= of_first;
  Tile tile = tile_at<T>(chain.of[second], i - (second ? of_first : 0), items);
  tile.second = second;
  return tile;
}

/// The next tiles of a block in turn, which a warp's lanes look for together.
inline constexpr int kTilesAhead = 8;
using TilesAhead = Tile[kTilesAhead];

/// Looks for tiles i, i + 1, .. of this block. All lanes come here.
template <class T>
__device__ __forceinline__ void find_tiles(const GemmArgs& args, TilesAhead& ahead, int i) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
  if (lane < kTilesAhead)
    ahead[lane] = tile_at<T>(args, static_cast<int>(blockIdx.x + (i + lane) * gridDim.x) / sharing<T>(args),
                             item_count(args));
  __syncwarp();
}

/// The next tiles of a block in turn, or as they come to it, which a warp finds for all.
struct FoundTiles {
  static constexpr int kMost = 8;
  Tile tiles[kMost];
  std::uint64_t there[kMost], multiplied[kMost];
  std::uint64_t wanted;  ///< phase i: tile i + 1 is to be found

  __device__ void init(int i, int multiplying_warps) {
    if (i == 0) init_barrier(&wanted, 1);
    init_barrier(there + i, 1);
    init_barrier(multiplied + i, multiplying_warps);
  }
  /// Tile i of the block, or none. All lanes of a warp come here, for 0, 1, ..
  __device__ __forceinline__ Tile get(int i) const {
    wait_barrier(shared_address(there + i % kMost), i / kMost % 2);
    return tiles[i % kMost];
  }
  /// Now. All lanes come here.
  __device__ __forceinline__ bool is_wanted(int i) const {
    return i == 0 || same_in_warp(ends_within(0, shared_address(&wanted), (i - 1) % 2));
  }
};

/// A tile that all lanes of a warp have (same_in_warp).
__device__ __forceinline__ Tile same_in_warp(const Tile& tile) {
  alignas(16) int words[4];
  for (int i = 0; i < 4; ++i) words[i] = same_in_warp(reinterpret_cast<const int*>(&tile)[i]);
  return reinterpret_cast<const Tile&>(words);
}

/// Finds tiles for all, in turn, or, if there is a counter, when they are wanted. When other tiles need the
/// results of one, and these are there, says so to other blocks. By a warp.
template <class T>
__device__ void find_tiles_for_all(const GemmChain& chain, FoundTiles& tiles) {
  constexpr int kMost = FoundTiles::kMost;
  const int lane = threadIdx.x % 32, block = static_cast<int>(blockIdx.x),
            blocks = static_cast<int>(gridDim.x);
  // Blocks of a chain wait for each other's tiles. So none has a tile before it runs: there might be no
  // multiprocessor for it but those of blocks that wait.
  const bool in_turn = chain.next_tile == nullptr;
  const int items = item_count(chain.of[0]);
  for (int found = 0, done = 0, last = INT_MAX;;) {
    if (found <= last && found - done < kMost && (in_turn || tiles.is_wanted(found))) {
      int at = block + found * blocks;
      if (!in_turn) {
        if (lane == 0) at = atomicAdd(chain.next_tile, 1);
        at = same_in_warp(at);
      }
      Tile tile = tile_at<T>(chain, at, items);
      tile.place = static_cast<std::uint32_t>(found) % kMost;
      if (tile.count == 0) last = found;
      if (lane == 0) {
        tiles.tiles[found % kMost] = tile;
        arrive(tiles.there + found % kMost);
      }
      ++found;
      if (in_turn) continue;
    }
    if (done == last) return;
    if (done == found) continue;
    const std::uint32_t multiplied = shared_address(tiles.multiplied + done % kMost),
                        parity = done / kMost % 2;
    constexpr int some_ns = 100;  // then others may want the next tile
    if (in_turn) {
      wait_barrier(multiplied, parity);
    } else if (!same_in_warp(ends_within(some_ns, multiplied, parity))) {
      continue;
    }
    if (lane == 0 && chain.count == 2) {
      const Tile& tile = tiles.tiles[done % kMost];
      if (!tile.second) {
        __threadfence();
        atomicAdd(chain.finished + tile.row / 8, 1);
        if (T::of_tensors && chain.finished_of_all != nullptr) atomicAdd(chain.finished_of_all, 1);
      }
    }
    ++done;
  }
}

}  // namespace gatefold::cuda
