// Products with packed matrices on a GPU.
#include <fmt/format.h>

#include <memory>

#include <nanobind/stl/unique_ptr.h>
#include "gatefold/cuda_linear.h"
#include "input_rows.h"
#include "layer.h"
#include "module.h"
#include "spec.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {
namespace {

std::string device_text(const cuda::LinearWeights& weights) {
  return fmt::format("cuda:{}", weights.device());
}

cuda::LinearWeights pack(nb::object object, const std::string& device_name) {
  const Device device = to_device(device_name);
  if (device.kind == Device::Kind::cpu)
    invalid(
        fmt::format("device = '{}': matrices are packed for GPUs; on the CPU gatefold.scaled_mm and "
                    "gatefold.grouped_gemm multiply them as they are",
                    device_name));
  std::vector<nb::object> held;
  const std::vector<const QuantizedMatrix*> matrices = to_matrices(object, "matrices", held);
  use_threads();
  const nb::gil_scoped_release release;
  return value(cuda::LinearWeights::pack(matrices, device.index));
}

/// A plan with the matrices that it multiplies by.
class MatrixPlan {
 public:
  MatrixPlan(const cuda::LinearWeights& weights, const cuda::LinearOptions& options)
      : weights_(weights),
        options_(options),
        plan_(value(cuda::LinearPlan::create(weights.shape(), options, weights.device()))),
        workspaces_(plan_.workspace_bytes(), Device::cuda(weights.device())) {}

  nb::object scaled_mm(nb::object x, nb::object bias, nb::object scales, nb::object token_scales,
                       nb::object out, std::optional<std::uintptr_t> stream) {
    return multiply(std::move(x), nb::none(), std::move(bias), std::move(scales), std::move(token_scales),
                    std::move(out), stream);
  }

  nb::object grouped_gemm(nb::object x, nb::object offsets, nb::object bias, nb::object scales,
                          nb::object token_scales, nb::object out, std::optional<std::uintptr_t> stream) {
    if (offsets.is_none()) invalid("offsets is None, expected a tensor");
    return multiply(std::move(x), std::move(offsets), std::move(bias), std::move(scales),
                    std::move(token_scales), std::move(out), stream);
  }

  const cuda::LinearWeights& weights() const { return weights_; }
  const cuda::LinearOptions& options() const { return options_; }
  std::size_t workspace_bytes() const { return plan_.workspace_bytes(); }

 private:
  /// scaled_mm if there are no offsets.
  nb::object multiply(nb::object x_object, nb::object offsets_object, nb::object bias_object,
                      nb::object scales, nb::object token_scales, nb::object out_object,
                      std::optional<std::uintptr_t> stream_number) {
    const cuda::LinearShape& shape = weights_.shape();
    const Device device = Device::cuda(weights_.device());
    const bool grouped = !offsets_object.is_none();
    const Tensor x(x_object, "x");
    x.expect_device(device);
    const InputRows rows(x, shape.scheme, shape.k, {"scales", scales}, {"token_scales", token_scales});
    cuda::LinearInputs inputs{.x = rows.x(), .scales = rows.scales(), .token_scales = rows.token_scales()};
    std::optional<Tensor> offsets, bias;
    if (grouped) {
      offsets.emplace(offsets_object, "offsets");
      inputs.offsets = offsets->elements<std::int32_t>({shape.matrices + 1}, "[matrices + 1]", device);
    }
    if (!bias_object.is_none()) {
      bias.emplace(bias_object, "bias");
      inputs.bias = grouped ? bias->elements<float>({shape.matrices, shape.n}, "[matrices, n]", device)
                            : bias->elements<float>({shape.n}, "[n]", device);
    }
    if (out_object.is_none())
      out_object = x.make({inputs.x.rows, shape.n}, rows.result_type(options_.act_dtype));
    const Tensor out(out_object, "out", true);
    out.expect_shape({inputs.x.rows, shape.n}, "[rows, n]");
    out.expect_device(device);
    const MatrixView view = out.matrix();
    const MutableMatrixView y{const_cast<void*>(view.data), view.dtype, view.rows, view.cols};
    const cuda::Stream stream = stream_number ? reinterpret_cast<cuda::Stream>(*stream_number) : x.stream();
    use_threads();
    const nb::gil_scoped_release release;
    workspaces_.lend(stream, x.is_torch() && !stream_number, [&](std::span<std::byte> workspace) {
      return grouped ? plan_.grouped_gemm(weights_, inputs, y, workspace, stream)
                     : plan_.scaled_mm(weights_, inputs, y, workspace, stream);
    });
    return out_object;
  }

  cuda::LinearWeights weights_;
  cuda::LinearOptions options_;
  cuda::LinearPlan plan_;
  Workspaces workspaces_;
};

}  // namespace

void add_linear(nb::module_& m) {
  nb::class_<cuda::LinearWeights>(
      m, "LinearWeights",
      "Matrices of one scheme and shape in the memory of a GPU, as its kernels read them. Immutable: any "
      "number of plans and threads may use it.")
      .def_static("pack", &pack, "matrices"_a, "device"_a = "cuda",
                  R"(Packs a QuantizedMatrix [n, k], or a sequence of them of one scheme and shape, for a GPU:
'cuda' or 'cuda:N'. They are copied. Memory beside the packed matrices: up to three times 16 MiB, on the GPU and on the
host.

Raises InvalidArgument for a device that is no GPU and for matrices of different schemes or shapes, Unsupported without a
GPU that the kernels can use and for schemes that they cannot multiply, IoError if there is not enough memory.)",
                  nb::sig("def pack(matrices: QuantizedMatrix | collections.abc.Iterable[QuantizedMatrix], "
                          "device: str = 'cuda') -> LinearWeights"))
      .def_prop_ro("scheme",
                   [](const cuda::LinearWeights& w) { return std::string(scheme(w.shape().scheme).name); })
      .def_prop_ro(
          "matrices", [](const cuda::LinearWeights& w) { return w.shape().matrices; }, "How many.")
      .def_prop_ro(
          "n", [](const cuda::LinearWeights& w) { return w.shape().n; }, "Rows of each: outputs.")
      .def_prop_ro(
          "k", [](const cuda::LinearWeights& w) { return w.shape().k; }, "Columns of each: inputs.")
      .def_prop_ro("device", &device_text, "'cuda:N'.")
      .def_prop_ro("packed_bytes", &cuda::LinearWeights::packed_bytes)
      .def("__repr__", [](const cuda::LinearWeights& w) {
        const cuda::LinearShape& s = w.shape();
        return fmt::format("LinearWeights('{}', matrices={}, n={}, k={}, device='{}')", scheme(s.scheme).name,
                           s.matrices, s.n, s.k, device_text(w));
      });

  nb::class_<MatrixPlan>(
      m, "LinearPlan",
      "Chooses the kernels for products with packed matrices on a GPU, and runs them. Several "
      "threads may call one plan at once; each call has a workspace of its own. A plan keeps its "
      "weights alive.")
      .def_static(
          "create",
          [](const cuda::LinearWeights& weights, int max_rows, const std::string& act_dtype,
             bool weights_only, bool batch_invariant, bool fast_accumulation, bool debug_workspace) {
            return std::make_unique<MatrixPlan>(weights,
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
