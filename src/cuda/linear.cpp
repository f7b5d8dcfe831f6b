#include <fmt/format.h>

#include <algorithm>

#include "cuda/gemm_choice.h"
#include "cuda/input_buffers.h"
#include "cuda/slots.h"
#include "cuda/weights.h"
#include "format/code_rows.h"
#include "format/matrix.h"
#include "gatefold/cuda_linear.h"

namespace gatefold::cuda {
namespace {

/// Items hold a matrix's number in 16 bits.
constexpr int kMostMatrices = 32767;

Status invalid(std::string message) {
  return {Code::invalid_argument, std::move(message)};
}

PackedShape packed_shape(const LinearShape& shape, const Operand& activation) {
  return {packed_format(scheme(shape.scheme), activation), shape.n, shape.k, 1};
}

/// What rows are rounded to.
Result<Operand> activation_of(SchemeId id, const LinearOptions& options) {
  MoeSpec spec;
  spec.act_dtype = options.act_dtype;
  PlanOptions plan;
  plan.weights_only = options.weights_only;
  if (options.act_dtype == DType::bf16 || options.act_dtype == DType::f16)
    return effective_activation(id, spec, plan);
  return invalid(fmt::format("act_dtype is {}, expected BF16 or F16", name(options.act_dtype)));
}

/// Why the kernels cannot multiply, in words; empty if they can.
std::string refuses(SchemeId id, const Operand& activation) {
  if (!can_pack(scheme(id).weight))
    return fmt::format("groups of {} do not fit the kernels' records", scheme(id).name);
  if (!can_multiply(activation))
    return fmt::format("the kernels cannot multiply the activations of {}", scheme(id).name);
  return {};
}

/// Of GemmInputs: such a box, of 4 KB, is as fast as larger ones.
constexpr int kBoxRows = 32;

/// Of one matrix: several items, as few as will do, have about as many rows each.
int rows_of_item(const GemmKernel& kernel, std::int32_t rows) {
  const int items = (rows + kernel.tokens - 1) / kernel.tokens,
            steps = (rows + kernel.token_step - 1) / kernel.token_step;
  if (items == 1) return kernel.tokens;  // fewer leave room for more weights on their way: slower
  return std::min(kernel.tokens, (steps + items - 1) / items * kernel.token_step);
}

/// Whether rows are codes that can be copied in boxes. (Scales of their records, which are not in the order
/// of the multiply, are put there for one matrix only.)
bool are_boxes(const LinearInputs& in, const Operand& activation) {
  return in.scales != nullptr && in.x.cols % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(in.x.data) % 16 == 0 &&
         (in.offsets == nullptr || !has_record_scales(activation));
}

struct LinearBuffers {
  InputBuffers in;
  Buffer<CutItem> items;
  Buffer<std::int32_t> item_count, expert_rows;
  Buffer<float> part_sums;
  std::int32_t most_items = 0;

  LinearBuffers(const LinearShape& shape, const Operand& activation, int max_rows, std::size_t part_numbers,
                WorkspaceLayout& layout)
      : in("inputs", activation, static_cast<std::size_t>(max_rows),
           tile_rows(static_cast<std::size_t>(max_rows), static_cast<std::size_t>(shape.matrices)), shape.k,
           layout),
        most_items(std::min(shape.matrices, max_rows) + max_rows / kTileTokens) {
    items = {layout.add<CutItem>("items", static_cast<std::size_t>(most_items))};
    item_count = {layout.add<std::int32_t>("item_count", 1)};
    expert_rows = {layout.add<std::int32_t>("expert_rows", static_cast<std::size_t>(shape.matrices))};
    part_sums = {layout.add<float>("part_sums", part_numbers)};
  }
};

}  // namespace

struct LinearWeights::State {
  LinearShape shape;
  std::unique_ptr<WeightMemory> memory;
  DeviceMatrices matrices;
  Format scale_format;   ///< as packed
  Memory static_scales;  ///< [matrices] of TensorScale, if there are any

