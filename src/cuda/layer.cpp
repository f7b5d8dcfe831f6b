#include "cuda/layer.h"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/gemm_choice.h"
#include "cuda/layer_buffers.h"
#include "cuda/moe_chain.h"
#include "cuda/weights.h"

namespace gatefold::cuda {
namespace {

/// What a plan keeps.
struct LayerPlan final : KernelPlan {
  LayerBuffers buffers;
  GemmTable routed;
  std::optional<GemmTable> shared;

  LayerPlan(const LayerBuffers& b, GemmTable of_routed) : buffers(b), routed(std::move(of_routed)) {}
  std::vector<CudaCandidate> candidates(int tokens) const override { return routed.candidates(tokens); }
};

/// Launches the kernels of one call; the first error ends it.
class LayerRun {
 public:
  LayerRun(const MoeCall& call, const LayerPlan& plan)
      : call_(call),
        spec_(plan.buffers.spec),
        state_(call.weights),
        weights_(DeviceWeights::of(call.weights)),
        plan_(plan),
        b_(plan.buffers),
        base_(call.workspace),
        stream_(native(call.stream)),
        tokens_(static_cast<std::int32_t>(call.inputs.hidden.rows)),
        slots_(tokens_ * plan.buffers.spec.top_k),
        choice_(plan.routed.at(tokens_)) {}

  Status run() {
    const GemmKernel kernel = choice_.kernel();
    // A token's row, which belongs to several experts with scales of their own, is rounded for each as bytes.
    const bool per_slot = spec_.ordered_inputs || (with_static() && !codes() && kernel.byte_order == 0);
    const GemmRouting by_gate_up = route(per_slot, kernel);
    GemmArgs first = routed(gemm(b_.routed, weights_.gate_up, GemmKind::gate_up, kernel));
    first.routing = by_gate_up;
    first.bias = weights_.gate_bias;
    first.up_bias = weights_.up_bias;
    if (!per_slot) first.inputs.slots_of_row = spec_.top_k;
    const MatrixView x = spec_.ordered_inputs ? in_order() : call_.inputs.hidden;
    if (!tiled() && b_.routed.in.are(x)) {
      first.inputs.rows = static_cast<const std::uint16_t*>(x.data);
      // The kernel before may have written the logits, the ids or the items.
      first.routed_early = false;
    } else {
      InputArgs in = hidden(b_.routed, x, per_slot ? slots_ : tokens_, kernel);
      if (per_slot || tiled()) of_slots(in);
      if (per_slot)
        in.divisor = spec_.ordered_inputs ? 1 : spec_.top_k;
      else if (tiled())
        in.copies = spec_.top_k;
      if (with_static() && !codes()) in.static_scales = weights_.input_scales;
      in.x_is_old = !few() && !spec_.ordered_inputs;  // the kernel before sorts slots
      if (tiled()) in.first_weights = first_weights(first);
      then("round inputs", launch_inputs, in, stream_);
    }
    GemmArgs second = routed(gemm(b_.routed, weights_.down, GemmKind::down, kernel));
    second.bias = weights_.down_bias;
    second.out_dtype = slots_dtype();
    if (second.bias == nullptr && slots_dtype() != DType::f32) parts_ = plan_.routed.parts(tokens_);
    second.parts = parts_;
    second.steps /= parts_;
    InputArgs rounding =
        round_mid(b_.routed, slots_, with_static() ? weights_.mid_scales : nullptr, first.out_dtype, kernel);
    const bool are_codes = kernel.rounds || first.static_scales != nullptr;
    if (kernel.finds_amax && !with_static() && rounding.activation.group.n == 0) {
      first.out_amax = rounding.amax = reinterpret_cast<float*>(b_.progress.at(base_) + kProgressAmax);
      rounding.amax_is_known = true;
    }
    const InputArgs* rounded = rounding.activation.quantized() && !are_codes ? &rounding : nullptr;
    std::int32_t* const progress = b_.progress.at(base_);
    const auto counter = [&](int i) { return kernel.counts ? progress + i : nullptr; };
    if (should_chain(kernel, rounded)) {
      then("multiply", launch_chain, kernel, first, second, rounded, progress, multiprocessors(), stream_);
    } else {
      then("multiply by gate and up", launch_gemm, kernel, first, counter(0), multiprocessors(), stream_);
      if (rounded != nullptr) then("round the intermediate", launch_inputs, rounding, stream_);
      then("multiply by down", launch_gemm, kernel, second, counter(1), multiprocessors(), stream_);
    }
    if (spec_.shared.intermediate != 0) run_shared();
    then("add slots up", launch_combine, combine(), stream_);
    give_routing();
    return status_;
  }

