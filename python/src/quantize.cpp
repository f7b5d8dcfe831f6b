// Matrices in one scheme: quantize, dequantize, multiply.
#include <fmt/format.h>

#include <cstring>

#include "gatefold/cuda_quantize.h"
#include "gatefold/linear.h"
#include "module.h"
#include "plans.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {
namespace {

using Array = nb::ndarray<nb::numpy, const std::uint8_t>;

/// Bytes that `owner` keeps alive, as uint8 [rows, ...].
Array bytes(const std::vector<std::byte>& part, std::int64_t rows, nb::handle owner) {
  const auto r = static_cast<std::size_t>(rows);
  return Array(part.data(), {r, r == 0 ? 0 : part.size() / r}, owner);
}

std::vector<std::byte> to_bytes(nb::handle object, const char* name, std::size_t wanted) {
  if (object.is_none()) {
    if (wanted != 0) invalid(fmt::format("{} is missing", name));
    return {};
  }
  const Tensor tensor(object, name);
  tensor.expect_contiguous();
  tensor.expect_device(Device::cpu());
  std::size_t size = static_cast<std::size_t>(bits(tensor.dtype()) / 8);
  for (std::size_t i = 0; i < tensor.rank(); ++i) size *= static_cast<std::size_t>(tensor.size(i));
  if (size != wanted) invalid(fmt::format("{} is {} bytes, expected {}", name, size, wanted));
  return {tensor.data(), tensor.data() + size};
}

/// Memory of its own for a new numpy array.
template <class T>
nb::ndarray<nb::numpy, T> new_array(std::vector<T> values, std::initializer_list<std::size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

QuantizedMatrix from_parts(const std::string& scheme_name, std::int64_t n, std::int64_t k, nb::object values,
                           nb::object scales, nb::object zero_points, std::optional<float> tensor_scale,
                           bool divides) {
  QuantizedMatrix m;
  m.scheme = to_scheme(scheme_name);
  check(check_shape(m.scheme, n, k));
  m.n = n;
  m.k = k;
  m.scale_format = scheme(m.scheme).weight.scale;
  const QuantizedLayout layout = m.layout();
  m.values = to_bytes(values, "values", layout.value_bytes);
  m.scales = to_bytes(scales, "scales", layout.scale_bytes);
  m.zero_points = to_bytes(zero_points, "zero_points", layout.zero_bytes);
  if (scheme(m.scheme).weight.tensor_scale.stored() != tensor_scale.has_value())
    invalid(fmt::format("tensor_scale is {}, but {} {} one", tensor_scale ? "given" : "missing", scheme_name,
                        tensor_scale ? "has not" : "has"));
  if (tensor_scale) m.tensor_scale = {*tensor_scale, divides};
  return m;
}

nb::ndarray<nb::numpy, float> dequantized(const QuantizedMatrix& m) {
  std::vector<float> out(static_cast<std::size_t>(m.n * m.k));
  {
    const nb::gil_scoped_release release;
    dequantize(m, out.data());
  }
  return new_array(std::move(out), {static_cast<std::size_t>(m.n), static_cast<std::size_t>(m.k)});
}

void add_matrix(nb::module_& m) {
  nb::class_<QuantizedMatrix>(
      m, "QuantizedMatrix",
      "One weight matrix [n, k] in the canonical layout of a scheme: W = (code - zero_point) * (scale * "
      "tensor_scale). "
      "Arrays are views of its memory, as bytes: values [n, ...] row-major codes, of two 4-bit codes the "
      "even k in the "
      "low nibble; scales [scale rows, ...] in the scheme's scale format; zero_points [scale rows, ...].")
      .def(
          "__init__",
          [](QuantizedMatrix* self, const std::string& scheme, std::int64_t n, std::int64_t k,
             nb::object values, nb::object scales, nb::object zero_points, std::optional<float> tensor_scale,
             bool divides) {
            new (self)
                QuantizedMatrix(from_parts(scheme, n, k, values, scales, zero_points, tensor_scale, divides));
          },
          "scheme"_a, "n"_a, "k"_a, "values"_a, "scales"_a = nb::none(), "zero_points"_a = nb::none(),
          "tensor_scale"_a = nb::none(), "tensor_scale_divides"_a = false)
      .def_prop_ro("scheme", [](const QuantizedMatrix& q) { return std::string(scheme(q.scheme).name); })
      .def_ro("n", &QuantizedMatrix::n)
      .def_ro("k", &QuantizedMatrix::k)
      .def_prop_ro("values",
                   [](nb::pointer_and_handle<QuantizedMatrix> q) { return bytes(q.p->values, q.p->n, q.h); })
      .def_prop_ro("scales",
                   [](nb::pointer_and_handle<QuantizedMatrix> q) {
                     return bytes(q.p->scales, q.p->layout().scale_rows, q.h);
                   })
      .def_prop_ro("zero_points",
                   [](nb::pointer_and_handle<QuantizedMatrix> q) {
                     return bytes(q.p->zero_points, q.p->zero_points.empty() ? 0 : q.p->layout().scale_rows,
                                  q.h);
                   })
      .def_prop_ro("tensor_scale",
                   [](const QuantizedMatrix& q) -> std::optional<float> {
                     if (!scheme(q.scheme).weight.tensor_scale.stored()) return std::nullopt;
                     return q.tensor_scale.value;
                   })
      .def_prop_ro("tensor_scale_divides", [](const QuantizedMatrix& q) { return q.tensor_scale.divides; })
      .def("dequantize", &dequantized, "W as a new float32 array [n, k].");

  m.def(
      "_matrix_parts",
      [](const std::string& name, std::int64_t n, std::int64_t k) {
        const SchemeId id = to_scheme(name);
        check(check_shape(id, n, k));
        const QuantizedLayout layout = quantized_layout(scheme(id).weight, scheme(id).weight.scale, n, k);
        const auto rows = static_cast<std::size_t>(std::max<std::int64_t>(1, layout.scale_rows));
        nb::dict parts;
        parts["values"] = nb::make_tuple(n, layout.row_bytes);
        if (layout.scale_bytes != 0)
          parts["scales"] = nb::make_tuple(layout.scale_rows, layout.scale_bytes / rows);
        if (layout.zero_bytes != 0)
          parts["zero_points"] = nb::make_tuple(layout.scale_rows, layout.zero_bytes / rows);
        if (scheme(id).weight.tensor_scale.stored()) parts["tensor_scales"] = nb::make_tuple(2);
        return parts;
      },
      "For gatefold.torch: the shapes of a matrix's parts in bytes; of those that the scheme has.");
  m.def(
      "quantize",
      [](nb::object weights_object, const std::string& scheme, bool scale_search, bool allow_nonfinite) {
        const Tensor weights(weights_object, "weights");
        weights.expect_device(Device::cpu());
        const MatrixView view = weights.matrix();
        const SchemeId id = to_scheme(scheme);
        const nb::gil_scoped_release release;
        return value(gatefold::quantize(id, view, {scale_search, allow_nonfinite}));
      },
      "weights"_a, "scheme"_a, nb::kw_only(), "scale_search"_a = false, "allow_nonfinite"_a = false,
      "Rounds weights [n, k] (f32, f16, bf16; contiguous, CPU) to the nearest codes. Raises InvalidArgument "
      "for a shape "
      "that the scheme cannot store, and for NaN or Inf, with its place.");
}

/// Rows in codes in host memory, or (then `rows` has but their scheme and shape) in tensors on a GPU.
struct Activation {
  QuantizedActivation rows;
  nb::object values, scales, token_scales;
  bool on_gpu() const { return values.is_valid(); }
};

Activation quantize_on_gpu(const Tensor& x, SchemeId id) {
  const MatrixView view = x.matrix();
  const ActivationRow row = value(activation_row(id, view.cols));
  const cuda::ActivationLayout layout = value(cuda::activation_layout(id, view.rows, view.cols));
  const std::int64_t token_scales = layout.token_scale_bytes == 0 ? 0 : view.rows;
  Activation made{{.scheme = id, .rows = view.rows, .k = view.cols},
                  x.make({view.rows, row.value_bytes}, DType::u8),
                  x.make({view.rows, row.scale_bytes}, DType::u8),
                  x.make({token_scales}, DType::f32)};
  const nb::object workspace = x.make({static_cast<std::int64_t>(layout.workspace_bytes)}, DType::u8);
  const auto place = [&](nb::handle object) {
    const Tensor tensor(object, "a new tensor");
    tensor.expect_device(x.device());
    return tensor.data();
  };
  const cuda::QuantizeOutputs outputs{place(made.values), place(made.scales),
                                      reinterpret_cast<float*>(place(made.token_scales))};
  const std::span memory(place(workspace), layout.workspace_bytes);
  const cuda::Stream stream = x.stream();
  {
    const nb::gil_scoped_release release;
    const cuda::DeviceGuard guard(x.device().index);
    check(cuda::quantize_activations(id, {.x = view, .rows = view.rows}, outputs, memory, stream));
  }
  return made;
}

void add_products(nb::module_& m) {
  nb::class_<Activation>(
      m, "QuantizedActivation",
      "Rows of activations in the codes of a scheme's activation operand, as bytes: values [rows, bytes of k "
      "codes]; scales [rows, bytes]; token_scales f32 [rows], or [0] if the operand has none. Arrays are "
      "views "
      "of its memory; those of a CUDA tensor are tensors of its library.")
      .def_prop_ro("scheme", [](const Activation& q) { return std::string(scheme(q.rows.scheme).name); })
      .def_prop_ro("rows", [](const Activation& q) { return q.rows.rows; })
      .def_prop_ro("k", [](const Activation& q) { return q.rows.k; })
      .def_prop_ro("values",
                   [](nb::pointer_and_handle<Activation> q) {
                     return q.p->on_gpu() ? q.p->values
                                          : nb::cast(bytes(q.p->rows.values, q.p->rows.rows, q.h));
                   })
      .def_prop_ro("scales",
                   [](nb::pointer_and_handle<Activation> q) {
                     return q.p->on_gpu() ? q.p->scales
                                          : nb::cast(bytes(q.p->rows.scales, q.p->rows.rows, q.h));
                   })
      .def_prop_ro("token_scales", [](nb::pointer_and_handle<Activation> q) {
        const std::vector<float>& scales = q.p->rows.token_scales;
        return q.p->on_gpu()
                   ? q.p->token_scales
                   : nb::cast(nb::ndarray<nb::numpy, const float>(scales.data(), {scales.size()}, q.h));
      });

  m.def(
      "quantize_activation",
      [](nb::object x_object, const std::string& scheme) {
        const Tensor x(x_object, "x");
        const MatrixView view = x.matrix();
        const SchemeId id = to_scheme(scheme);
        use_threads();
        if (x.device().kind == Device::Kind::cuda) return quantize_on_gpu(x, id);
        const nb::gil_scoped_release release;
        return Activation{value(gatefold::quantize_activation(id, view)), {}, {}, {}};
      },
      "x"_a, "scheme"_a,
      "x [rows, k] (f32, f16, bf16; contiguous) in the codes of the scheme's activation operand: the same "
      "bytes "
      "on the CPU and on a GPU, where the work is queued in torch's or cupy's current stream. Raises "
      "InvalidArgument, also for schemes that leave activations in 16 bit.");
  m.def(
      "scaled_mm",
      [](const Activation& x, const QuantizedMatrix& w) {
        if (x.on_gpu()) invalid("x is on a GPU, expected the CPU: on GPUs there is LinearPlan.scaled_mm");
        use_threads();
        const std::int64_t rows = x.rows.rows;
        std::vector<float> y(static_cast<std::size_t>(rows * w.n));
        {
          const nb::gil_scoped_release release;
          check(gatefold::scaled_mm(x.rows, w, {y.data(), DType::f32, rows, w.n}));
        }
        return new_array(std::move(y), {static_cast<std::size_t>(rows), static_cast<std::size_t>(w.n)});
      },
      "x"_a, "w"_a,
      "x w^T as a new float32 array [rows, n]. Raises InvalidArgument for different schemes or k.");
  m.def(
      "grouped_gemm",
      [](nb::object x_object, const std::vector<std::int64_t>& offsets, nb::sequence weights) {
        const Tensor x(x_object, "x");
        x.expect_device(Device::cpu());
        const MatrixView view = x.matrix();
        std::vector<nb::object> held;
        const std::vector<const QuantizedMatrix*> matrices = to_matrices(weights, "weights", held);
        const std::int64_t n = matrices.empty() ? 0 : matrices.front()->n;
        use_threads();
        std::vector<float> y(static_cast<std::size_t>(view.rows * n));
        {
          const nb::gil_scoped_release release;
          check(gatefold::grouped_gemm(view, offsets, matrices, {y.data(), DType::f32, view.rows, n}));
        }
        return new_array(std::move(y), {static_cast<std::size_t>(view.rows), static_cast<std::size_t>(n)});
      },
      "x"_a, "offsets"_a, "weights"_a,
      "Rows offsets[g] to offsets[g + 1] of x times weights[g]^T, for every group: a new float32 array "
      "[rows, n]. Raises "
      "InvalidArgument for offsets that decrease or do not end at the last row, and for weights that do not "
      "fit.");
}

}  // namespace

std::vector<const QuantizedMatrix*> to_matrices(nb::handle object, const char* name,
                                                std::vector<nb::object>& held) {
  std::vector<const QuantizedMatrix*> matrices;
  const auto add = [&](nb::handle matrix) {
    if (!nb::isinstance<QuantizedMatrix>(matrix))
      throw nb::type_error(fmt::format("{}[{}] is a {}, expected a QuantizedMatrix", name, matrices.size(),
                                       nb::repr(matrix.type()).c_str())
                               .c_str());
    matrices.push_back(nb::inst_ptr<QuantizedMatrix>(matrix));
    held.push_back(nb::borrow(matrix));
  };
  if (nb::isinstance<QuantizedMatrix>(object))
    add(object);
  else
    for (const nb::handle matrix : object) add(matrix);
  return matrices;
}

void add_quantize(nb::module_& m) {
  add_matrix(m);
  add_products(m);
}

}  // namespace gatefold::python
