#pragma once
/// \file
/// Running one MoE layer: weights prepared for a device, a plan, a workspace, a call.
///
///   auto experts = gatefold::load_experts(checkpoint, {.layer = 0, .scheme = SchemeId::mxfp4});
///   auto plan    = gatefold::MoePlan::create(experts->spec(), {.max_tokens = 512});
///   std::vector<std::byte> workspace(plan->workspace_bytes());
///   Status done  = plan->run(*experts, {.hidden = x}, {.hidden = y}, workspace);
///
/// Numerics. Hidden states are rounded to the scheme's activation operand (act16: the model's 16-bit type),
/// the product is accumulated in f32, the activation is applied in f32 per slot (one token at one expert),
/// its result is rounded to the activation operand again, and the down product is accumulated in f32. The
/// routing weight is applied once, to the down product; the sum over a token's slots is in slot order, in
/// f32. On a GPU, where results have 16 bits, the down products of many tokens are rounded to the results'
/// type before (in f16 what exceeds 65504 becomes infinite). The same input gives the same bits on every run
/// and for every thread count, and a token's result does not depend on the other tokens of the call, except
/// in schemes with one activation scale per tensor (Scheme::batch_dependent) without a static scale. On a GPU
/// it does, by the rounding of f32 sums: how a sum is cut into parts follows from which experts are in use,
/// unless PlanOptions::batch_invariant is set. On a GPU int4 weights with a scale for each group (of zero
/// points: up to 64 columns) may be what they are when dequantized to bf16, code * scale rounded, where
/// activations are bf16, and in groups of up to 64 columns the same in f16: for experts of some 10 tokens or
/// more, and with batch_invariant always. When they are packed for a GPU, scales of int4 are rounded to bf16
/// (off by 2^-9 at most, if they are stored in f16 or f32). Beside f16 activations they are not, but those of
/// groups of up to 64 columns are rounded to f16, times a power of two for each row (off by 2^-11 at most, if
/// they are stored in f32).

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gatefold/checkpoint.h"
#include "gatefold/cuda.h"
#include "gatefold/moe_spec.h"
#include "gatefold/quantize.h"
#include "gatefold/status.h"
#include "gatefold/tensor.h"

