// Products with packed matrices on a GPU.
#include <fmt/format.h>

#include <memory>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include "linear.h"
#include "module.h"
#include "spec.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {
namespace {

std::string device_text(const PackedMatrices& m) {
  return fmt::format("cuda:{}", m.weights().device());
}

std::shared_ptr<PackedMatrices> pack(nb::object object, const std::string& device_name,
                                     const std::string& act_dtype, bool weights_only, bool batch_invariant,
                                     bool fast_accumulation) {
  const Device device = to_device(device_name);
  if (device.kind == Device::Kind::cpu)
    invalid(
        fmt::format("device = '{}': matrices are packed for GPUs; on the CPU gatefold.scaled_mm and "
                    "gatefold.grouped_gemm multiply them as they are",
                    device_name));
  const cuda::LinearOptions options{.act_dtype = to_act_dtype(act_dtype),
                                    .weights_only = weights_only,
                                    .batch_invariant = batch_invariant,
                                    .fast_accumulation = fast_accumulation};
  std::vector<nb::object> held;
  const std::vector<const QuantizedMatrix*> matrices = to_matrices(object, "matrices", held);
  use_threads();
  const nb::gil_scoped_release release;
  return Handled::make<PackedMatrices>(value(cuda::LinearWeights::pack(matrices, options, device.index)),
                                       options);
}

/// A plan with the matrices that it multiplies by.
class MatrixPlan {
 public:
  MatrixPlan(std::shared_ptr<PackedMatrices> weights, const cuda::LinearOptions& options)
      : weights_(std::move(weights)), options_(options), planned_(weights_->weights(), options) {}

  nb::object scaled_mm(nb::object x, nb::object bias, nb::object scales, nb::object token_scales,
                       nb::object out, std::optional<std::uintptr_t> stream) {
    return multiply(x, std::nullopt, bias, scales, token_scales, std::move(out), stream);
  }

  nb::object grouped_gemm(nb::object x, nb::object offsets, nb::object bias, nb::object scales,
                          nb::object token_scales, nb::object out, std::optional<std::uintptr_t> stream) {
    return multiply(x, Tensor(offsets, "offsets"), bias, scales, token_scales, std::move(out), stream);
  }

  const std::shared_ptr<PackedMatrices>& weights() const { return weights_; }
  const cuda::LinearOptions& options() const { return options_; }
  std::size_t workspace_bytes() const { return planned_.plan().workspace_bytes(); }

 private:
  nb::object multiply(nb::handle x_object, std::optional<Tensor> offsets, nb::handle bias, nb::handle scales,
                      nb::handle token_scales, nb::object out_object,
                      std::optional<std::uintptr_t> stream_number) {
    const Tensor x(x_object, "x");
    const ProductInputs inputs(*weights_, x, std::move(offsets), Tensor::maybe(bias, "bias"),
                               Tensor::maybe(scales, "scales"), Tensor::maybe(token_scales, "token_scales"));
    const std::int64_t rows = x.size(0), n = weights_->weights().shape().n;
    if (out_object.is_none()) out_object = x.make({rows, n}, inputs.result_type(options_.act_dtype));
    const Tensor out(out_object, "out", true);
    out.expect_shape({rows, n}, "[rows, n]");
    out.expect_device(weights_->device());
    const MutableMatrixView y = out.mutable_matrix();
    if (reinterpret_cast<std::uintptr_t>(y.data) % 16 != 0) invalid("out is not aligned to 16 bytes");
    const cuda::Stream stream = stream_number ? reinterpret_cast<cuda::Stream>(*stream_number) : x.stream();
    const nb::gil_scoped_release release;
    planned_.run(inputs.get(), y, stream, x.is_torch() && !stream_number);
    return out_object;
  }

  std::shared_ptr<PackedMatrices> weights_;
  cuda::LinearOptions options_;
  PlannedProduct planned_;
};

}  // namespace

PlannedProduct::PlannedProduct(const cuda::LinearWeights& weights, const cuda::LinearOptions& options)
    : weights_(weights),
      plan_(value(cuda::LinearPlan::create(weights.shape(), options, weights.device()))),
      workspaces_(plan_.workspace_bytes(), Device::cuda(weights.device())) {}

void PlannedProduct::run(const cuda::LinearInputs& inputs, const MutableMatrixView& y, cuda::Stream stream,
                         bool in_torch) {
  use_threads();
  workspaces_.lend(stream, in_torch, [&](std::span<std::byte> workspace) {
    return inputs.offsets == nullptr ? plan_.scaled_mm(weights_, inputs, y, workspace, stream)
                                     : plan_.grouped_gemm(weights_, inputs, y, workspace, stream);
  });
}

