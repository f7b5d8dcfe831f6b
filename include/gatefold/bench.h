#pragma once
/// \file
/// Timing of whole MoE layers on random weights, beside what the machine can do at best, measured in the same
/// run: machines differ, and shared ones change by the minute, so only the ratios mean something.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gatefold/moe.h"
#include "gatefold/status.h"

namespace gatefold {

struct BenchShape {
  std::string name;
  int hidden = 0, intermediate = 0, experts = 0, top_k = 0;
  int ep_size = 1;  ///< MoeSpec
};

/// The layers of published models. deepseek-v3 and deepseek-v4-pro: the experts of one of 8 ranks, and tokens
/// that choose only these.
std::span<const BenchShape> bench_presets();

/// uniform: every expert is as likely. skew: the expert of rank r as 1 / (r + 1), ranks drawn for each call.
/// single: all tokens of a call choose the same experts, drawn for each call.
enum class BenchRouting : std::uint8_t { uniform, skew, single };
/// What a call is given: the experts' ids and weights, or router logits from which it chooses the same ids;
/// or hidden states alone, of which the layer's own router makes logits (random ones: `routing` is uniform);
/// or ids, and hidden states that are quantized already (GPU).
enum class BenchFrom : std::uint8_t { ids, logits, hidden, codes };

/// What layers are like, apart from scheme and shape.
struct BenchLayers {
  /// The model's 16-bit type, bf16 or f16: of activations, and of scales of groups that have 16 bits.
  DType dtype = DType::bf16;
  bool static_scales = false;   ///< experts have static scales of activations, where operands may
  bool shared_expert = false;   ///< there is one of the routed ones' scheme and width, too
  bool ordered_inputs = false;  ///< MoeSpec
};

struct BenchOptions {
  Device device;
  BenchShape shape;
  std::vector<SchemeId> schemes;
  std::vector<int> tokens = {1, 8, 64, 512};
  std::vector<BenchFrom> from = {BenchFrom::ids};  ///< a row for each
  BenchRouting routing = BenchRouting::uniform;
  BenchLayers layers;
  bool batch_invariant = false, fast_accumulation = false;  ///< PlanOptions
  int threads = 0;                                          ///< 0: OpenMP's default
  double seconds = 1.0;                                     ///< per row, at least; not on a GPU
  std::uint64_t weight_bytes =
      3'000'000'000;  ///< layers are repeated, each with memory of its own, up to this
};

struct BenchRow {
  std::string_view scheme;
  std::string kernel;
  int tokens = 0;
  BenchFrom from = BenchFrom::ids;
  int runs = 0;
  /// On a GPU: calls one after the other in a CUDA graph, for some 20 ms from a rest.
  double us_median = 0, us_min = 0, us_max = 0;
  double us_launched = 0;          ///< GPU: launched one by one; median
  std::uint64_t weight_bytes = 0;  ///< packed bytes, scales included, of the experts that a call hits (mean)
  double gb_per_s = 0;             ///< weight_bytes / time, median
  double gflop_per_s = 0;          ///< 6 * tokens * (top_k / ep_size + shared) * hidden * intermediate / time
  /// Plain reading by the same threads, or on the same GPU (the same bytes), between the runs.
  double read_gb_per_s = 0;
  double read_ratio = 0;  ///< gb_per_s / read_gb_per_s
  /// CPU: the best multiply-add in registers by the same threads, of int8 if the scheme's activations are
  /// int8, else of f32 or bf16, whichever is faster. GPU: cuBLAS on a large dense multiply of e4m3 or int8 if
  /// the scheme's activations are, else of bf16; 0 where cuBLAS is not there, and why in `unmeasured`.
  double multiply_gflop_per_s = 0;
  double multiply_ratio = 0;
  double us_read = 0, us_multiply = 0;  ///< what the call's bytes and multiplies take at these rates
  double us_floor = 0;                  ///< the larger of both: no call can be faster
  int sm_mhz = 0, memory_mhz = 0;       ///< GPU: clocks right after the runs; 0 where they cannot be read
  std::string unmeasured;               ///< what could not be measured, and why
};

/// `on_row` gets each row as soon as it is there.
Result<std::vector<BenchRow>> bench(const BenchOptions& options,
                                    const std::function<void(const BenchRow&)>& on_row = {});

}  // namespace gatefold
