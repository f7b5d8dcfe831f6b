#include "cuda/gptq.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "format/matrix.h"
#include "format/scale_rule.h"

namespace gatefold::cuda {
namespace {

MatrixStack make_stack(SchemeId id, int count, std::int64_t n, std::int64_t k) {
  const Operand& operand = scheme(id).weight;
  const QuantizedLayout layout = quantized_layout(operand, operand.scale, n, k);
  return {.count = count,
          .n = static_cast<int>(n),
          .k = static_cast<int>(k),
          .group_k = operand.group.k == 0 ? static_cast<int>(k) : operand.group.k,
          .groups = static_cast<int>(layout.scale_cols),
          .band_rows = operand.group.n == 0 ? static_cast<int>(n) : operand.group.n,
          .bands = static_cast<int>(layout.scale_rows)};
}

}  // namespace

Status Buffer::reserve(std::size_t bytes, int device) {
  if (bytes <= memory_.bytes()) return {};
  memory_ = {};
  Result<Memory> larger = Memory::allocate(bytes, "calibration", device);
  if (!larger) return larger.status();
  memory_ = std::move(*larger);
  return {};
}

/// Memory, and the scale that two-level schemes have above those of groups.
Status Gptq::start(MatrixStack& stack, const float* weights) {
  const auto rows = static_cast<std::size_t>(stack.rows()), k = static_cast<std::size_t>(stack.k),
             groups = static_cast<std::size_t>(stack.groups), number = sizeof(float);
  const auto scales = static_cast<std::size_t>(stack.count * stack.bands) * groups * number;
  for (const auto& [buffer, bytes] :
       {std::pair{&squares_[0], k * k * number},
        {&squares_[1], k * k * number},
        {&squares_[2], k * k * number},
        {&columns_, rows * k * number},
        {&gradient_, rows * k * number},
        {&changes_, rows * static_cast<std::size_t>(std::max(kGptqBlock, stack.group_k)) * number},
        {&ranges_, rows * groups * sizeof(float2)},
        {&tried_, rows * groups * search_steps * number},
        {&scales_, scales},
        {&zeros_, scales},
        {&importance_, k * number},
        {&order_, k * sizeof(int)},
        {&flags_, 2 * number},
        {&codes_, rows * (k + 1)}})
    if (Status status = buffer->reserve(bytes, device_); !status.ok()) return status;
  stack.scales = scales_.as<float>();
  stack.zeros = zeros_.as<float>();

  const Operand& operand = scheme(scheme_).weight;
  if (!operand.tensor_scale.stored()) return {};
  float amax = 0;
  if (Status status = fill(flags_.as<void>(), 0, sizeof(float), stream_); !status.ok()) return status;
  kernels().largest(weights, static_cast<std::int64_t>(stack.rows()) * stack.k, flags_.as<std::uint32_t>());
  if (Status status = copy(&amax, flags_.as<float>(), sizeof(float), stream_); !status.ok()) return status;
  if (Status status = synchronize(stream_); !status.ok()) return status;
  const float divisor = 1.0f / tensor_scale(operand, amax);
  stack.tensor_scale = {std::isfinite(divisor) ? divisor : 1.0f, true};
  return {};
}

/// Columns in the order of falling diag(H).
Status Gptq::set_order(const MatrixStack& stack, const float* hessian) {
  const auto k = static_cast<std::size_t>(stack.k);
  std::vector<float> diagonal(k);
  kernels().diagonal(hessian, stack.k, importance_.as<float>());
  if (Status status = copy(diagonal.data(), importance_.as<float>(), k * sizeof(float), stream_);
      !status.ok())
    return status;
  if (Status status = synchronize(stream_); !status.ok()) return status;

  mean_ = std::accumulate(diagonal.begin(), diagonal.end(), 0.0) / static_cast<double>(k);
  if (!(mean_ > 0)) mean_ = 1;  // no inputs at all: round to nearest
  std::vector<int> order(k);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return diagonal[a] > diagonal[b]; });
  return copy(order_.as<int>(), order.data(), k * sizeof(int), stream_);
}

