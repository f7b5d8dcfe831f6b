#include "cpu/activation.h"

#include <algorithm>

namespace gatefold {
namespace {

/// One scale for all k numbers.
float whole_row_scale(const Operand& operand, const TensorRange& tensor, const GroupRange& row) {
  const bool per_tensor = operand.group.n == 0;
  if (per_tensor && tensor.static_scale) return tensor.static_scale->apply(1.0f);
  return whole_scale(operand, per_tensor ? tensor.amax : row.amax());
}

/// Fills scratch.scales and scratch.zeros; returns the size of a group.
std::int64_t find_scales(const RowKernels& kernels, const Operand& operand, const TensorRange& tensor,
                         const RowScratch& scratch, const float* x, std::int64_t k) {
  const std::int64_t group = operand.group.k == 0 ? k : operand.group.k;
  const std::int64_t groups = (k + group - 1) / group;
  for (std::int64_t g = 0; g < groups; ++g) {
    scratch.ranges[g] = {};
    scratch.scales[g] = 1.0f;
    scratch.zeros[g] = 0.0f;
  }
  if (!operand.quantized()) return group;
  kernels.ranges(x, k, group, scratch.ranges);
  TensorScale two_level;
  if (operand.tensor_scale.stored()) {
    float amax = 0;
    for (std::int64_t g = 0; g < groups; ++g) amax = std::max(amax, scratch.ranges[g].amax());
    two_level = tensor.static_scale.value_or(TensorScale{tensor_scale(operand, amax), false});
  }
  for (std::int64_t g = 0; g < groups; ++g)
    scratch.scales[g] = operand.group.k == 0
                            ? whole_row_scale(operand, tensor, scratch.ranges[g])
                            : two_level.apply(group_scale(operand, scratch.ranges[g], two_level).scale);
  return group;
}

}  // namespace

float row_amax(const RowKernels& kernels, const float* x, std::int64_t k) {
  GroupRange range;
  kernels.ranges(x, k, k, &range);
  return range.amax();
}

void round_activations(const RowKernels& kernels, const Operand& operand, const TensorRange& tensor,
                       const RowScratch& scratch, float* x, std::int64_t k) {
  if (!operand.value.stored()) return;
  const std::int64_t group = find_scales(kernels, operand, tensor, scratch, x, k);
  const auto& format = kernels[operand.value];
  format.encode(x, k, group, scratch.scales, scratch.zeros, scratch.codes);
  format.decode(scratch.codes, k, group, scratch.scales, scratch.zeros, x);
}

void code_activations(const RowKernels& kernels, const Operand& operand, const TensorRange& tensor,
                      const RowScratch& scratch, float* x, std::int64_t k) {
  const std::int64_t group = find_scales(kernels, operand, tensor, scratch, x, k);
  const auto& format = kernels[operand.value];
  const float one = 1.0f, zero = 0.0f;
  format.encode(x, k, group, scratch.scales, scratch.zeros, scratch.codes);
  format.decode(scratch.codes, k, k, &one, &zero, x);
}

}  // namespace gatefold
