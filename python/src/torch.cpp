// The kernels of the operators that gatefold.torch defines, over torch's stable C interface.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>

#include "gatefold/cuda_quantize.h"
#include "gatefold/linear.h"
#include "input_rows.h"
#include "layer.h"
#include "linear.h"
#include "module.h"
#include "tensor.h"
#include "torch_abi.h"

namespace nb = nanobind;

namespace gatefold::python {
namespace {

/// Set before the kernels are registered.
TorchFunctions torch;

void expect(TorchError error, const char* what) {
  if (error != 0) throw std::runtime_error(fmt::format("torch: {} failed", what));
}

/// The types that operators know, and torch's numbers for them.
std::span<const std::pair<DType, std::int32_t>> types() {
  static const std::pair<DType, std::int32_t> all[] = {
      {DType::f32, torch.aoti_torch_dtype_float32()},
      {DType::f16, torch.aoti_torch_dtype_float16()},
      {DType::bf16, torch.aoti_torch_dtype_bfloat16()},
      {DType::f64, torch.aoti_torch_dtype_float64()},
      {DType::i32, torch.aoti_torch_dtype_int32()},
      {DType::i64, torch.aoti_torch_dtype_int64()},
      {DType::u8, torch.aoti_torch_dtype_uint8()},
      {DType::i8, torch.aoti_torch_dtype_int8()},
      {DType::f8_e4m3, torch.aoti_torch_dtype_float8_e4m3fn()}};
  return all;
}

DType to_dtype(std::int32_t number, const char* name) {
  for (const auto& [dtype, torch_number] : types())
    if (torch_number == number) return dtype;
  invalid(fmt::format("{} has a type that is not known here (torch's {})", name, number));
}

/// Owns one reference.
class TensorHandle {
 public:
  TensorHandle(TorchTensor tensor, const char* name) : tensor_(tensor), view_(read(tensor, name)) {}

  /// A new one, contiguous.
  static TensorHandle empty(std::vector<std::int64_t> shape, DType dtype, const Device& device) {
    std::vector<std::int64_t> strides(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;)
      strides[i - 1] = strides[i] * std::max<std::int64_t>(1, shape[i]);
    const bool cuda = device.kind == Device::Kind::cuda;
    const auto type = std::ranges::find(types(), dtype, &std::pair<DType, std::int32_t>::first);
    TorchTensor made = nullptr;
    expect(torch.aoti_torch_empty_strided(
               static_cast<std::int64_t>(shape.size()), shape.data(), strides.data(), type->second,
               cuda ? torch.aoti_torch_device_type_cuda() : torch.aoti_torch_device_type_cpu(),
               cuda ? device.index : 0, &made),
           "empty_strided");
    return TensorHandle(made, "result");
  }

  const Tensor& operator*() const { return view_; }
  const Tensor* operator->() const { return &view_; }
  TorchValue release() { return reinterpret_cast<TorchValue>(tensor_.release()); }

 private:
  static Tensor read(TorchTensor tensor, const char* name) {
    std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
    std::int32_t dtype = 0, type = 0, index = 0;
    void* data = nullptr;
    expect(torch.aoti_torch_get_dim(tensor, &dim), "get_dim");
    expect(torch.aoti_torch_get_sizes(tensor, &sizes), "get_sizes");
    expect(torch.aoti_torch_get_strides(tensor, &strides), "get_strides");
    expect(torch.aoti_torch_get_dtype(tensor, &dtype), "get_dtype");
    expect(torch.aoti_torch_get_device_type(tensor, &type), "get_device_type");
    expect(torch.aoti_torch_get_device_index(tensor, &index), "get_device_index");
    expect(torch.aoti_torch_get_data_ptr(tensor, &data), "get_data_ptr");
    const bool cuda = type == torch.aoti_torch_device_type_cuda();
    return {name,
            to_dtype(dtype, name),
            cuda ? Device::cuda(index) : Device::cpu(),
            data,
            std::span(sizes, static_cast<std::size_t>(dim)),
            strides};
  }