/// L and L^-1 of the flipped Hessian's rows and columns begin .. begin + size: halves, and what is between
/// them.
void Gptq::factor(Blas& blas, int k, int begin, int size) {
  float *flipped = squares_[0].as<float>(), *lower = squares_[1].as<float>(),
        *inverse = squares_[2].as<float>();
  const auto at = [&](float* matrix, int row, int column) {
    return matrix + static_cast<std::int64_t>(row) * k + column;
  };
  if (size <= kFactorBlock) {
    kernels().factor_block(at(flipped, begin, begin), size, k, at(lower, begin, begin),
                           at(inverse, begin, begin), flags_.as<int>());
    return;
  }
  const int half = (size / 2 + kFactorBlock - 1) / kFactorBlock * kFactorBlock, rest = size - half;
  const int middle = begin + half;
  factor(blas, k, begin, half);
  float* below = at(lower, middle, begin);
  blas.multiply(rest, half, half, 1, {at(flipped, middle, begin), k}, {at(inverse, begin, begin), k, true}, 0,
                below, k);
  blas.multiply(rest, rest, half, -1, {below, k}, {below, k, true}, 1, at(flipped, middle, middle), k);
  factor(blas, k, middle, rest);
  float* product = at(flipped, middle, begin);  // no longer needed
  blas.multiply(rest, half, half, 1, {below, k}, {at(inverse, begin, begin), k}, 0, product, k);
  blas.multiply(rest, half, rest, -1, {at(inverse, middle, middle), k}, {product, k}, 0,
                at(inverse, middle, begin), k);
}

/// The upper U with U^T U = H^-1, columns in order, into squares_[0]. From the Cholesky factor of H from its
/// last row to the first. Damping grows until there is one.
Status Gptq::invert(Blas& blas, int k, float* hessian, double damping) {
  for (;; damping = std::max(10 * damping, 1e-6)) {
    kernels().add_to_diagonal(hessian, k, static_cast<float>(damping * mean_));
    kernels().flip(hessian, order_.as<int>(), k, squares_[0].as<float>());
    if (Status status =
            fill(squares_[2].as<void>(), 0, static_cast<std::size_t>(k) * k * sizeof(float), stream_);
        !status.ok())
      return status;
    if (Status status = fill(flags_.as<void>(), 0, sizeof(int), stream_); !status.ok()) return status;
    factor(blas, k, 0, k);
    int failed = 0;
    if (Status status = copy(&failed, flags_.as<int>(), sizeof(int), stream_); !status.ok()) return status;
    if (Status status = synchronize(stream_); !status.ok()) return status;
    if (failed == 0) break;
    if (damping > 100)
      return {Code::invalid_argument, fmt::format("the Hessian of {} inputs is not positive definite", k)};
  }
  kernels().unflip(squares_[2].as<float>(), order_.as<int>(), k, squares_[0].as<float>(),
                   importance_.as<float>());
  return {};
}

void Gptq::round(Blas& blas, const MatrixStack& stack, const float* weights, float* values) {
  const float* factor = squares_[0].as<float>();
  float *columns = columns_.as<float>(), *errors = changes_.as<float>();
  kernels().permute_columns(weights, order_.as<int>(), stack.rows(), stack.k, columns);
  for (int begin = 0; begin < stack.k; begin += kGptqBlock) {
    kernels().round_columns(stack, columns, order_.as<int>(), factor, begin, values, errors);
    const int end = std::min(begin + kGptqBlock, stack.k);
    blas.multiply(stack.rows(), stack.k - end, end - begin, -1, {errors, kGptqBlock},
                  {factor + static_cast<std::int64_t>(begin) * stack.k + end, stack.k}, 1, columns + end,
                  stack.k);
  }
}

/// `gradient_` is (W - Q) H, kept up to date with every change of Q.
void Gptq::refine(Blas& blas, const MatrixStack& stack, const float* weights, const float* hessian, int turns,
                  float* values) {
  const std::int64_t rows = stack.rows(), k = stack.k;
  float *gradient = gradient_.as<float>(), *changes = changes_.as<float>();
  kernels().subtract(weights, values, rows * k, columns_.as<float>());
  blas.multiply(rows, k, k, 1, {columns_.as<float>(), k}, {hessian, k}, 0, gradient, k);
  const auto pass_on = [&](std::int64_t first, std::int64_t count, std::int64_t stride) {
    blas.multiply(rows, k, count, -1, {changes, stride}, {hessian + first * k, k}, 1, gradient, k);
  };
  const auto for_each_block = [&](const auto& move) {
    for (int begin = 0; begin < stack.k; begin += kGptqBlock) {
      move(begin);
      pass_on(begin, std::min<std::int64_t>(kGptqBlock, k - begin), kGptqBlock);
    }
  };
  for (int turn = 0; turn < turns; ++turn) {
    if (GptqKernels::groups_in_lanes(stack)) {
      for_each_block([&](int begin) {
        kernels().move_scales_of_block(stack, hessian, gradient, begin, values, changes);
      });
    } else {
      for (int group = 0; group < stack.groups; ++group) {
        const std::int64_t first = static_cast<std::int64_t>(group) * stack.group_k,
                           count = std::min<std::int64_t>(stack.group_k, k - first);
        blas.multiply(rows, count, count, 1, {values + first, k}, {hessian + first * k + first, k}, 0,
                      changes, count);
        kernels().move_scales(stack, gradient, group, values, changes);
        pass_on(first, count, count);
      }
    }
    for (int sweep = 0; sweep < 4; ++sweep)
      for_each_block(
          [&](int begin) { kernels().move_codes(stack, hessian, gradient, begin, values, changes); });
  }
}