 private:
  /// Nothing follows an error: it would read what was not written.
  template <class Launch, class... Args>
  void then(std::string_view what, Launch&& launch, const Args&... args) {
    if (status_.ok()) status_ = check(launch(args...), what);
  }
  int multiprocessors() const { return weights_.device().multiprocessors; }

  /// Whether thread blocks of the multiplies find the experts of slots themselves.
  bool few() const {
    return !tiled() && slots_ <= kFewSlots && spec_.experts <= kFewExperts && choice_.whole;
  }
  bool tiled() const { return choice_.full.tiled; }
  /// Of what down leaves of a slot. Many of them are half of what the sum reads and writes: if that has 16
  /// bits, they may have as well.
  DType slots_dtype() const { return tiled() ? call_.outputs.hidden.dtype : DType::f32; }
  /// Whether the shared expert is one more routed one.
  bool joins() const { return spec_.experts != call_.spec.experts; }
  /// Of each routed slot, as given or as routed.
  const std::int32_t* chosen_ids() const {
    return call_.inputs.topk_ids != nullptr ? call_.inputs.topk_ids : b_.topk_ids.at(base_);
  }
  const float* chosen_weights() const {
    return call_.inputs.topk_ids != nullptr ? call_.inputs.topk_weights : b_.topk_weights.at(base_);
  }
  /// Of each slot.
  const std::int32_t* ids() const { return joins() ? b_.joined_ids.at(base_) : chosen_ids(); }
  const float* slot_weights() const { return joins() ? b_.joined_weights.at(base_) : chosen_weights(); }

  /// Expert ids and weights of every token, and, unless there are few, slots in the order of experts, and
  /// items; or else what gate and up need to route the tokens themselves, which they do if they are the first
  /// to need ids.
  GemmRouting route(bool per_slot, const GemmKernel& kernel) {
    const MoeInputs& in = call_.inputs;
    const std::int32_t* given_ids = in.topk_ids;
    const float* logits = in.router_logits;
    if (given_ids == nullptr && logits == nullptr) {
      then("compute router logits", launch_router_logits,
           RouterArgs{.tokens = tokens_,
                      .experts = call_.spec.experts,
                      .hidden_size = spec_.hidden,
                      .hidden = in.hidden.data,
                      .dtype = in.hidden.dtype,
                      .router = weights_.router,
                      .router16 = in.hidden.dtype == spec_.act_dtype ? weights_.router16 : nullptr,
                      .bias = weights_.router_bias,
                      .logits = b_.logits.at(base_)},
           stream_);
      logits = b_.logits.at(base_);
    }
    RouteArgs args{.tokens = tokens_,
                   .experts = call_.spec.experts,
                   .top_k = call_.spec.top_k,
                   .routing = spec_.routing,
                   .logits = logits,
                   .correction_bias = weights_.correction_bias,
                   .given_ids = given_ids,
                   .first_expert = 0,
                   .end_expert = call_.spec.experts,
                   .out = {.topk_ids = b_.topk_ids.at(base_),
                           .topk_weights = b_.topk_weights.at(base_),
                           .expert_offsets = b_.expert_offsets.at(base_),
                           .slot_position = b_.slot_position.at(base_),
                           .sorted_slots = b_.sorted_slots.at(base_)},
                   .block_counts = b_.route_scratch.at(base_)};
    if (joins()) {
      if (given_ids == nullptr) then("route tokens", launch_choose, args, stream_);
      then("join the shared expert", launch_join,
           JoinArgs{.tokens = tokens_,
                    .top_k = call_.spec.top_k,
                    .experts = call_.spec.experts,
                    .ids = chosen_ids(),
                    .weights = chosen_weights(),
                    .shared_gate = weights_.shared_gate,
                    .x = in.hidden,
                    .all_ids = b_.joined_ids.at(base_),
                    .all_weights = b_.joined_weights.at(base_)},
           stream_);
      args.experts = args.end_expert = spec_.experts;
      args.top_k = spec_.top_k;
      args.logits = nullptr;
      args.given_ids = given_ids = ids();
    }
    if (few() && given_ids != nullptr) return {};
    if (few() && choice_.tuning.tile_tokens == kFewTokens && tokens_ <= kFewTokens && !per_slot)
      return {.logits = logits,
              .correction_bias = weights_.correction_bias,
              .topk_ids = b_.topk_ids.at(base_),
              .topk_weights = b_.topk_weights.at(base_),
              .top_k = spec_.top_k,
              .rules = spec_.routing};
    if (few())
      then("route tokens", launch_choose, args, stream_);
    else
      then("route tokens", launch_route, args, items_of(kernel), stream_);
    return {};
  }