  const DeviceInfo& device() const { return static_cast<const DeviceWeights&>(*memory).device(); }
};

const LinearShape& LinearWeights::shape() const {
  return state_->shape;
}
int LinearWeights::device() const {
  return state_->device().index;
}
std::size_t LinearWeights::packed_bytes() const {
  return state_->memory->bytes();
}

Result<LinearWeights> LinearWeights::pack(std::span<const QuantizedMatrix* const> matrices,
                                          const LinearOptions& options, int device) {
  if (matrices.empty() || matrices.size() > kMostMatrices)
    return invalid(fmt::format("{} matrices, expected 1..{}", matrices.size(), kMostMatrices));
  const QuantizedMatrix& first = *matrices[0];
  auto state = std::make_shared<State>();
  state->shape = {first.scheme, static_cast<int>(matrices.size()), first.n, first.k};
  if (!can_pack(scheme(first.scheme).weight)) return Status(Code::unsupported, refuses(first.scheme, {}));
  const Result<Operand> activation = activation_of(first.scheme, options);
  if (!activation) return activation.status();
  std::vector<TensorScale> scales;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const QuantizedMatrix& m = *matrices[i];
    if (Status status = check_matrix(m, first.scheme, first.n, first.k); !status.ok())
      return Status(status.code(), fmt::format("matrix {} {}", i, status.message()));
    if (m.input_scale) scales.push_back(*m.input_scale);
    if (scales.size() != (scales.empty() ? 0 : i + 1))
      return invalid(fmt::format("matrix {}: some matrices have an input scale, some have none", i));
  }
  const auto each = static_cast<std::size_t>(packed_shape(state->shape, *activation).bytes());
  auto memory = DeviceWeights::allocate(each * matrices.size(), Device::cuda(device));
  if (!memory) return memory.status();
  state->memory = std::move(*memory);
  static_cast<DeviceWeights&>(*state->memory).in_order = keeps_order(scheme(first.scheme));
  PackedMatrix packed;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const QuantizedMatrix* matrix = matrices[i];
    std::optional<QuantizedMatrix> converted;
    const Format format = packed_scales(matrix->scheme, matrix->scale_format, *activation);
    if (format != matrix->scale_format) {
      matrix = &converted.emplace(*matrix);
      convert_scales(*converted, format);
    }
    if (Status status = state->memory->pack(matrix, 1, i * each, &packed); !status.ok()) return status;
    if (i > 0) continue;
    state->matrices.data = packed.data;
    state->scale_format = format;
  }
  state->matrices.expert_stride = static_cast<std::int64_t>(each);
  if (!scales.empty() && scheme(first.scheme).activation.may_be_static()) {
    const std::size_t bytes = scales.size() * sizeof(TensorScale);
    auto uploaded = Memory::allocate(bytes, "activation scales", device);
    if (!uploaded) return uploaded.status();
    state->static_scales = std::move(*uploaded);
    const DeviceGuard guard(device);
    if (Status status = copy(state->static_scales.data(), scales.data(), bytes); !status.ok()) return status;
  }
  if (Status status = static_cast<DeviceWeights&>(*state->memory).finish_packing(); !status.ok())
    return status;
  return LinearWeights(std::move(state));
}

struct LinearPlan::State {
  LinearShape shape;
  LinearOptions options;
  DeviceInfo device;
  WorkspaceLayout layout;
  LinearBuffers buffers;
  GemmTable table;

  Status check(const LinearWeights& weights, const LinearInputs& in, const MutableMatrixView& y,
               std::span<std::byte> workspace) const;
  Status make_rows(const LinearWeights::State& weights, const LinearInputs& in, const GemmKernel& kernel,
                   std::byte* base, cudaStream_t stream, GemmArgs* args) const;
  Status launch(const LinearWeights::State& weights, const LinearInputs& in, const MutableMatrixView& y,
                std::byte* base, cudaStream_t stream) const;
};