namespace gatefold {

struct Device {
  enum class Kind : std::uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;
  static Device cpu() { return {}; }
  static Device cuda(int index = 0) { return {Kind::cuda, index}; }
  friend bool operator==(const Device&, const Device&) = default;
};

/// native: as the scheme says. f32: without the roundings to 16 bit (to compare with f32 references).
enum class Precision : std::uint8_t { native, f32 };

/// Where weights come from: returns the matrix of (expert, projection). Called once each, from one thread.
using ExpertSource = std::function<Result<QuantizedMatrix>(int expert, Projection projection)>;

/// What an MoE layer has besides its experts' matrices; row-major; empty where the layer has none.
struct LayerVectors {
  std::vector<float> router;                         ///< [E, H]
  std::vector<float> router_bias;                    ///< [E]
  std::vector<float> correction_bias;                ///< [E]
  std::vector<float> shared_gate;                    ///< [H]
  std::vector<float> gate_bias, up_bias, down_bias;  ///< [E, I], [E, I], [E, H]
  /// [E, H] (MoeSpec::ordered_inputs): column j of gate and up of expert e multiplies hidden state
  /// input_order[e, j].
  std::vector<std::int32_t> input_order;
};

/// What a CPU plan may choose freely: the results have the same bits whatever it is.
struct CpuTuning {
  int prefetch = -1;  ///< bytes that weights are prefetched ahead of one stream over them; -1: by CPU vendor
  int split = 2;      ///< a thread takes 1 / (split * threads) of the work that is left
  int serial_tokens = 16;  ///< up to that many tokens are routed and rounded by one thread
  int queues = 0;  ///< threads serve the queue of their own memory node first; 0: as many as there are nodes
};

/// How a CUDA plan multiplies: what decodes and multiplies weights, and how many tokens of an expert go
/// together. Another choice sums in another order: results differ by the rounding of f32 sums. Of those by
/// warpgroups, all sum in one order, which depends on the shape alone.
struct CudaTuning {
  enum class Body : std::uint8_t { warps, warpgroups };
  Body body = Body::warps;
  int tile_tokens = 8;
  friend bool operator==(const CudaTuning&, const CudaTuning&) = default;
};
/// "warps, 8 tokens".
std::string describe(const CudaTuning& tuning);

/// One of the choices that a CUDA plan has.
struct CudaCandidate {
  CudaTuning tuning;
  double clocks = 0;    ///< of the routed experts' multiplies in one call, as predicted
  bool chosen = false;  ///< by tune(), or because it is the least
};

struct PlanOptions {
  int max_tokens = 512;
  int threads = 0;  ///< 0: OpenMP's default at creation
  Precision precision = Precision::native;
  bool weights_only = false;  ///< leave activations unquantized in schemes that quantize them
  /// Canaries around every buffer, poison before each run, checks after; on a GPU ids are checked too, unless
  /// MoeSpec::ep_size is above 1.
  bool debug_workspace = false;
  std::optional<CpuTuning> tuning = {};  ///< none: what tune() found for this shape, else defaults
  /// For all token counts; none: what tune() found for this shape and count, else what is predicted to be
  /// fastest.
  std::optional<CudaTuning> cuda_tuning = {};
  /// A token's result has the same bits whatever other tokens are in the call (but in schemes that are
  /// Scheme::batch_dependent, without a static scale). CPU plans always do that; a CUDA plan multiplies all
  /// token counts by warpgroups then, which costs time where there are few tokens an expert.
  bool batch_invariant = false;
  /// CUDA plans add all products of fp8 by fp8 weights with scales per tensor or row to the same sums, which
  /// keep about 14 bits, as fast accumulation does elsewhere: faster, and an error of 1e-3 instead of 1.4e-4
  /// for rows of 7168. So do fp8 by int4 in groups of 128, but not with batch_invariant, and only in calls of
  /// so many tokens that this is faster. Others, and CPU plans, do not change.
  bool fast_accumulation = false;
  std::string kernel = {};  ///< only kernels whose name contains this; empty: the best
};

/// The weights of one layer, packed for one device: records scheme, packed layout and spec. Immutable after
/// creation; any number of plans and threads may use it.
class ExpertWeights {
 public:
  /// Packs for the kernel that a plan with this spec, device and `plan` chooses (precision, weights_only and
  /// kernel matter). `shared` gives the shared expert's matrices (its `expert` argument is 0); unused if
  /// there is none. Memory: the packed layer and one expert, on the device and on the host. Errors: a matrix
  /// whose scheme or shape contradicts the spec, or whose scales are wider than those of the first, no
  /// kernel, no memory.
  static Result<ExpertWeights> pack(const MoeSpec& spec, const Device& device, LayerVectors vectors,
                                    const ExpertSource& routed, const ExpertSource& shared = {},
                                    const PlanOptions& plan = {});

  const MoeSpec& spec() const;
  const Device& device() const;
  std::size_t packed_bytes() const;         ///< of the routed experts
  std::size_t packed_expert_bytes() const;  ///< of one routed expert
  /// What load_experts found odd: weights so large or small that a scale may have been meant the other way
  /// round. "layer 0, expert 3, down_proj: weights of up to 5.1e+07: ...".
  std::span<const std::string> warnings() const;
  /// The matrix of a routed expert as it was packed: the same codes, scales and order of columns. Errors: an
  /// expert that there is not; weights on a GPU (unsupported: their packed form may lack what has no effect);
  /// a row that held NaN or Inf (unsupported: its scale is not kept).
  Result<QuantizedMatrix> matrix(int expert, Projection projection) const;
  /// Layout and size of the packed weights, and how much of them lies in 2 MiB pages.
  std::string describe() const;

  struct State;
  const State& state() const { return *state_; }

