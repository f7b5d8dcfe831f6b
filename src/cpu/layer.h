#pragma once
/// \file
/// What the CPU kernels share: routing, slots, combine. A slot is one (token, chosen expert) pair; a slot's
/// position is its place when slots are sorted by expert, tokens in order within an expert.

#include <omp.h>

#include <algorithm>
#include <atomic>

#include "cpu/activation.h"
#include "cpu/gemm.h"
#include "cpu/inputs.h"
#include "cpu/panel.h"
#include "format/numa.h"
#include "moe/kernel.h"

namespace gatefold {

/// A buffer of the workspace.
template <class T>
struct Buffer {
  std::size_t offset = 0;
  T* at(std::byte* base) const { return reinterpret_cast<T*>(base + offset); }
};

/// T tokens, S = T * top_k slots, E experts; H and I padded (gemm.h).
struct LayerBuffers {
  Buffer<std::int32_t> ids;            // [S] expert of a slot
  Buffer<float> weights;               // [S] routing weight of a slot
  Buffer<std::int32_t> offsets;        // [E + 1] first position of an expert
  Buffer<std::int32_t> active;         // [E] experts with slots, by queue
  Buffer<std::int32_t> queues;         // [kMostNodes + 1] where each queue begins in `active`
  Buffer<std::int32_t> position;       // [S] slot -> position
  Buffer<std::int32_t> slot;           // [S] position -> slot
  Buffer<std::int64_t> taken;          // [2, kMostNodes] panels that threads have taken: gate and up, down
  Buffer<std::int64_t> done;           // [E + 1] panels of gate and up that are done, by expert; last: shared
  Buffer<float> hidden;                // [T, H]
  Buffer<float> routed_mid;            // [S, I] by position
  Buffer<float> routed_out;            // [S, H] by position
  Buffer<float> shared_mid;            // [T, shared I]
  Buffer<float> shared_out;            // [T, H]
  Buffer<float> amax;                  // [S]
  Buffer<float> routing;               // per thread [3 * E]
  Buffer<float> router_rows;           // per thread [8, H]
  Buffer<const float*> combined_rows;  // per thread [top_k + 1]
  Buffer<float> combined_weights;      // per thread [top_k + 1]
  Buffer<float> scales, zeros;         // per thread [K], K the longest row
  Buffer<std::byte> codes;             // per thread [2 * K]
  Buffer<GroupRange> ranges;           // per thread [K]
  std::size_t tokens, slots, threads, k, combined;
  bool may_be_static;  // static activation scales: then inputs are rounded per slot

  LayerBuffers(const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout);
};

/// The feed-forward of one expert over a list of rows.
struct Job {
  const Ffn* ffn;
  bool routed;
  std::int64_t first;  // position (routed) or token of row 0
  std::int64_t rows;
  const std::int32_t* slot;  // row i belongs to token slot[i] / top_k; nullptr: inputs are by row
  float* mid;                // [rows, I padded]
  float* out;                // [rows, H padded]
  std::int64_t* done;        // panels of gate and up
  const float* gate_bias;    // [I], or nullptr; likewise
  const float* up_bias;
  const float* down_bias;  // [H]
};

float activate(const Activation& activation, float gate, float up);

/// One thread's view of a call. Every thread of the team runs the same phases, separated by barriers.
class LayerThread {
 public:
  LayerThread(Isa isa, const MoeCall& call, const LayerBuffers& buffers);

 protected:
  /// hidden -> f32 rows; expert ids and weights of every token. Ends without a barrier.
  void load_and_route();
  /// Counting sort of the slots by expert; stable, so the order is a function of the ids alone. Those of
  /// other parts' experts have position -1. For one thread.
  void sort_slots();
  /// Largest magnitude over all rows; 0 if there are none. For all threads; has barriers.
  float batch_amax(const float* x, std::int64_t rows, std::int64_t k, std::int64_t stride);
  /// Routing weights are applied here, once; slots are summed in the order of the ids. Ends without a
  /// barrier.
  void combine();