Result<LinearPlan> LinearPlan::create(const LinearShape& shape, const LinearOptions& options, int device) {
  constexpr std::int64_t limit = std::int64_t{1} << 24;
  if (shape.n <= 0 || shape.k <= 0 || shape.n > limit || shape.k > limit || shape.matrices <= 0 ||
      shape.matrices > kMostMatrices)
    return invalid(fmt::format("{} matrices [{}, {}]", shape.matrices, shape.n, shape.k));
  if (options.max_rows <= 0 || options.max_rows > limit)
    return invalid(fmt::format("max_rows = {} is not within 1..{}", options.max_rows, limit));
  const Result<Operand> activation = activation_of(shape.scheme, options);
  if (!activation) return activation.status();
  const auto info = device_info(device);
  if (!info) return info.status();
  if (const std::string why = refuses(shape.scheme, *activation); !why.empty())
    return Status(Code::unsupported, why);

  const DeviceGuard guard(device);
  const bool in_parts = shape.matrices == 1 && !options.batch_invariant;
  auto table =
      GemmTable::create({.scheme = shape.scheme,
                         .input = input_kind(*activation, packed_format(scheme(shape.scheme)).for_bytes),
                         .bytes = byte_kind(*activation),
                         .rounds = activation->quantized(),
                         .fast_accumulation = options.fast_accumulation,
                         .experts = shape.matrices,
                         .top_k = 1,
                         .multiplies = {{shape.n, shape.k, 1}},
                         .in_parts = in_parts},
                        *info,
                        {.max_tokens = options.max_rows,
                         .forced = options.cuda_tuning,
                         .batch_invariant = options.batch_invariant});
  if (!table) return table.status();
  std::int64_t part_rows = 0;
  for (int rows = 1; in_parts && rows <= std::min(options.max_rows, kMostRowsOfParts); ++rows)
    if (const int parts = table->parts(rows); parts > 1)
      part_rows = std::max<std::int64_t>(part_rows, std::int64_t{parts} * rows);
  WorkspaceLayout layout(options.debug_workspace);
  const LinearBuffers buffers(shape, *activation, options.max_rows,
                              static_cast<std::size_t>(part_rows * shape.n), layout);
  return LinearPlan(
      std::make_shared<State>(State{shape, options, *info, layout, buffers, std::move(*table)}));
}

std::size_t LinearPlan::workspace_bytes() const {
  return state_->layout.bytes();
}
const LinearShape& LinearPlan::shape() const {
  return state_->shape;
}
std::vector<CudaCandidate> LinearPlan::candidates(int rows) const {
  return state_->table.candidates(rows);
}

