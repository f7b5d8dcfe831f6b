#pragma once
/// \file
/// The matrix multiply of an MoE layer over packed weights, for any number of tokens: each expert's rows by
/// the tokens that chose it, with what follows it (gate and up: bias and activation; down: bias).

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/packed.h"
#include "gatefold/moe_spec.h"
#include "gatefold/quantize.h"

namespace gatefold::cuda {

/// Tokens of one expert that are multiplied together: positions [first, first + count) of the slots in the
/// order of experts.
struct Item {
  std::int16_t expert, count;
  std::int32_t first;
};
/// An item that a kernel has cut, in memory.
struct alignas(16) CutItem : Item {
  std::int32_t row;  ///< of tiles (GemmInputs::tile_rows): of the first position
  /// Which one it is of so many neighbours of its expert, whose multiplies read the same weights at about the
  /// same time.
  std::int16_t in_band, band_items;
};
/// The most tokens of a band, of 16 bits and of bytes: they, and weights that some thread blocks read, have
/// room in the L2 cache.
inline constexpr int kMostBandTokens = 1920, kMostBandTokensOfBytes = 3072;
/// The items of experts with most tokens come first; those of more experts than these keep their order.
inline constexpr int kMostSortedExperts = 1024;

/// Where number k of a row lies among tiles [k / 64][rows][64]: as wgmma reads them (wgmma.cuh), so that 64
/// columns of neighbouring rows are one piece of memory. k: in the order of the multiply
/// (PackedFormat::position).
GATEFOLD_HD constexpr std::int64_t tile_position(std::int64_t rows, std::int64_t row, int k) {
  return (k / 64 * rows + row) * 64 + (k % 64 / 8 ^ static_cast<int>(row % 8)) * 8 + k % 8;
}
/// The most rows of tiles that so many slots take: those of an expert begin at a multiple of 8.
constexpr std::size_t tile_rows(std::size_t slots, std::size_t experts) {
  return (slots + 7 * (experts < slots ? experts : slots) + 7) / 8 * 8;
}

/// 16-bit rows: codes of quantized activations are held as their value in bf16 or f16, which is exact. Or
/// codes themselves, a byte each, in tiles [k / 128][rows][128] whose rows are swizzled alike.
struct GemmInputs {
  const std::uint16_t* rows = nullptr;   ///< [.., stride], 16-byte aligned; columns that K lacks are 0
  std::int64_t stride = 0;               ///< of rows; a multiple of kRecordColumns
  const float* row_scales = nullptr;     ///< [rows], or nullptr
  const float* record_scales = nullptr;  ///< [rows, stride / kRecordColumns], or nullptr
  std::int32_t slots_of_row = 1;         ///< slot s reads row s / slots_of_row
  /// Rows are in the order of experts, whose first ones are multiples of 8, in tiles of so many rows
  /// (tile_position); row_scales belong to them, record_scales are [stride / kRecordColumns, tile_rows].
  /// 0: not.
  std::int32_t tile_rows = 0;
  /// Codes, a byte each, where they lie, [slots, row_bytes] (GemmKernel::reads_codes): they are copied in
  /// boxes of so many rows, and row_scales are of slots; record_scales as above. 0: not.
  std::int32_t box_rows = 0;
  std::int64_t row_bytes = 0;
};

enum class GemmKind : std::uint8_t { gate_up, down };

inline constexpr int kMostParts = 16;  ///< of columns: GemmArgs

/// So few slots and experts that every thread block sorts them itself, and no kernel has to: 512, and shared
/// ones.
inline constexpr int kFewSlots = 256, kFewExperts = 520;

/// So few tokens that every thread block of gate and up routes them as well, a warp each.
inline constexpr int kFewTokens = 8;

/// Logits of at most kFewTokens tokens. Their experts and weights (routing.h) are also written to memory, by
/// one block; the next kernel may read the experts before it waits.
struct GemmRouting {
  const float* logits = nullptr;           ///< [tokens, experts], or nullptr: ids are given
  const float* correction_bias = nullptr;  ///< [experts], or nullptr
  std::int32_t* topk_ids = nullptr;        ///< [tokens, top_k]
  float* topk_weights = nullptr;           ///< [tokens, top_k]
  std::int32_t top_k = 0;
  Routing rules;
};

struct GemmArgs {
  const std::byte* weights = nullptr;            ///< of expert 0 (packed.h)
  std::int64_t expert_stride = 0;                ///< bytes
  std::int32_t groups = 0, steps = 0, rows = 0;  ///< of units; of a group; of one matrix
  std::int32_t experts = 1, slots = 0;
  GemmInputs inputs;
  /// Routing, or the experts of at most kFewSlots slots, or else the items and the slots in the order of
  /// experts. None of them: expert 0, or each of the parts, takes all slots.
  GemmRouting routing;
  const std::int32_t* ids = nullptr;
  bool one_token = false;  ///< the slots are those of one
  const CutItem* items = nullptr;
  std::int32_t most_items = 0;  ///< that there is room for
  const std::int32_t *item_count = nullptr, *sorted_slots = nullptr;
  /// Whether these (logits as well) were written by a kernel before the previous one, so that weights may be
  /// read early.
  bool routed_early = false;
  GemmKind kind = GemmKind::gate_up;
  Activation activation;                            ///< gate_up
  const float *bias = nullptr, *up_bias = nullptr;  ///< [experts, rows], or nullptr
  void* out = nullptr;                              ///< [slots, out_stride]
  std::int64_t out_stride = 0;
  std::int32_t out_tile_rows = 0;  ///< of outputs of gate_up that down reads: GemmInputs::tile_rows
  /// Of codes that gate_up leaves: GemmInputs::record_scales (GemmKernel::rounds), or, by static scales,
  /// row_scales.
  float* out_scales = nullptr;
  /// [experts], if gate_up is to leave codes by them (GemmKernel::rounds_static), or nullptr.
  const TensorScale* static_scales = nullptr;
  /// 0 before the launch: becomes the largest finite magnitude that gate_up leaves, if
  /// GemmKernel::finds_amax; or nullptr.
  float* out_amax = nullptr;
  DType out_dtype = DType::f32;  ///< unless outputs are codes
  std::int32_t tile_tokens = 0;  ///< the most of an item; set by the launch
  std::int32_t band_items = 1;   ///< the most of a band of whole items; set by the launch
  std::int32_t whole_items = 0;  ///< of all slots, by one expert; set by the launch
  /// A power of two of parts, at most kMostParts, of `steps` each are multiplied by themselves, where there
  /// would be too little to do for all warps, or too little to choose from. Sums of part p lie p * slots rows
  /// after those of part 0. Without items, warps take them for experts: expert_stride is 0.
  std::int32_t parts = 1;
  std::int32_t sharing_blocks = 1;  ///< of a cluster, 1 or 2, that share an item's tokens; set by the launch
  /// Set by the launch: steps of a group in memory, and from one part to the next (0: there is one).
  std::int32_t all_steps = 0, part_steps = 0;
};

/// What a multiply's inputs are: 16-bit numbers, or codes that are multiplied as such. e4m3_fast: all
/// products are added to the same sums.
enum class InputKind : std::uint8_t {
  bf16,
  f16,
  bf16_record_scales,
  e4m3,
  e4m3_fast,
  e4m3_record_scales,
  int8
};

constexpr bool are_bytes(InputKind kind) {
  return kind >= InputKind::e4m3;
}
constexpr bool with_record_scales(InputKind kind) {
  return kind == InputKind::bf16_record_scales || kind == InputKind::e4m3_record_scales;
}
/// int32 holds the sums of so many products of int8.
inline constexpr int kMostInt8Columns = 1 << 16;

/// Rows as they are, or tiles (GemmInputs::tile_rows): 16-bit numbers in the order of PackedFormat::position,
/// or codes, a byte each, in the order of column_of_byte.
struct InputOrder {
  bool tiled = false, folded = false;
  bool of_rows = false;     ///< codes in the order of records of 8 bits, which multiply them
  std::uint32_t bytes = 0;  ///< byte_order, of codes
  bool f16 = false;         ///< what codes of e4m3 become, where they become 16-bit numbers
  float scale = 1;          ///< of 16-bit numbers: they are larger by that, a power of two (input_scale)
  bool in_order = false;    ///< of weights whose columns keep their order (PackedFormat)
};

inline constexpr int kTileTokens = 8;
inline constexpr int kTokenStepOfTile = 32;  ///< of most kernels by warpgroups (moe_wgmma.cuh)

/// Numbers of tokens for which a kernel by warpgroups has loops, in ascending order; then 0.
struct TokenLoops {
  std::int16_t tokens[11] = {};  ///< the last one 0