  /// What the routing chose, where the caller wants to know.
  void give_routing() {
    const auto give = [&](void* to, const void* from) {
      if (to == nullptr) return;
      const auto chosen = static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(call_.spec.top_k);
      then("copy the routing", cudaMemcpyAsync, to, from, chosen * 4, cudaMemcpyDeviceToDevice, stream_);
    };
    give(call_.outputs.topk_ids, chosen_ids());
    give(call_.outputs.topk_weights, chosen_weights());
  }

  ItemArgs items_of(const GemmKernel& kernel) const {
    const bool counts = kernel.counts || kernel.chain != nullptr || kernel.finds_amax;
    return {.experts = spec_.experts,
            .rows = slots_,
            .most_items = b_.most_items,
            .items = b_.items.at(base_),
            .item_count = b_.item_count.at(base_),
            .expert_rows = b_.expert_rows.at(base_),
            .progress = counts ? b_.progress.at(base_) : nullptr,
            .progress_size = counts ? b_.progress_size : 0,
            .tokens = kernel.tokens,
            .step = kernel.token_step,
            .band_items = kernel.band_items()};
  }

  /// As much as memory gives while slots are sorted. With more than a few tokens most experts have some.
  FirstWeights first_weights(const GemmArgs& gemm) const {
    constexpr int all_bytes = 8 << 20;
    return {.weights = gemm.weights,
            .expert_stride = gemm.expert_stride,
            .pieces = static_cast<std::int32_t>(
                std::min<std::int64_t>(all_bytes / spec_.experts, gemm.expert_stride) /
                FirstWeights::kPieceBytes)};
  }

  /// Whether routed experts have static scales of activations.
  bool with_static() const { return b_.may_be_static && state_.static_input_scales; }
  /// Whether hidden states are quantized already.
  bool codes() const { return call_.inputs.hidden_scales != nullptr; }
  /// Hidden states of slots, in the order of their experts.
  MatrixView in_order() {
    const MatrixView& x = call_.inputs.hidden;
    void* const rows = b_.ordered_inputs.at(base_);
    then("put inputs in order", launch_order,
         OrderArgs{.top_k = spec_.top_k,
                   .experts = spec_.experts,
                   .ids = ids(),
                   .orders = weights_.input_order,
                   .x = x,
                   .rows = rows},
         stream_);
    return {rows, x.dtype, slots_, x.cols};
  }
  /// Rows of x, as a multiply takes them.
  InputArgs hidden(const FfnBuffers& ffn, const MatrixView& x, std::int64_t rows,
                   const GemmKernel& kernel) const {
    InputArgs args = ffn.in.args(base_, x, rows, kernel.order(ffn.scheme));
    args.scales = call_.inputs.hidden_scales;
    args.token_scales = call_.inputs.hidden_token_scales;
    return args;
  }

  /// For rows that are slots.
  void of_slots(InputArgs& args) const {
    args.ids = ids();
    args.experts = spec_.experts;
    if (!tiled()) return;
    args.positions = b_.slot_position.at(base_);
    args.expert_rows = b_.expert_rows.at(base_);
  }