Status LinearPlan::State::check(const LinearWeights& weights, const LinearInputs& in,
                                const MutableMatrixView& y, std::span<std::byte> workspace) const {
  const LinearShape& w = weights.shape();
  const auto is_float = [](DType dtype) {
    return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
  };
  const bool codes = in.scales != nullptr;
  if (!(w == shape))
    return invalid(fmt::format("{} matrices [{}, {}] of {}, the plan is for {} [{}, {}] of {}", w.matrices,
                               w.n, w.k, scheme(w.scheme).name, shape.matrices, shape.n, shape.k,
                               scheme(shape.scheme).name));
  const Operand& activation = buffers.in.activation;
  if (const Format scales = weights.state().scale_format;
      packed_scales(shape.scheme, scales, activation) != scales)
    return invalid(
        fmt::format("weights of {} are packed with scales in {}, not for the plan's rows, rounded to {}",
                    scheme(shape.scheme).name, name(scales), name(activation.value)));
  if (weights.device() != device.index)
    return invalid(
        fmt::format("the weights are on device {}, the plan is for {}", weights.device(), device.index));
  if (in.x.rows < 0 || in.x.rows > options.max_rows)
    return invalid(fmt::format("{} rows, but the plan was made for 0..{}", in.x.rows, options.max_rows));
  if (in.x.cols != shape.k || y.rows != in.x.rows || y.cols != shape.n)
    return invalid(fmt::format("x is [{}, {}] and y [{}, {}], expected [{}, {}] and [{}, {}]", in.x.rows,
                               in.x.cols, y.rows, y.cols, in.x.rows, shape.k, in.x.rows, shape.n));
  if ((!codes && !is_float(in.x.dtype)) || !is_float(y.dtype))
    return invalid(
        fmt::format("x is {} and y {}, expected F32, F16 or BF16", name(in.x.dtype), name(y.dtype)));
  if (codes)
    if (const std::string why = refuses_codes(scheme(w.scheme), activation, in.x, in.token_scales);
        !why.empty())
      return invalid(why);
  if (in.x.rows > 0 && (in.x.data == nullptr || y.data == nullptr))
    return invalid(fmt::format("{} is a null pointer", in.x.data == nullptr ? "x" : "y"));
  if (reinterpret_cast<std::uintptr_t>(y.data) % 16 != 0) return invalid("y is not aligned to 16 bytes");
  if (workspace.size() < layout.bytes())
    return invalid(
        fmt::format("the workspace has {} bytes, the plan needs {}", workspace.size(), layout.bytes()));
  return {};
}

/// Rows as the multiply takes them: as they are, or in the order of its operands.
Status LinearPlan::State::make_rows(const LinearWeights::State& weights, const LinearInputs& in,
                                    const GemmKernel& kernel, std::byte* base, cudaStream_t stream,
                                    GemmArgs* args) const {
  const Operand& activation = buffers.in.activation;
  const bool grouped = in.offsets != nullptr, in_order = keeps_order(scheme(shape.scheme)),
             as_they_are = in_order ? kernel.reads_codes && are_boxes(in, activation)
                                    : !kernel.tiled && buffers.in.are(in.x);
  InputOrder order = kernel.order(shape.scheme);
  order.in_order = in_order;
  if (in_order && order.bytes != 0) order.bytes = byte_order({.in_order = true});
  InputArgs inputs = buffers.in.args(base, in.x, args->slots, order);
  inputs.experts = shape.matrices;
  inputs.scales = in.scales;
  inputs.token_scales = in.token_scales;
  inputs.start_next_early = !grouped;  // to read weights
  if (as_they_are) {
    args->inputs.rows = static_cast<const std::uint16_t*>(in.x.data);
    args->routed_early = !grouped;  // else the kernel before has cut items
    if (!in_order) return {};
    args->inputs.row_bytes = in.x.cols;
    args->inputs.box_rows = kBoxRows;
    if (has_row_scales(activation)) args->inputs.row_scales = static_cast<const float*>(in.scales);
    if (!has_record_scales(activation)) return {};
    return cuda::check(launch_record_scales(inputs, stream), "order scales of rows");
  }
  // Which group a row is of matters only in tiles, and where groups have scales of their own.
  const bool per_tensor = activation.quantized() && activation.group.n == 0;
  inputs.static_scales = activation.may_be_static() && weights.static_scales.data() != nullptr
                             ? weights.static_scales.as<const TensorScale>()
                             : nullptr;
  if (per_tensor || inputs.static_scales != nullptr || kernel.tiled) inputs.offsets = in.offsets;
  if (kernel.tiled && grouped) inputs.expert_rows = buffers.expert_rows.at(base);
  return cuda::check(launch_inputs(inputs, stream), "round rows");
}