QuantizedLayout Gptq::encode(const MatrixStack& stack, float* values) {
  const Operand& operand = scheme(scheme_).weight;
  const QuantizedLayout layout = quantized_layout(operand, operand.scale, stack.n, stack.k);
  kernels().encode(stack, static_cast<int>(layout.row_bytes), values, codes_.as<std::byte>());
  return layout;
}

Status Gptq::download(const MatrixStack& stack, float* values, QuantizedMatrix* out) {
  const QuantizedLayout layout = encode(stack, values);
  if (Status status = check_launch("calibrate"); !status.ok()) return status;
  const auto count = static_cast<std::size_t>(stack.bands) * static_cast<std::size_t>(stack.groups);
  std::vector<float> scales(count * static_cast<std::size_t>(stack.count)), zeros(scales.size());
  for (int i = 0; i < stack.count; ++i) {
    out[i] = make_matrix(scheme_, stack.n, stack.k);
    out[i].tensor_scale = stack.tensor_scale;
    if (Status status = copy(out[i].values.data(),
                             codes_.as<std::byte>() + static_cast<std::size_t>(i) * layout.value_bytes,
                             layout.value_bytes, stream_);
        !status.ok())
      return status;
  }
  for (auto [to, from] : {std::pair{&scales, &scales_}, {&zeros, &zeros_}})
    if (Status status = copy(to->data(), from->as<float>(), to->size() * sizeof(float), stream_);
        !status.ok())
      return status;
  if (Status status = synchronize(stream_); !status.ok()) return status;
  for (std::size_t i = 0; i < static_cast<std::size_t>(stack.count); ++i)
    for (int band = 0; band < stack.bands; ++band) {
      const std::size_t at = i * count + static_cast<std::size_t>(band * stack.groups);
      store_scales(out[i], band * layout.scale_cols, &scales[at], static_cast<std::size_t>(stack.groups));
      store_zeros(out[i], band, &zeros[at], static_cast<std::size_t>(stack.groups));
    }
  return {};
}

Status Gptq::run(Blas& blas, int count, std::int64_t n, std::int64_t k, const float* weights, float* hessian,
                 const GptqOptions& options, float* values, QuantizedMatrix* out) {
  if (Status status = check_shape(scheme_, n, k); !status.ok()) return status;
  MatrixStack stack = make_stack(scheme_, count, n, k);
  if (Status status = start(stack, weights); !status.ok()) return status;
  if (Status status = set_order(stack, hessian); !status.ok()) return status;
  if (Status status = invert(blas, stack.k, hessian, options.damping); !status.ok()) return status;
  kernels().search_scales(stack, weights, importance_.as<float>(), search_steps, ranges_.as<float2>(),
                          tried_.as<float>());
  round(blas, stack, weights, values);
  if (options.refinements > 0) refine(blas, stack, weights, hessian, options.refinements, values);
  if (!blas.status().ok()) return blas.status();
  return download(stack, values, out);
}

Status Gptq::nearest(int count, std::int64_t n, std::int64_t k, const float* weights, const float* hessian,
                     float* values, QuantizedMatrix* out) {
  if (Status status = check_shape(scheme_, n, k); !status.ok()) return status;
  MatrixStack stack = make_stack(scheme_, count, n, k);
  if (Status status = start(stack, weights); !status.ok()) return status;
  if (hessian != nullptr)
    kernels().diagonal(hessian, stack.k, importance_.as<float>());
  else if (Status status =
               fill(importance_.as<void>(), 0, static_cast<std::size_t>(k) * sizeof(float), stream_);
           !status.ok())
    return status;
  kernels().search_scales(stack, weights, importance_.as<float>(), hessian != nullptr ? search_steps : 1,
                          ranges_.as<float2>(), tried_.as<float>());
  const auto bytes = static_cast<std::size_t>(stack.rows()) * static_cast<std::size_t>(k) * sizeof(float);
  if (values != weights)
    if (Status status = copy(values, weights, bytes, stream_); !status.ok()) return status;
  if (out != nullptr) return download(stack, values, out);
  encode(stack, values);
  return check_launch("round weights");
}

}  // namespace gatefold::cuda