  /// A multiply of all rows by one expert, without biases.
  GemmArgs gemm(const FfnBuffers& ffn, const DeviceMatrices& m, GemmKind kind,
                const GemmKernel& kernel) const {
    const bool down = kind == GemmKind::down;
    const std::int64_t n = down ? spec_.hidden : ffn.intermediate, k = down ? ffn.intermediate : spec_.hidden;
    const Operand& a = ffn.mid.activation;
    const PackedShape shape(packed_format(gatefold::scheme(ffn.scheme), a), n, k, down ? 1 : 2);
    GemmArgs args{.weights = m.data,
                  .expert_stride = m.expert_stride,
                  .groups = static_cast<std::int32_t>(shape.units / kGroupUnits),
                  .steps = static_cast<std::int32_t>(shape.records),
                  .rows = static_cast<std::int32_t>(n),
                  .slots = tokens_,
                  .inputs = (down ? ffn.mid : ffn.in).gemm(base_, kernel.tiled),
                  .routing = {},
                  .routed_early = true,
                  .kind = kind,
                  .activation = spec_.activation};
    if (down) {
      args.out = ffn.out.at(base_);
      args.out_stride = spec_.hidden;
    } else if (kernel.rounds) {
      args.out = ffn.mid.rows.at(base_);
      args.out_tile_rows = ffn.mid.tile_rows;
      args.out_scales = ffn.mid.record_scales.at(base_);
    } else if (&ffn == &b_.routed && with_static() && kernel.rounds_static &&
               ffn.intermediate == ffn.mid.stride) {  // what follows a row in its last record would be 0
      args.out = ffn.mid.rows.at(base_);
      args.out_tile_rows = ffn.mid.tile_rows;
      args.out_scales = ffn.mid.row_scales.at(base_);
      args.static_scales = weights_.mid_scales;
    } else if (a.quantized()) {
      args.out = ffn.mid_sums.at(base_);
      args.out_stride = ffn.intermediate;
      args.out_dtype = kernel.narrow_rows ? DType::bf16 : DType::f32;
    } else {
      args.out = ffn.mid.rows.at(base_);
      args.out_stride = ffn.mid.stride;
      args.out_tile_rows = kernel.tiled ? ffn.mid.tile_rows : 0;
      args.out_dtype = a.value == formats::f16 ? DType::f16 : DType::bf16;
    }
    return args;
  }

  /// The same, of routed slots by their experts.
  GemmArgs routed(GemmArgs args) const {
    args.experts = spec_.experts;
    args.slots = slots_;
    if (few()) {
      args.ids = ids();
      args.one_token = tokens_ == 1;
    } else {
      args.items = b_.items.at(base_);
      args.most_items = b_.most_items;
      args.item_count = b_.item_count.at(base_);
      args.sorted_slots = b_.sorted_slots.at(base_);
    }
    return args;
  }

  /// From what gate and up leave, in this type, if it is to be rounded.
  InputArgs round_mid(const FfnBuffers& ffn, std::int64_t count, const TensorScale* static_scales,
                      DType dtype, const GemmKernel& down) const {
    InputArgs mid = ffn.mid.args(base_, {ffn.mid_sums.at(base_), dtype, count, ffn.intermediate}, count,
                                 down.order(ffn.scheme));
    mid.start_next_early = true;
    if (&ffn == &b_.routed && tiled()) {  // where experts lie one after the other
      mid.experts = spec_.experts;
      mid.offsets = b_.expert_offsets.at(base_);
      mid.expert_rows = b_.expert_rows.at(base_);
      mid.one_tensor = true;
    } else if (&ffn == &b_.routed) {
      of_slots(mid);
    }
    mid.static_scales = static_scales;
    return mid;
  }

  void run_shared() {
    const FfnBuffers& ffn = b_.shared;
    const GemmKernel kernel = plan_.shared->at(tokens_).kernel();
    const bool may_be_static = ffn.in.activation.may_be_static();
    InputArgs in = hidden(ffn, call_.inputs.hidden, tokens_, kernel);
    if (may_be_static && !codes()) in.static_scales = weights_.shared_input_scale;
    then("round shared inputs", launch_inputs, in, stream_);
    const GemmArgs first = gemm(ffn, weights_.shared_gate_up, GemmKind::gate_up, kernel);
    then("multiply by the shared gate and up", launch_gemm, kernel, first, nullptr, multiprocessors(),
         stream_);
    if (ffn.mid.activation.quantized() && !kernel.rounds)
      then("round the shared intermediate", launch_inputs,
           round_mid(ffn, tokens_, may_be_static ? weights_.shared_mid_scale : nullptr, first.out_dtype,
                     kernel),
           stream_);
    then("multiply by the shared down", launch_gemm, kernel,
         gemm(ffn, weights_.shared_down, GemmKind::down, kernel), nullptr, multiprocessors(), stream_);
  }

