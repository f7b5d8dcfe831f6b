#pragma once
/// \file
/// The buffers of a layer's kernels in its workspace.

#include <algorithm>

#include "cuda/input_buffers.h"
#include "cuda/moe_chain.h"
#include "cuda/routing.h"
#include "cuda/weights.h"

namespace gatefold::cuda {

/// The buffers of one feed-forward network over `rows` rows: routed slots, or all tokens.
struct FfnBuffers {
  SchemeId scheme = SchemeId::bf16;
  std::int64_t intermediate = 0;
  InputBuffers in, mid;
  Buffer<float> mid_sums;  // [rows, I], or bf16, if the intermediate is quantized by a kernel of its own
  Buffer<float> out;       // [rows, H], or bf16, of which two parts have as much room

  FfnBuffers() = default;
  FfnBuffers(SchemeId id, const MoeSpec& spec, const PlanOptions& options, std::int64_t width,
             std::size_t in_rows, std::size_t rows, std::size_t tiles, WorkspaceLayout& layout)
      : scheme(id), intermediate(width) {
    const Operand activation = effective_activation(id, spec, options);
    in = InputBuffers("inputs", activation, in_rows, tiles, spec.hidden, layout);
    mid = InputBuffers("intermediate", activation, rows, tiles, width, layout);
    mid_sums = {layout.add<float>("unrounded_mid",
                                  activation.quantized() ? rows * static_cast<std::size_t>(width) : 0)};
    out = {layout.add<float>("outputs", rows * static_cast<std::size_t>(spec.hidden))};
  }
};

/// What is multiplied: a shared expert may be one more routed one, which all tokens choose. (Where rows have
/// one scale in common, or static ones, it has its own; and it takes its inputs as they are.)
inline MoeSpec joined(const MoeSpec& spec, const PlanOptions& options) {
  MoeSpec all = spec;
  if (!shared_is_alike(spec) || spec.bias || spec.experts >= kFewExperts || spec.top_k >= kMostTopK ||
      spec.ordered_inputs || effective_activation(spec.scheme, spec, options).may_be_static())
    return all;
  ++all.experts;
  ++all.top_k;
  all.shared = {};
  return all;
}

struct LayerBuffers {
  MoeSpec spec;  ///< joined
  Buffer<std::int32_t> topk_ids, expert_offsets, slot_position, sorted_slots, route_scratch;
  Buffer<float> topk_weights, logits;
  Buffer<std::int32_t> joined_ids;  ///< of JoinArgs
  Buffer<float> joined_weights;
  Buffer<std::uint32_t> ordered_inputs;  ///< of OrderArgs
  Buffer<CutItem> items;
  std::int32_t most_items = 0;
  Buffer<std::int32_t> item_count, expert_rows;
  Buffer<std::int32_t> progress;  ///< of launch_chain; or counters, and a largest number, of two launches
  std::int32_t progress_size = 0;
  FfnBuffers routed, shared;
  bool may_be_static = false;  // static activation scales: then rows of inputs may be those of slots

  LayerBuffers(const MoeSpec& given, const PlanOptions& options, WorkspaceLayout& layout)
      : spec(joined(given, options)) {
    const auto tokens = static_cast<std::size_t>(options.max_tokens),
               top_k = static_cast<std::size_t>(spec.top_k), experts = static_cast<std::size_t>(spec.experts),
               slots = tokens * top_k, chosen = tokens * static_cast<std::size_t>(given.top_k);
    const Operand activation = effective_activation(spec.scheme, spec, options);
    may_be_static = activation.may_be_static();
    topk_ids = {layout.add<std::int32_t>("topk_ids", chosen)};
    topk_weights = {layout.add<float>("topk_weights", chosen)};
    joined_ids = {layout.add<std::int32_t>("joined_ids", slots == chosen ? 0 : slots)};
    joined_weights = {layout.add<float>("joined_weights", slots == chosen ? 0 : slots)};
    ordered_inputs = {layout.add<std::uint32_t>(
        "ordered_inputs", spec.ordered_inputs ? slots * static_cast<std::size_t>(spec.hidden) : 0)};
    expert_offsets = {layout.add<std::int32_t>("expert_offsets", experts + 1)};
    slot_position = {layout.add<std::int32_t>("slot_position", slots)};
    sorted_slots = {layout.add<std::int32_t>("sorted_slots", slots)};
    route_scratch = {
        layout.add<std::int32_t>("route_scratch", route_scratch_words(options.max_tokens, spec.experts))};
    logits = {layout.add<float>("router_logits", tokens * experts)};
    // An item more than full ones for each expert that has slots.
    most_items = static_cast<std::int32_t>(std::min(experts, slots) + slots / kTileTokens);
    items = {layout.add<CutItem>("items", static_cast<std::size_t>(most_items))};
    item_count = {layout.add<std::int32_t>("item_count", 1)};
    expert_rows = {layout.add<std::int32_t>("expert_rows", experts)};
    progress_size = static_cast<std::int32_t>(kProgressOfAll + tile_rows(slots, experts) / 8);
    progress = {layout.add<std::int32_t>("progress", static_cast<std::size_t>(progress_size))};
    routed = FfnBuffers(spec.scheme, spec, options, spec.intermediate,
                        may_be_static || spec.ordered_inputs ? slots : tokens, slots,
                        tile_rows(slots, experts), layout);
    if (spec.shared.intermediate != 0)
      shared = FfnBuffers(spec.shared.scheme, spec, options, spec.shared.intermediate, tokens, tokens,
                          tile_rows(tokens, 1), layout);
  }
};

}  // namespace gatefold::cuda
