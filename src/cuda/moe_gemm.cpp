#include "cuda/moe_gemm.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/moe_chain.h"

namespace gatefold::cuda {

using Find = GemmKernel(SchemeId scheme, InputKind input, int tokens);
// One source file each, so that they are compiled side by side.
Find find_gemm_16bit, find_gemm_8bit, find_gemm_int4, find_gemm_fp4;
Find find_warpgroup_gemm_16bit, find_warpgroup_gemm_8bit, find_warpgroup_gemm_int4, find_warpgroup_gemm_uint4,
    find_warpgroup_gemm_fp4, find_warpgroup_gemm_bytes;

namespace {

template <Find*... kAll>
GemmKernel first_found(SchemeId scheme, InputKind input, int tokens) {
  GemmKernel found;
  static_cast<void>(((found = kAll(scheme, input, tokens), found.function != nullptr) || ...));
  return found;
}

/// Pairs of blocks read an item's tokens once from the L2 cache, if hardly any of them lack a second tile.
/// One matrix takes longer so.
int sharing_blocks(const GemmKernel& kernel, const GemmArgs& args, int multiprocessors) {
  const int tiles = tiles_of_item(args.groups, kernel.tile_groups, 1);
  const bool even = tiles % 2 == 0 || tiles >= 32;
  return kernel.may_share && args.items != nullptr && args.inputs.box_rows == 0 && multiprocessors > 1 && even
             ? 2
             : 1;
}

/// With what the launch sets.
GemmArgs complete(const GemmKernel& kernel, GemmArgs args, int multiprocessors) {
  args.tile_tokens = kernel.tokens;
  args.whole_items = (args.slots + kernel.tokens - 1) / kernel.tokens;
  args.band_items = kernel.band_items();
  args.all_steps = args.steps * args.parts;
  args.part_steps = args.parts > 1 ? args.steps : 0;
  args.sharing_blocks = sharing_blocks(kernel, args, multiprocessors);
  return args;
}

/// Warps that multiply, and so round.
int multiplying_warps(const GemmKernel& kernel) {
  constexpr int that_copy = 4;
  return kernel.threads / 32 - that_copy;
}

/// As few warps for a row as have all of it in registers, and as few rows in a piece as leave not many more
/// pieces than there are thread blocks, where experts are equally likely.
void set_rounding(GemmChain& chain, const GemmKernel& kernel, const InputArgs& rounding,
                  int multiprocessors) {
  chain.rounding = rounding;
  const int all_warps = multiplying_warps(kernel);
  int& warps = chain.rounding_warps;
  while (warps < all_warps && warps * columns_of_rounding_warp(rounding.activation) < rounding.stride)
    warps *= 2;
  const GemmArgs& args = chain.of[0];
  const int items = std::min(args.experts, args.slots), mean = (args.slots + items - 1) / items,
            most_tokens = std::min(2 * mean, args.tile_tokens), most_pieces = multiprocessors * 3 / 2;
  do chain.rounding_rows += all_warps / warps;
  while (chain.rounding_rows < most_tokens && chain.pieces_of(most_tokens) * items > most_pieces);
}

}  // namespace

GemmKernel find_gemm(SchemeId scheme, InputKind input, int tokens) {
  return first_found<find_gemm_16bit, find_gemm_8bit, find_gemm_int4, find_gemm_fp4>(scheme, input, tokens);
}

GemmKernel find_warpgroup_gemm(SchemeId scheme, InputKind input, int tokens) {
  if (are_bytes(input)) return find_warpgroup_gemm_bytes(scheme, input, tokens);
  return first_found<find_warpgroup_gemm_16bit, find_warpgroup_gemm_8bit, find_warpgroup_gemm_int4,
                     find_warpgroup_gemm_uint4, find_warpgroup_gemm_fp4>(scheme, input, tokens);
}

cudaError_t prepare_gemm(const GemmKernel& kernel) {
  for (const void* function : {kernel.function, kernel.chain})
    if (function != nullptr)
      if (const cudaError_t error =
              cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kernel.shared_bytes + kernel.teams * kernel.team_bytes);
          error != cudaSuccess)
        return error;
  return cudaSuccess;
}

cudaError_t launch_gemm(const GemmKernel& kernel, const GemmArgs& args, std::int32_t* next_tile,
                        int multiprocessors, cudaStream_t stream) {
  GemmArgs own = complete(kernel, args, multiprocessors);
  GemmChain chain{.of = {own, {}}, .next_tile = next_tile};
  if (const GemmInputs& in = own.inputs; in.box_rows > 0)
    if (const cudaError_t error = make_row_boxes(in.rows, in.row_bytes, own.slots, in.box_rows, &chain.boxes);
        error != cudaSuccess)
      return error;
  void* parameters[] = {kernel.tiled ? static_cast<void*>(&chain) : &own};
  return launch_dependent(
      kernel.function,
      {.blocks = static_cast<unsigned>(multiprocessors / own.sharing_blocks * own.sharing_blocks),
       .threads = static_cast<unsigned>(kernel.teams * kernel.threads),
       .stream = stream,
       .shared_bytes = static_cast<std::size_t>(kernel.shared_bytes + kernel.teams * kernel.team_bytes),
       .cluster = static_cast<unsigned>(own.sharing_blocks)},
      parameters);
}

bool should_chain(const GemmKernel& kernel, const InputArgs* rounding) {
  if (kernel.chain == nullptr) return false;
  if (rounding == nullptr) return true;
  // A row's largest number is found by what rounds the row, that of all rows by ends of tiles, if they do.
  // Static scales need none.
  if (kernel.byte_order == 0 || !(rounds_in_chain(rounding->activation) ||
                                  rounding->static_scales != nullptr || rounding->amax_is_known))
    return false;
  if (kernel.chain == kernel.function) return true;
  // To be as fast as a launch, a piece should have more than one row.
  return 2 * rounding->stride <= multiplying_warps(kernel) * columns_of_rounding_warp(rounding->activation);
}

cudaError_t launch_chain(const GemmKernel& kernel, const GemmArgs& first, const GemmArgs& second,
                         const InputArgs* rounding, std::int32_t* progress, int multiprocessors,
                         cudaStream_t stream) {
  GemmChain chain{.of = {complete(kernel, first, multiprocessors), complete(kernel, second, multiprocessors)},
                  .count = 2,
                  .next_tile = progress,
                  .next_piece = progress + 1,
                  .finished = progress + kProgressOfAll};
  if (rounding != nullptr) {
    set_rounding(chain, kernel, *rounding, multiprocessors);
    if (rounding->amax_is_known) chain.finished_of_all = progress + 2;
  }
  void* parameters[] = {&chain};
  return launch_dependent(kernel.chain,
                          {.blocks = static_cast<unsigned>(multiprocessors),
                           .threads = static_cast<unsigned>(kernel.threads),
                           .stream = stream,
                           .shared_bytes = static_cast<std::size_t>(kernel.shared_bytes + kernel.team_bytes)},
                          parameters);
}

}  // namespace gatefold::cuda