  /// What the rows of a routed input (`mid` false) or intermediate are rounded with.
  TensorRange routed_range(bool mid, std::int64_t row, float amax) const {
    if (!static_in_) return {{}, amax};
    const Ffn& ffn = state_.routed[b_.ids.at(base_)[b_.slot.at(base_)[row]]];
    return {mid ? ffn.down.input_scale : ffn.gate.input_scale, 0};
  }
  TensorRange shared_range(bool mid, float amax) const {
    return {mid ? state_.shared.down.input_scale : state_.shared.gate.input_scale, amax};
  }
  /// Whether all rows of the call have one scale, which their numbers give.
  bool per_batch() const { return routed_act_.quantized() && routed_act_.group.n == 0 && !static_in_; }
  bool shared_per_batch() const {
    return shared_k_ != 0 && shared_act_.quantized() && shared_act_.group.n == 0 &&
           !state_.shared.gate.input_scale;
  }
  /// Slots of this layer's experts (MoeSpec::ep_size), once they are sorted.
  std::int64_t slots_here() const { return b_.offsets.at(base_)[spec_.experts]; }
  /// Rows of the routed input: slots by position with static scales (they differ by expert), else tokens.
  std::int64_t input_rows() const { return static_in_ ? slots_here() : tokens_; }
  std::int64_t input_token(std::int64_t row) const {
    return static_in_ ? b_.slot.at(base_)[row] / spec_.top_k : row;
  }
  /// Row of the routed or shared input that row i of a job reads.
  std::int64_t input_row(const Job& job, std::int64_t i) const {
    return job.slot != nullptr ? job.slot[i] / spec_.top_k : job.first + i;
  }

  Job routed_job(int expert) const;
  Job shared_job() const;

  /// Calls f(job, begin, end) for all panels of every expert in use, on some thread; first those of the
  /// thread's own queue. Each output is computed by one call, so the schedule does not show in the result.
  /// Ends with a barrier.
  template <class Function>
  void for_each_run(int phase, std::int64_t routed_rows, std::int64_t shared_rows, Function&& f) {
    const std::int64_t each = panels(routed_rows), shared = shared_k_ == 0 ? 0 : panels(shared_rows);
    const std::int32_t* begin = b_.queues.at(base_);
    for (int i = 0; i < queues_; ++i) {
      const int queue = (home_ + i) % queues_;
      for_each_run_of_queue(b_.taken.at(base_)[phase * kMostNodes + queue], queue == 0 ? shared : 0, each,
                            b_.active.at(base_) + begin[queue], begin[queue + 1] - begin[queue], f);
    }
#pragma omp barrier
  }

  static std::int64_t panels(std::int64_t rows) {
    return (rows + kPanelRows - 1) / kPanelRows;
  }

  const MoeCall& call_;
  const MoeSpec& spec_;
  const ExpertWeights::State& state_;
  const LayerBuffers& b_;
  std::byte* base_;
  const std::size_t thread_;
  const RowKernels& kernels_;
  const InputKernels& inputs_;
  const Multiply multiply_;
  const std::int64_t tokens_, slots_, hidden_k_, mid_k_, shared_k_;
  const Operand routed_act_, shared_act_;
  const bool static_in_;
  const int queues_, home_;
  RowScratch scratch_;

 private:
  /// Runs of panels are long at first, so that a thread reads memory in order, and shorter towards the end,
  /// so that all threads end together. `taken` counts the panels that have been handed out; it starts at 0.
  template <class Function>
  void for_each_run_of_queue(std::int64_t& taken, std::int64_t shared, std::int64_t each,
                             const std::int32_t* experts, std::int64_t count, Function&& f) {
    const std::int64_t total = shared + count * each, threads = std::max(1, call_.options.threads / queues_);
    const std::atomic_ref<std::int64_t> next(taken);
    for (std::int64_t begin = next.load(std::memory_order_relaxed); begin < total;) {
      // Even, as kernels take two panels at once.
      const std::int64_t share = (total - begin) / (call_.tuning.split * threads) / 2 * 2;
      const std::int64_t end = std::min(begin + std::max<std::int64_t>(2, share), total);
      if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      for (std::int64_t panel = begin; panel < end;) {
        const bool is_shared = panel < shared;
        const Job job = is_shared ? shared_job() : routed_job(experts[(panel - shared) / each]);
        const std::int64_t first = is_shared ? panel : (panel - shared) % each;
        const std::int64_t last = std::min(first + end - panel, is_shared ? shared : each);
        f(job, first, last);
        panel += last - first;
      }
      begin = next.load(std::memory_order_relaxed);
    }
  }

  void route(std::int64_t token, const float* row);
  void router_logits(const float* row, float* logits);
  float shared_weight(const float* hidden) const;
};

/// The kernel of an instruction set.
void panel_workspace(Isa isa, const MoeSpec& spec, const PlanOptions& options, WorkspaceLayout& layout);
void panel_layer(Isa isa, const MoeCall& call);
extern const WeightLayout panel_layout;

}  // namespace gatefold