  /// That of an item: the least that will do.
  constexpr int of(int count) const {
    int i = 0;
    while (tokens[i] < count && tokens[i + 1] != 0) ++i;
    return tokens[i];
  }
  /// Without those beyond `most`, which has to be one of them.
  constexpr TokenLoops up_to(int most) const {
    TokenLoops some;
    for (int i = 0; tokens[i] != 0 && tokens[i] <= most; ++i) some.tokens[i] = tokens[i];
    return some;
  }
};

struct GemmKernel {
  const void* function = nullptr;     ///< nullptr: there is none
  int threads = 0, shared_bytes = 0;  ///< of a team; of a block, beside its teams' bytes
  int teams = 1, team_bytes = 0;      ///< of a block
  int tokens = 0;                     ///< the most of an item; less may be asked of those by warpgroups
  int token_step = kTileTokens;       ///< experts' tokens are best cut into items of multiples of so many
  TokenLoops loops;                   ///< of kernels by warpgroups
  int step_bytes = 0;
  int tile_groups = 1;     ///< groups of units that a block multiplies together
  bool may_share = false;  ///< blocks may be pairs that share the tokens of an item
  int team_groups = 1;     ///< groups that keep a team's warps busy, by items of all their tokens
  /// Inputs, and what gate and up leave for down, are tiles; other outputs belong to positions, not to slots.
  bool tiled = false;
  bool rounds = false;           ///< gate and up leave codes with scales of records, not sums
  bool rounds_static = false;    ///< gate and up leave codes by GemmArgs::static_scales, if there are any
  bool narrow_rows = false;      ///< gate and up leave bf16, not f32, where that is then rounded
  bool finds_amax = false;       ///< GemmArgs::out_amax
  bool reads_codes = false;      ///< GemmInputs::box_rows
  bool counts = false;           ///< launches of one multiply have a counter, by which blocks take tiles
  const void* chain = nullptr;   ///< for two multiplies in one launch (moe_chain.h), or nullptr
  std::uint32_t byte_order = 0;  ///< InputOrder; 0: inputs are 16-bit numbers
  float input_scale = 1;         ///< of these