/// Items of the groups' rows, unless one matrix takes all; rows; the multiply.
Status LinearPlan::State::launch(const LinearWeights::State& weights, const LinearInputs& in,
                                 const MutableMatrixView& y, std::byte* base, cudaStream_t stream) const {
  const DeviceMatrices& w = weights.matrices;
  const PackedShape packed = packed_shape(shape, buffers.in.activation);
  const auto rows = static_cast<std::int32_t>(in.x.rows);
  const GemmChoice& choice = table.at(rows);
  GemmKernel kernel = choice.kernel();
  if (kernel.tiled && in.offsets == nullptr) kernel.tokens = rows_of_item(kernel, rows);
  GemmArgs args{.weights = w.data,
                .expert_stride = w.expert_stride,
                .groups = static_cast<std::int32_t>(packed.units / kGroupUnits),
                .steps = static_cast<std::int32_t>(packed.records),
                .rows = static_cast<std::int32_t>(shape.n),
                .experts = shape.matrices,
                .slots = rows,
                .inputs = buffers.in.gemm(base, kernel.tiled),
                .routing = {},
                .routed_early = true,
                .kind = GemmKind::down,
                .bias = in.bias,
                .out = y.data,
                .out_stride = shape.n,
                .out_dtype = y.dtype};
  if (in.offsets != nullptr) {
    args.items = buffers.items.at(base);
    args.most_items = buffers.most_items;
    args.item_count = buffers.item_count.at(base);
    const ItemArgs items{.experts = shape.matrices,
                         .expert_offsets = in.offsets,
                         .rows = rows,
                         .most_items = buffers.most_items,
                         .items = buffers.items.at(base),
                         .item_count = buffers.item_count.at(base),
                         .expert_rows = buffers.expert_rows.at(base),
                         .tokens = kernel.tokens,
                         .step = kernel.token_step,
                         .band_items = kernel.band_items()};
    if (Status status = cuda::check(launch_items(items, stream), "cut rows into items"); !status.ok())
      return status;
  }
  if (Status status = make_rows(weights, in, kernel, base, stream, &args); !status.ok()) return status;
  const int parts = in.offsets == nullptr ? table.parts(rows) : 1;
  if (parts == 1)
    return cuda::check(launch_gemm(kernel, args, nullptr, device.multiprocessors, stream), "multiply");
  args.parts = parts;
  args.expert_stride = 0;
  args.steps /= parts;
  args.bias = nullptr;
  args.out = buffers.part_sums.at(base);
  args.out_dtype = DType::f32;
  if (Status status =
          cuda::check(launch_gemm(kernel, args, nullptr, device.multiprocessors, stream), "multiply");
      !status.ok())
    return status;
  return cuda::check(launch_sum({parts, buffers.part_sums.at(base), in.bias, y}, stream), "add parts up");
}

Status LinearPlan::grouped_gemm(const LinearWeights& weights, const LinearInputs& inputs,
                                const MutableMatrixView& y, std::span<std::byte> workspace,
                                Stream stream) const {
  const State& plan = *state_;
  if (Status status = plan.check(weights, inputs, y, workspace); !status.ok()) return status;
  if (inputs.offsets == nullptr && plan.shape.matrices != 1)
    return invalid(fmt::format("{} matrices, but no offsets", plan.shape.matrices));
  if (inputs.x.rows == 0) return {};
  const DeviceGuard guard(plan.device.index);
  std::byte* base = WorkspaceLayout::align(workspace.data());
  const auto launch = [&] { return plan.launch(weights.state(), inputs, y, base, native(stream)); };
  if (!plan.options.debug_workspace) return launch();
  return DebugWorkspace(plan.layout, base, Device::cuda(plan.device.index), stream).run("a product", launch);
}

Status LinearPlan::scaled_mm(const LinearWeights& weights, const LinearInputs& inputs,
                             const MutableMatrixView& y, std::span<std::byte> workspace,
                             Stream stream) const {
  if (inputs.offsets != nullptr || weights.shape().matrices != 1)
    return invalid(fmt::format("{} matrices{}: expected one, without offsets", weights.shape().matrices,
                               inputs.offsets == nullptr ? "" : " and offsets"));
  return grouped_gemm(weights, inputs, y, workspace, stream);
}

}  // namespace gatefold::cuda