std::shared_ptr<PlannedProduct> PackedMatrices::planned(const MatrixView& x) {
  cuda::LinearOptions options = options_;
  if (x.dtype == DType::f16 || x.dtype == DType::bf16) options.act_dtype = x.dtype;
  options.debug_workspace = debugging_operators();
  auto& plans = options.act_dtype == DType::f16 ? f16_plans_ : bf16_plans_;
  return plans.find(x.rows, {.debug = options.debug_workspace}, [&](int most) {
    options.max_rows = most;
    return std::make_shared<PlannedProduct>(weights_, options);
  });
}

ProductInputs::ProductInputs(const PackedMatrices& by, const Tensor& x, std::optional<Tensor> offsets,
                             std::optional<Tensor> bias, std::optional<Tensor> scales,
                             std::optional<Tensor> token_scales)
    : rows_(x, by.device(), by.weights().shape().scheme, by.weights().shape().k, std::move(scales),
            std::move(token_scales)),
      offsets_(std::move(offsets)),
      bias_(std::move(bias)),
      inputs_{.x = rows_.x(), .scales = rows_.scales(), .token_scales = rows_.token_scales()} {
  const cuda::LinearShape& shape = by.weights().shape();
  if (!offsets_ && shape.matrices != 1)
    invalid(fmt::format("scaled_mm is of one matrix, but the weights are {}", shape.matrices));
  if (offsets_) inputs_.offsets = offsets_->integers({shape.matrices + 1}, "[matrices + 1]", by.device());
  if (bias_)
    inputs_.bias = offsets_ ? bias_->floats({shape.matrices, shape.n}, "[matrices, n]", by.device())
                            : bias_->floats({shape.n}, "[n]", by.device());
}