 private:
  explicit ExpertWeights(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  friend Result<ExpertWeights> load_experts(const Checkpoint& checkpoint, const struct LoadOptions& options);
  std::shared_ptr<const State> state_;
  std::vector<std::string> warnings_;
};

struct LoadOptions {
  int layer = 0;
  /// Scheme to run in. None: as stored. An unquantized checkpoint is quantized on load; a quantized one can
  /// only be loaded as stored (error otherwise).
  std::optional<SchemeId> scheme;
  Device device;
  QuantizeOptions quantize;
  PlanOptions plan;                            ///< what the weights will be run with: ExpertWeights::pack
  std::optional<SchemeId> shared_scheme = {};  ///< the same of the shared expert
  bool shared_expert = true;                   ///< false: the layer computes its routed experts alone
  /// Only the experts of part ep_rank of ep_size equal ones (MoeSpec::ep_size), e of which is the
  /// checkpoint's expert ep_rank * spec.experts + e, without the router: calls give ids and weights. (Where
  /// the parts' results are added up, one of them has the shared expert.)
  int ep_size = 1, ep_rank = 0;
};
/// One layer of a checkpoint. The same bits as converting first (checkpoint.h) and loading then. Errors:
/// those of ExpertWeights::pack and of the files, each with its tensor; parts that experts do not divide
/// into. Where a checkpoint's columns are ordered (QuantizedMatrix::input_order), those of `down` are
/// followed by the rows of gate and up, and those of gate and up become LayerVectors::input_order.
Result<ExpertWeights> load_experts(const Checkpoint& checkpoint, const LoadOptions& options);

/// Pointers are to row-major arrays of the plan's device. tokens = hidden.rows.
struct MoeInputs {
  MatrixView hidden;  ///< [T, H], f32, f16 or bf16; or codes
  /// Give one of: nothing (the layer's own router is used); router_logits [T, E];
  /// topk_ids [T, k] with topk_weights [T, k] (used as they are: no renormalization, no scaling).
  const float* router_logits = nullptr;
  const std::int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
  /// Hidden states that are quantized already, as other ranks or a norm before may send them; on a GPU only.
  /// `hidden` has the codes of the scheme's activation operand (F8_E4M3, I8 or F4), in the layout of
  /// cuda::quantize_activations (cuda_quantize.h), and these are their scales, whatever static ones the
  /// weights have for them. The same codes and scales give the same bits as numbers that are rounded to
  /// them. Logits or ids must be given, and a shared expert must have the same activation operand, and no
  /// gate. nullptr: `hidden` is numbers.
  const void* hidden_scales = nullptr;
  const float* hidden_token_scales = nullptr;  ///< [T], of operands that have them
};
struct MoeOutputs {
  MutableMatrixView hidden;          ///< [T, H], f32, f16 or bf16
  std::int32_t* topk_ids = nullptr;  ///< optional [T, k]: what the routing chose
  float* topk_weights = nullptr;     ///< optional [T, k]
};

/// Chooses the kernel for a spec on a device, and runs it. Immutable; several threads may call `run` at once,
/// each with a workspace of its own.
class MoePlan {
 public:
  static Result<MoePlan> create(const MoeSpec& spec, const PlanOptions& options, const Device& device = {});

  /// Bytes that `run` needs for up to max_tokens tokens. Any alignment will do.
  std::size_t workspace_bytes() const;
  /// Computes one layer. Allocates nothing, throws nothing; T = 0 is fine. Errors: shapes that contradict the
  /// spec, T > max_tokens, an id outside [0, E) (where MoeSpec::ep_size is 1), weights packed for another
  /// kernel or device, a workspace too small, and (debug_workspace) a damaged canary, naming the buffer.
  ///
  /// On a GPU all pointers, and the workspace, are to memory of the plan's device. The call returns before
  /// the work in `stream` is done, never waits, and can be captured in a graph (but with debug_workspace,
  /// which waits and allocates); a workspace may be used again by any later call in the same stream. Ids
  /// outside [0, E) cannot be seen by the host (but with debug_workspace): their slots add nothing.
  Status run(const ExpertWeights& weights, const MoeInputs& inputs, const MoeOutputs& outputs,
             std::span<std::byte> workspace, cuda::Stream stream = nullptr) const;

  std::string_view kernel_name() const;
  const MoeSpec& spec() const;
  const Device& device() const;
  int max_tokens() const;
  /// What a CUDA plan could do with so many tokens (1..max_tokens), and what it does. Empty on a CPU.
  std::vector<CudaCandidate> candidates(int tokens) const;
  /// Which kernel runs, why each other one does not, the sizes of all workspace buffers; on a GPU, the
  /// candidates for some token counts.
  std::string describe() const;

 private:
  struct State;
  explicit MoePlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

/// The routing alone: logits [T, E] -> ids [T, k] (descending selection score), weights [T, k].
/// `correction_bias` [E] or nullptr. Errors: none; NaN and infinite scores count as 0.
void route(const Routing& routing, int experts, int top_k, const float* logits, std::int64_t tokens,
           const float* correction_bias, std::int32_t* topk_ids, float* topk_weights);

}  // namespace gatefold