  struct Delete {
    void operator()(TorchTensor tensor) const { torch.aoti_torch_delete_tensor_object(tensor); }
  };
  std::unique_ptr<AtenTensorOpaque, Delete> tensor_;
  Tensor view_;
};

TensorHandle tensor(TorchValue value, const char* name) {
  return {reinterpret_cast<TorchTensor>(value), name};
}

/// Of an argument that may be None: torch allocates a place for others with `new`.
std::optional<TorchValue> maybe(TorchValue value) {
  if (value == 0) return std::nullopt;
  const std::unique_ptr<TorchValue> place(reinterpret_cast<TorchValue*>(value));
  return *place;
}

std::optional<TensorHandle> maybe_tensor(TorchValue value, const char* name) {
  const std::optional<TorchValue> given = maybe(value);
  if (!given) return std::nullopt;
  return tensor(*given, name);
}

std::string string(TorchValue value) {
  const auto handle = reinterpret_cast<TorchString>(value);
  std::size_t length = 0;
  const char* text = nullptr;
  expect(torch.torch_string_length(handle, &length), "string_length");
  expect(torch.torch_string_c_str(handle, &text), "string_c_str");
  std::string copy(text, length);
  expect(torch.torch_delete_string(handle), "delete_string");
  return copy;
}

/// Copies, which borrow.
std::optional<Tensor> view(const std::optional<TensorHandle>& handle) {
  return handle ? std::optional<Tensor>(**handle) : std::nullopt;
}

/// The type of a result: what ScalarType? says, or else `otherwise`.
DType result_type(const std::optional<TorchValue>& dtype, DType otherwise) {
  return dtype ? to_dtype(static_cast<std::int32_t>(*dtype), "dtype") : otherwise;
}

/// What both fused_experts have in common: Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt
/// experts.
void run_experts(TorchValue* stack, std::optional<std::int64_t> width,
                 const std::optional<TensorHandle>& scales, const std::optional<TensorHandle>& token_scales,
                 const std::optional<TorchValue>& dtype) {
  const TensorHandle hidden = tensor(stack[0], "hidden"), ids = tensor(stack[1], "topk_ids"),
                     weights = tensor(stack[2], "topk_weights");
  const auto layer = Handled::find<Layer>(static_cast<std::int64_t>(stack[3]), "experts");
  const MoeSpec& spec = layer->weights().spec();
  const Device device = layer->weights().device();
  const InputRows rows(*hidden, device, spec.scheme, spec.hidden, view(scales), view(token_scales));
  if (width && *width != spec.hidden)
    invalid(fmt::format("width = {}, but hidden states have {} columns", *width, spec.hidden));
  const std::int64_t tokens = rows.x().rows;

  std::vector<std::int32_t> id_copy;
  std::vector<float> weight_copy;
  const MoeInputs inputs{
      .hidden = rows.x(),
      .topk_ids = ids->integers({tokens, spec.top_k}, "[tokens, top_k]", device, &id_copy),
      .topk_weights = weights->floats({tokens, spec.top_k}, "[tokens, top_k]", device, &weight_copy),
      .hidden_scales = rows.scales(),
      .hidden_token_scales = rows.token_scales()};
  TensorHandle out =
      TensorHandle::empty({tokens, spec.hidden}, result_type(dtype, rows.result_type(DType::bf16)), device);
  if (tokens != 0)
    layer->planned(tokens)->run(layer->weights(), inputs, {.hidden = out->mutable_matrix()}, hidden->stream(),
                                true);
  stack[0] = out.release();
}

/// fused_experts(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt experts) -> Tensor
void fused_experts(TorchValue* stack) {
  run_experts(stack, {}, {}, {}, {});
}

/// fused_experts.quantized(..., SymInt width, Tensor scales, Tensor? token_scales, ScalarType? dtype) ->
/// Tensor
void fused_experts_quantized(TorchValue* stack) {
  const std::optional<TensorHandle> scales = tensor(stack[5], "scales"),
                                    token_scales = maybe_tensor(stack[6], "token_scales");
  run_experts(stack, static_cast<std::int64_t>(stack[4]), scales, token_scales, maybe(stack[7]));
}

/// What both products have in common, from `weights` on: SymInt weights, SymInt n, Tensor? bias, Tensor?
/// scales, Tensor? token_scales, ScalarType? dtype.
TorchValue product(const TensorHandle& x, std::optional<Tensor> offsets, const TorchValue* rest) {
  const std::optional<TensorHandle> bias = maybe_tensor(rest[2], "bias"),
                                    scales = maybe_tensor(rest[3], "scales"),
                                    token_scales = maybe_tensor(rest[4], "token_scales");
  const std::optional<TorchValue> dtype = maybe(rest[5]);
  const auto weights = Handled::find<PackedMatrices>(static_cast<std::int64_t>(rest[0]), "weights");
  const ProductInputs inputs(*weights, *x, std::move(offsets), view(bias), view(scales), view(token_scales));
  const std::int64_t n = weights->weights().shape().n;
  if (static_cast<std::int64_t>(rest[1]) != n)
    invalid(fmt::format("n = {}, but the weights have {} rows", static_cast<std::int64_t>(rest[1]), n));
  const MatrixView& rows = inputs.get().x;
  TensorHandle y = TensorHandle::empty({rows.rows, n}, result_type(dtype, inputs.result_type(DType::bf16)),
                                       weights->device());
  if (rows.rows != 0) weights->planned(rows)->run(inputs.get(), y->mutable_matrix(), x->stream(), true);
  return y.release();
}

/// scaled_mm.packed(Tensor x, ...) -> Tensor
void scaled_mm_packed(TorchValue* stack) {
  const TensorHandle x = tensor(stack[0], "x");
  stack[0] = product(x, std::nullopt, stack + 1);
}

/// grouped_gemm(Tensor x, Tensor offsets, ...) -> Tensor
void grouped_gemm(TorchValue* stack) {
  const TensorHandle x = tensor(stack[0], "x"), offsets = tensor(stack[1], "offsets");
  stack[0] = product(x, *offsets, stack + 2);
}

/// quantize_activation(Tensor x, str scheme) -> (Tensor values, Tensor scales, Tensor token_scales)
void quantize_activation(TorchValue* stack) {
  const TensorHandle x = tensor(stack[0], "x");
  const SchemeId id = to_scheme(string(stack[1]));
  const Device device = x->device();
  const MatrixView view = x->matrix();
  const ActivationRow row = value(activation_row(id, view.cols));
  const bool two_level = scheme(id).activation.tensor_scale.stored();
  TensorHandle values = TensorHandle::empty({view.rows, row.value_bytes}, DType::u8, device);
  TensorHandle scales = TensorHandle::empty({view.rows, row.scale_bytes}, DType::u8, device);
  TensorHandle token_scales = TensorHandle::empty({two_level ? view.rows : 0}, DType::f32, device);
  if (device.kind == Device::Kind::cpu) {
    const QuantizedActivation q = value(gatefold::quantize_activation(id, view));
    std::memcpy(values->data(), q.values.data(), q.values.size());
    std::memcpy(scales->data(), q.scales.data(), q.scales.size());
    std::memcpy(token_scales->data(), q.token_scales.data(), q.token_scales.size() * sizeof(float));
  } else if (view.rows != 0) {
    const cuda::DeviceGuard guard(device.index);
    const TorchMemory workspace(value(cuda::activation_layout(id, view.rows, view.cols)).workspace_bytes,
                                device.index);
    check(cuda::quantize_activations(id, {.x = view, .rows = view.rows},
                                     {.values = values->data(),
                                      .scales = scales->data(),
                                      .token_scales = reinterpret_cast<float*>(token_scales->data())},
                                     workspace.bytes(), x->stream()));
  }
  stack[0] = values.release();
  stack[1] = scales.release();
  stack[2] = token_scales.release();
}

/// scaled_mm(Tensor x, Tensor x_scales, Tensor x_token_scales, Tensor w, Tensor w_scales, str scheme,
///           float w_tensor_scale) -> Tensor. The tensor scale divides, as quantize() stores it.
void scaled_mm(TorchValue* stack) {
  const TensorHandle x = tensor(stack[0], "x"), x_scales = tensor(stack[1], "x_scales"),
                     x_token_scales = tensor(stack[2], "x_token_scales"), w = tensor(stack[3], "w"),
                     w_scales = tensor(stack[4], "w_scales");
  const SchemeId id = to_scheme(string(stack[5]));
  double tensor_scale = 0;
  std::memcpy(&tensor_scale, &stack[6], sizeof(tensor_scale));
  const auto bytes = [](const TensorHandle& t) -> std::vector<std::byte> {
    if (t->rank() != 2 || t->dtype() != DType::u8) t->wrong("a matrix of bytes (U8)");
    t->expect_contiguous();
    t->expect_device(Device::cpu());
    return {t->data(), t->data() + t->size(0) * t->size(1)};
  };
  const Scheme& row = scheme(id);
  if (!row.quantizes_activations()) invalid(fmt::format("{} leaves activations in 16 bit", row.name));
  QuantizedActivation a{.scheme = id, .values = bytes(x), .scales = bytes(x_scales)};
  a.rows = x->size(0);
  a.k = x->size(1) * 8 / row.activation.value.bits;
  if (row.activation.tensor_scale.stored()) {
    const float* scales = x_token_scales->floats({a.rows}, "[rows]", Device::cpu());
    a.token_scales.assign(scales, scales + a.rows);
  }
  QuantizedMatrix b{.scheme = id,
                    .k = a.k,
                    .scale_format = row.weight.scale,
                    .values = bytes(w),
                    .scales = bytes(w_scales)};
  b.n = w->size(0);
  if (row.weight.tensor_scale.stored()) b.tensor_scale = {static_cast<float>(tensor_scale), true};
  TensorHandle y = TensorHandle::empty({a.rows, b.n}, DType::f32, Device::cpu());
  check(gatefold::scaled_mm(a, b, y->mutable_matrix()));
  stack[0] = y.release();
}

/// What torch makes a RuntimeError of.
template <void (*Kernel)(TorchValue*)>
void boxed(TorchValue* stack, std::uint64_t, std::uint64_t) {
  try {
    use_threads();
    Kernel(stack);
  } catch (const StatusError& error) {
    throw std::runtime_error(error.status.message());
  }
}

void implement(const char* key, std::initializer_list<std::pair<const char*, TorchKernel>> kernels) {
  TorchLibrary library = nullptr;  // lives as long as the process
  expect(torch.aoti_torch_library_init_impl("gatefold", key, __FILE__, __LINE__, &library),
         "library_init_impl");
  for (const auto& [name, kernel] : kernels)
    expect(torch.torch_library_impl(library, name, kernel, kTorchVersion), name);
}

/// Gives torch the kernels. Once; with the GIL.
void register_torch_kernels() {
  torch = torch_functions();
  // What is for GPUs is here for the CPU as well, to say so.
  const std::initializer_list<std::pair<const char*, TorchKernel>> everywhere = {
      {"fused_experts", boxed<fused_experts>},
      {"fused_experts.quantized", boxed<fused_experts_quantized>},
      {"quantize_activation", boxed<quantize_activation>},
      {"scaled_mm.packed", boxed<scaled_mm_packed>},
      {"grouped_gemm", boxed<grouped_gemm>}};
  implement("CPU", everywhere);
  implement("CPU", {{"scaled_mm", boxed<scaled_mm>}});
  if (torch.aoti_torch_get_current_cuda_stream != nullptr) implement("CUDA", everywhere);
}

}  // namespace

void add_torch(nb::module_& m) {
  m.def("_register_torch_kernels", &register_torch_kernels,
        "For gatefold.torch: gives torch the kernels of the operators that it has defined.");
  m.def("_debug_torch_kernels", &debug_operators, "For gatefold.torch.debug().");
  m.def(
      "_activation_row",
      [](const std::string& name, std::int64_t k) {
        const ActivationRow row = value(activation_row(to_scheme(name), k));
        return nb::make_tuple(row.value_bytes, row.scale_bytes,
                              scheme(to_scheme(name)).activation.tensor_scale.stored());
      },
      "For gatefold.torch: bytes of values and of scales in a row of k activations; whether it has a token "
      "scale.");
}

}  // namespace gatefold::python