  /// The most of a band.
  int band_items() const {
    const int tokens_of_band = byte_order != 0 ? kMostBandTokensOfBytes : kMostBandTokens;
    return tokens < tokens_of_band ? tokens_of_band / tokens : 1;
  }
  /// In which its inputs lie.
  InputOrder order(SchemeId id) const {
    const PackedFormat p = packed_format(gatefold::scheme(id));
    return {tiled, p.folded, p.value.bits == 8, byte_order, p.for_bytes, input_scale};
  }
};
/// `tokens`: that most items have at most, a hint.
GemmKernel find_gemm(SchemeId scheme, InputKind input, int tokens);

/// Tokens up to which an item leaves room for four warpgroups that multiply (moe_wgmma.cuh).
inline constexpr int kFewTokensOfTile = 80;
/// The same of bytes (moe_wgmma_bytes.cuh), or beside scales of blocks; and beside sums of records.
inline constexpr int kFewTokensOfBytes = 64, kFewTokensWithParts = 48;
/// The most of an item by two units of a warp that keep sums of records by themselves (moe_wgmma_bytes.cuh).
inline constexpr int kTokensOfTwoUnits = 80;
/// The most of an item, by most kernels and by any.
inline constexpr int kManyTokensOfTile = 160, kMostTokensOfTile = 256;
/// The kernel for many tokens an expert (moe_wgmma.cuh), where there is one; `tokens` as above.
GemmKernel find_warpgroup_gemm(SchemeId scheme, InputKind input, int tokens);

/// So many tiles, or as many as `sharing` blocks take together, have all groups.
GATEFOLD_HD constexpr int tiles_of_item(int groups, int tile_groups, int sharing) {
  return (groups + tile_groups * sharing - 1) / (tile_groups * sharing);
}

/// Once for each device, before the first launch.
cudaError_t prepare_gemm(const GemmKernel& kernel);
/// next_tile: 0, the counter of a kernel that counts; or nullptr, and blocks take tiles in turn.
cudaError_t launch_gemm(const GemmKernel& kernel, const GemmArgs& args, std::int32_t* next_tile,
                        int multiprocessors, cudaStream_t stream);

}  // namespace gatefold::cuda