void add_linear(nb::module_& m) {
  nb::class_<PackedMatrices>(
      m, "LinearWeights",
      "Matrices of one scheme and shape in the memory of a GPU, as its kernels read them. Immutable: any "
      "number of plans and threads may use it.")
      .def_static("pack", &pack, "matrices"_a, "device"_a = "cuda", nb::kw_only(), "act_dtype"_a = "bf16",
                  "weights_only"_a = false, "batch_invariant"_a = false, "fast_accumulation"_a = false,
                  R"(Packs a QuantizedMatrix [n, k], or a sequence of them of one scheme and shape, for a GPU:
'cuda' or 'cuda:N'. They are copied. Memory beside the packed matrices: up to three times 16 MiB, on the GPU and on the
host.

act_dtype, weights_only: of plans that they are for, as for LinearPlan.create. Beside rows in f16 that are not quantized,
group scales of int4 are packed in f16 or f32, else in bf16; other weights are the same for all plans. act_dtype is also what
torch operators round rows in f32 to; they multiply with weights_only, batch_invariant and fast_accumulation.

Raises InvalidArgument for a device that is no GPU and for matrices of different schemes or shapes, Unsupported without a
GPU that the kernels can use and for schemes that they cannot multiply, IoError if there is not enough memory.)",
                  nb::sig("def pack(matrices: QuantizedMatrix | collections.abc.Iterable[QuantizedMatrix], "
                          "device: str = 'cuda', *, act_dtype: str = 'bf16', weights_only: bool = False, "
                          "batch_invariant: bool = False, fast_accumulation: bool = False) -> LinearWeights"))
      .def_prop_ro(
          "scheme",
          [](const PackedMatrices& m) { return std::string(scheme(m.weights().shape().scheme).name); })
      .def_prop_ro(
          "matrices", [](const PackedMatrices& m) { return m.weights().shape().matrices; }, "How many.")
      .def_prop_ro(
          "n", [](const PackedMatrices& m) { return m.weights().shape().n; }, "Rows of each: outputs.")
      .def_prop_ro(
          "k", [](const PackedMatrices& m) { return m.weights().shape().k; }, "Columns of each: inputs.")
      .def_prop_ro("device", &device_text, "'cuda:N'.")
      .def_prop_ro("packed_bytes", [](const PackedMatrices& m) { return m.weights().packed_bytes(); })
      .def_prop_ro("handle", &PackedMatrices::handle,
                   "The number by which torch operators know these weights, while this object lives.")
      .def("publish", &PackedMatrices::publish, "name"_a,
           "A handle that follows from the name: the same in every process. Raises InvalidArgument if other "
           "weights that live have the name.")
      .def("__deepcopy__", [](std::shared_ptr<PackedMatrices> m, nb::handle) { return m; })  // immutable
      .def("__repr__", [](const PackedMatrices& m) {
        const cuda::LinearShape& s = m.weights().shape();
        return fmt::format("LinearWeights('{}', matrices={}, n={}, k={}, device='{}')", scheme(s.scheme).name,
                           s.matrices, s.n, s.k, device_text(m));
      });

  nb::class_<MatrixPlan>(
      m, "LinearPlan",
      "Chooses the kernels for products with packed matrices on a GPU, and runs them. Several "
      "threads may call one plan at once; each call has a workspace of its own. A plan keeps its "
      "weights alive.")
      .def_static(
          "create",
          [](std::shared_ptr<PackedMatrices> weights, int max_rows, const std::string& act_dtype,
             bool weights_only, bool batch_invariant, bool fast_accumulation, bool debug_workspace) {
            return std::make_unique<MatrixPlan>(std::move(weights),
                                                cuda::LinearOptions{.max_rows = max_rows,
                                                                    .act_dtype = to_act_dtype(act_dtype),
                                                                    .weights_only = weights_only,
                                                                    .debug_workspace = debug_workspace,
                                                                    .batch_invariant = batch_invariant,
                                                                    .fast_accumulation = fast_accumulation});
          },
          "weights"_a, nb::kw_only(), "max_rows"_a = 512, "act_dtype"_a = "bf16", "weights_only"_a = false,
          "batch_invariant"_a = false, "fast_accumulation"_a = false, "debug_workspace"_a = false,
          R"(max_rows: of x in a call. act_dtype: what activations that are not quantized are rounded to, 'bf16' or
'f16'. The others are those of MoePlan.create. Raises InvalidArgument for an option out of range, Unsupported for a scheme
that the kernels cannot multiply.)")
      .def("scaled_mm", &MatrixPlan::scaled_mm, "x"_a, nb::kw_only(), "bias"_a = nb::none(),
           "scales"_a = nb::none(), "token_scales"_a = nb::none(), "out"_a = nb::none(),
           "stream"_a = nb::none(),
           nb::sig("def scaled_mm(self, x: object, *, bias: object = None, scales: object = None, "
                   "token_scales: object = None, out: object = None, stream: int | None = None) -> object"),
           R"(x w^T (+ bias) -> [rows, n], by weights of one matrix.

x [rows, k] f32, f16 or bf16, contiguous, on the weights' GPU, is rounded to the scheme's activations. bias [n] f32.
Returns `out` (f32, f16 or bf16, aligned to 16 bytes), or a new tensor of x's type.

scales: x has the codes of the scheme's activations, and these are their scales; both, and token_scales where the scheme
has them, are what quantize_activation gives, as bytes (uint8) or as what they are (float8_e4m3fn, int8; float32,
float8_e8m0fnu). The same bits as of numbers that are rounded to these codes. A new result is in act_dtype.

The work is queued in `stream` (a cudaStream_t as a number); None: in torch's or cupy's current one, the default stream
for other tensors. With torch's it can be captured in a graph. Raises InvalidArgument for a wrong argument, naming it and
its values.)")
      .def(
          "grouped_gemm", &MatrixPlan::grouped_gemm, "x"_a, "offsets"_a, nb::kw_only(), "bias"_a = nb::none(),
          "scales"_a = nb::none(), "token_scales"_a = nb::none(), "out"_a = nb::none(),
          "stream"_a = nb::none(),
          nb::sig("def grouped_gemm(self, x: object, offsets: object, *, bias: object = None, "
                  "scales: object = None, token_scales: object = None, out: object = None, "
                  "stream: int | None = None) -> object"),
          R"(Rows offsets[g] to offsets[g + 1] of x times the transpose of matrix g (+ bias[g]), for every g: [rows, n].

offsets [matrices + 1] int32, on the GPU, must not decrease; what lies outside of 0..rows is left out. Rows of the result
before the first and after the last of them are not written: in a new tensor they are anything. bias [matrices, n] f32.
Where one scale is that of all rows (fp8_tensor_afp8), it is that of all rows of a group. All else as for scaled_mm.)")
      .def("workspace_bytes", &MatrixPlan::workspace_bytes)
      .def_prop_ro("max_rows", [](const MatrixPlan& p) { return p.options().max_rows; })
      .def_prop_ro("weights", [](const MatrixPlan& p) { return p.weights(); });
}

}  // namespace gatefold::python