  CombineArgs combine() const {
    return {.tokens = tokens_,
            .hidden = spec_.hidden,
            .top_k = spec_.top_k,
            .experts = spec_.experts,
            .slots = b_.routed.out.at(base_),
            .slots_dtype = slots_dtype(),
            .parts = parts_,
            .positions = tiled() ? b_.slot_position.at(base_) : nullptr,
            .ids = ids(),
            .weights = slot_weights(),
            .shared = spec_.shared.intermediate != 0 ? b_.shared.out.at(base_) : nullptr,
            .shared_gate = weights_.shared_gate,
            .x = call_.inputs.hidden,
            .out = call_.outputs.hidden};
  }

  const MoeCall& call_;
  const MoeSpec& spec_;
  const ExpertWeights::State& state_;
  const DeviceWeights& weights_;
  const LayerPlan& plan_;
  const LayerBuffers& b_;
  std::byte* base_;
  cudaStream_t stream_;
  std::int32_t tokens_, slots_;
  std::int32_t parts_ = 1;  ///< of down's columns
  const GemmChoice& choice_;
  Status status_;
};

}  // namespace

std::string refuses(const MoeSpec& spec, const PlanOptions& options, const Device& device) {
  if (const auto info = device_info(device.index); !info) return info.status().message();
  if (options.precision == Precision::f32) return "it multiplies 16-bit numbers: --precision f32 is for CPUs";
  if (spec.experts > kMostExperts || spec.top_k > kMostTopK)
    return fmt::format("it routes to {} of {} experts at most", kMostTopK, kMostExperts);
  for (const SchemeId id : {spec.scheme, spec.shared.intermediate != 0 ? spec.shared.scheme : spec.scheme}) {
    if (!can_pack(scheme(id).weight))
      return fmt::format("groups of {} do not fit its records", scheme(id).name);
    if (!can_multiply(effective_activation(id, spec, options)))
      return fmt::format("it cannot multiply the activations of {}", scheme(id).name);
  }
  return {};
}

void layer_workspace(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout) {
  LayerBuffers(spec, options, layout);
}

Result<std::shared_ptr<const KernelPlan>> prepare_layer(const MoeSpec& spec, const PlanOptions& options,
                                                        const Device& device, const CudaTunings& tuned) {
  const auto info = device_info(device.index);
  if (!info) return info.status();
  const DeviceGuard guard(device.index);
  GemmTableOptions choose{.max_tokens = options.max_tokens,
                          .forced = options.cuda_tuning,
                          .tuned = tuned,
                          .batch_invariant = options.batch_invariant};
  const auto work = [&](SchemeId id, std::int64_t width, int experts, int top_k) {
    const Operand activation = effective_activation(id, spec, options);
    return GemmWork{.scheme = id,
                    .input = input_kind(activation, packed_format(scheme(id)).for_bytes),
                    .bytes = byte_kind(activation),
                    .rounds = activation.quantized(),
                    .fast_accumulation = options.fast_accumulation,
                    .experts = experts,
                    .top_k = top_k,
                    .multiplies = {{width, spec.hidden, 2}, {spec.hidden, width, 1}}};
  };
  WorkspaceLayout layout(options.debug_workspace);
  const LayerBuffers buffers(spec, options, layout);
  const MoeSpec& all = buffers.spec;
  GemmWork of_routed = work(all.scheme, all.intermediate, all.experts, all.top_k);
  of_routed.shared = all.experts - spec.experts;
  of_routed.ep_size = spec.ep_size;
  of_routed.in_parts = !options.batch_invariant;
  auto routed = GemmTable::create(of_routed, *info, choose);
  if (!routed) return routed.status();
  auto plan = std::make_shared<LayerPlan>(buffers, std::move(*routed));
  if (const SharedExpert& shared = all.shared; shared.intermediate != 0) {
    choose.forced.reset();
    choose.tuned = {};
    auto table = GemmTable::create(work(shared.scheme, shared.intermediate, 1, 1), *info, choose);
    if (!table) return table.status();
    plan->shared = std::move(*table);
  }
  return std::shared_ptr<const KernelPlan>(std::move(plan));
}

Status layer(const MoeCall& call) {
  const DeviceGuard guard(call.weights.device.index);
  return LayerRun(call, static_cast<const LayerPlan&>(*call.plan)).run();
}

}  // namespace gatefold::cuda
