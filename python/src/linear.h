#pragma once
/// \file
/// What the Python classes and the torch operators share of products with packed matrices on a GPU.

#include <array>
#include <optional>

#include "gatefold/cuda_linear.h"
#include "handles.h"
#include "input_rows.h"
#include "plans.h"
#include "tensor.h"

namespace gatefold::python {

/// A plan, and workspaces for as many calls as run at once. Thread-safe.
class PlannedProduct {
 public:
  PlannedProduct(const cuda::LinearWeights& weights, const cuda::LinearOptions& options);

  const cuda::LinearPlan& plan() const { return plan_; }
  /// grouped_gemm if there are offsets, else scaled_mm, with a workspace of its own (Workspaces::lend).
  void run(const cuda::LinearInputs& inputs, const MutableMatrixView& y, cuda::Stream stream, bool in_torch);

 private:
  cuda::LinearWeights weights_;
  cuda::LinearPlan plan_;
  Workspaces workspaces_;
};

/// Packed matrices, and the plans that torch operators use for them, by number of rows.
class PackedMatrices : public Handled {
 public:
  static constexpr const char* kWhat = "matrices";
  PackedMatrices(cuda::LinearWeights weights, const cuda::LinearOptions& options)
      : weights_(std::move(weights)), options_(options) {}

  const cuda::LinearWeights& weights() const { return weights_; }
  Device device() const { return Device::cuda(weights_.device()); }
  /// A plan for at least this many rows; of rows that are not quantized, for those of x's type.
  std::shared_ptr<PlannedProduct> planned(const MatrixView& x);

 private:
  cuda::LinearWeights weights_;
  cuda::LinearOptions options_;
  PlansBySize<PlannedProduct> bf16_plans_, f16_plans_;
};

/// What a call multiplies, checked. Keeps the tensors.
class ProductInputs {
 public:
  /// By one matrix if there are no offsets.
  ProductInputs(const PackedMatrices& by, const Tensor& x, std::optional<Tensor> offsets,
                std::optional<Tensor> bias, std::optional<Tensor> scales, std::optional<Tensor> token_scales);

  const cuda::LinearInputs& get() const { return inputs_; }
  /// Of results, unless the caller gives a tensor for them.
  DType result_type(DType of_codes) const { return rows_.result_type(of_codes); }

 private:
  InputRows rows_;
  std::optional<Tensor> offsets_, bias_;
  cuda::LinearInputs inputs_;
};

}  // namespace gatefold::python
