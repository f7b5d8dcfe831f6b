#pragma once
/// \file
/// Products with quantized matrices on a GPU (on the CPU: linear.h), for dense layers and for engines that
/// route on their own: matrices packed once, a plan, a workspace, calls.
///
///   auto weights = cuda::LinearWeights::pack(matrices);
///   auto plan    = cuda::LinearPlan::create(weights->shape(), {.max_rows = 512});
///   Status done  = plan->grouped_gemm(*weights, {.x = x, .offsets = offsets}, y, workspace, stream);
///
/// Numerics are those of MoePlan (moe.h): rows are rounded to the scheme's activation operand, products are
/// summed in f32. The same call gives the same bits in every run; with LinearOptions::batch_invariant, so
/// does a row beside other rows.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "gatefold/cuda.h"
#include "gatefold/moe.h"
#include "gatefold/quantize.h"

namespace gatefold::cuda {

/// `matrices` matrices [n, k] of one scheme.
struct LinearShape {
  SchemeId scheme = SchemeId::bf16;
  int matrices = 1;
  std::int64_t n = 0, k = 0;
  friend bool operator==(const LinearShape&, const LinearShape&) = default;
};

struct LinearOptions {
  int max_rows = 512;
  /// What activations that are not quantized are rounded to: bf16 or f16. By weights in e4m3, bf16
  /// activations of 2^72 or more may count as infinite.
  DType act_dtype = DType::bf16;
  bool weights_only = false;     ///< leave activations unquantized in schemes that quantize them
  bool debug_workspace = false;  ///< as in PlanOptions; so are the others
  std::optional<CudaTuning> cuda_tuning = {};
  bool batch_invariant = false;
  bool fast_accumulation = false;
};

/// Matrices in device memory, as the multiplies read them. Immutable; any number of plans and threads may use
/// them.
class LinearWeights {
 public:
  /// For plans with these options, of which act_dtype and weights_only matter: beside f16 rows that are not
  /// quantized, group scales of int4 are packed in f16 or f32, else in bf16 (moe.h). Other weights are the
  /// same for all plans. Memory: the packed matrices and up to three times 16 MiB, on the device and on the
  /// host, and a copy of one matrix whose scales are stored otherwise. Errors: device_info's, act_dtype
  /// neither bf16 nor f16, matrices of different schemes or shapes, parts of the wrong size, some with static
  /// activation scales and some without, columns in an order, no memory.
  static Result<LinearWeights> pack(std::span<const QuantizedMatrix* const> matrices,
                                    const LinearOptions& options = {}, int device = 0);

  const LinearShape& shape() const;
  int device() const;
  std::size_t packed_bytes() const;

  struct State;
  const State& state() const { return *state_; }

 private:
  explicit LinearWeights(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

/// Pointers are to memory of the plan's device.
struct LinearInputs {
  MatrixView x;  ///< [rows, k], f32, f16 or bf16; or codes
  /// [matrices + 1]: rows [offsets[g], offsets[g + 1]) of x are multiplied by matrix g. They must not
  /// decrease; what lies outside of 0..rows is left out. Rows before the first and after the last of them are
  /// neither read nor written.
  const std::int32_t* offsets = nullptr;
  const float* bias = nullptr;  ///< [matrices, n], added to each row; or nullptr
  /// Rows that are quantized already, in the layout of quantize_activations (cuda_quantize.h): x has the
  /// codes of the scheme's activation operand (F8_E4M3, I8 or F4), and these are their scales, whatever the
  /// weights' static ones are. The same codes and scales give the same bits as numbers that are rounded to
  /// them. nullptr: x is numbers. Where weights and activations are both e4m3 or both int8, k is a multiple
  /// of 16 and x aligned to as many bytes, many rows are multiplied where they lie (with scales of 128
  /// columns: those of one matrix); others are copied into the multiply's order first.
  const void* scales = nullptr;
  const float* token_scales = nullptr;  ///< [rows], of operands that have them
};

/// Immutable; several threads may call it at once, each with a workspace of its own.
class LinearPlan {
 public:
  /// Errors: device_info's, a shape or an option out of range, a scheme that the kernels cannot multiply.
  static Result<LinearPlan> create(const LinearShape& shape, const LinearOptions& options, int device = 0);

  /// Bytes that a call needs for up to max_rows rows. Any alignment will do.
  std::size_t workspace_bytes() const;

  /// y [rows, n] (f32, f16 or bf16, aligned to 16 bytes) = x w^T (+ bias), by the matrices of groups of rows.
  /// Allocates nothing, throws nothing, returns before the work in `stream` is done, and can be captured in a
  /// graph (but with debug_workspace); a replay may find other offsets. One scale per tensor is one per
  /// group. Errors: shapes that contradict the plan's, rows > max_rows, null or unaligned pointers, a
  /// workspace too small, weights that are packed for other rows.
  Status grouped_gemm(const LinearWeights& weights, const LinearInputs& inputs, const MutableMatrixView& y,
                      std::span<std::byte> workspace, Stream stream = nullptr) const;
  /// The same of one matrix, by all rows; without offsets.
  Status scaled_mm(const LinearWeights& weights, const LinearInputs& inputs, const MutableMatrixView& y,
                   std::span<std::byte> workspace, Stream stream = nullptr) const;

  const LinearShape& shape() const;
  /// What the plan could do with so many rows (1..max_rows), and what it does.
  std::vector<CudaCandidate> candidates(int rows) const;

 private:
  struct State;
  explicit LinearPlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

}  // namespace gatefold::cuda
