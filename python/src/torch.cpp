// The kernels of the operators that gatefold.torch defines, over torch's stable C interface.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <stdexcept>

#include "gatefold/codec.h"
#include "gatefold/cuda_quantize.h"
#include "gatefold/linear.h"
#include "layer.h"
#include "module.h"
#include "torch_abi.h"

namespace nb = nanobind;

namespace gatefold::python {
namespace {

/// Set before the kernels are registered.
TorchFunctions torch;

void expect(TorchError error, const char* what) {
  if (error != 0) throw std::runtime_error(fmt::format("torch: {} failed", what));
}

/// Owns one reference.
class TensorHandle {
 public:
  explicit TensorHandle(TorchTensor tensor, const char* name) : tensor_(tensor), name_(name) {
    std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
    std::int32_t type = 0;
    expect(torch.aoti_torch_get_dim(tensor, &dim), "get_dim");
    expect(torch.aoti_torch_get_sizes(tensor, &sizes), "get_sizes");
    expect(torch.aoti_torch_get_strides(tensor, &strides), "get_strides");
    expect(torch.aoti_torch_get_dtype(tensor, &dtype_), "get_dtype");
    expect(torch.aoti_torch_get_device_type(tensor, &type), "get_device_type");
    expect(torch.aoti_torch_get_device_index(tensor, &index_), "get_device_index");
    expect(torch.aoti_torch_get_data_ptr(tensor, &data_), "get_data_ptr");
    cuda_ = type == torch.aoti_torch_device_type_cuda();
    shape_.assign(sizes, sizes + dim);
    std::int64_t expected = 1;
    for (std::int64_t i = dim; i-- > 0;) {
      contiguous_ = contiguous_ && (shape_[static_cast<std::size_t>(i)] <= 1 || strides[i] == expected);
      expected *= shape_[static_cast<std::size_t>(i)];
    }
    contiguous_ = contiguous_ || expected == 0;
  }
  TensorHandle(TensorHandle&& other) noexcept { *this = std::move(other); }
  TensorHandle& operator=(TensorHandle&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    name_ = other.name_;
    data_ = other.data_;
    dtype_ = other.dtype_;
    index_ = other.index_;
    cuda_ = other.cuda_;
    contiguous_ = other.contiguous_;
    shape_ = std::move(other.shape_);
    return *this;
  }
  ~TensorHandle() {
    if (tensor_ != nullptr) torch.aoti_torch_delete_tensor_object(tensor_);
  }

  /// A new one, contiguous.
  static TensorHandle empty(std::vector<std::int64_t> shape, std::int32_t dtype, const Device& device) {
    std::vector<std::int64_t> strides(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;)
      strides[i - 1] = strides[i] * std::max<std::int64_t>(1, shape[i]);
    const bool cuda = device.kind == Device::Kind::cuda;
    TorchTensor made = nullptr;
    expect(torch.aoti_torch_empty_strided(
               static_cast<std::int64_t>(shape.size()), shape.data(), strides.data(), dtype,
               cuda ? torch.aoti_torch_device_type_cuda() : torch.aoti_torch_device_type_cpu(),
               cuda ? device.index : 0, &made),
           "empty_strided");
    return TensorHandle(made, "result");
  }

  TorchValue release() { return reinterpret_cast<TorchValue>(std::exchange(tensor_, nullptr)); }

  void* data() const { return data_; }
  std::int32_t dtype() const { return dtype_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  Device device() const { return cuda_ ? Device::cuda(index_) : Device::cpu(); }
  cuda::Stream stream() const { return cuda_ ? torch_stream(index_) : nullptr; }

  [[noreturn]] void wrong(const std::string& expected) const {
    invalid(fmt::format("{} is [{}] of torch type {}{}, expected {}", name_, fmt::join(shape_, ", "), dtype_,
                        contiguous_ ? "" : ", not contiguous", expected));
  }
  const TensorHandle& expect_shape(const std::vector<std::int64_t>& shape, const char* meaning) const {
    if (shape_ != shape || !contiguous_)
      wrong(fmt::format("{} = [{}], contiguous", meaning, fmt::join(shape, ", ")));
    return *this;
  }
  const TensorHandle& expect_device(const Device& device) const {
    if (!(this->device() == device))
      wrong(device.kind == Device::Kind::cpu ? "a tensor on the CPU" : "the experts' GPU");
    return *this;
  }
  MatrixView matrix() const {
    if (shape_.size() != 2 || !contiguous_) wrong("a contiguous matrix");
    const DType type = dtype_ == torch.aoti_torch_dtype_float32()    ? DType::f32
                       : dtype_ == torch.aoti_torch_dtype_bfloat16() ? DType::bf16
                       : dtype_ == torch.aoti_torch_dtype_float16()  ? DType::f16
                                                                     : DType::u8;
    if (type == DType::u8) wrong("float32, bfloat16 or float16");
    return {data_, type, shape_[0], shape_[1]};
  }
  MutableMatrixView mutable_matrix() const {
    const MatrixView m = matrix();
    return {data_, m.dtype, m.rows, m.cols};
  }

  /// As int32 or f32: in place, or (on the CPU) converted into `copy`.
  const std::int32_t* int32(std::vector<std::int32_t>& copy) const {
    if (dtype_ == torch.aoti_torch_dtype_int32()) return static_cast<const std::int32_t*>(data_);
    if (dtype_ != torch.aoti_torch_dtype_int64() || cuda_) wrong(cuda_ ? "int32 on a GPU" : "int32 or int64");
    const auto* wide = static_cast<const std::int64_t*>(data_);
    const auto count = static_cast<std::size_t>(shape_[0] * shape_[1]);
    for (std::size_t i = 0; i < count; ++i)  // out of range stays out of range
      copy.push_back(wide[i] < 0 || wide[i] > 0x7fffffff ? -1 : static_cast<std::int32_t>(wide[i]));
    return copy.data();
  }
  const float* float32(std::vector<float>& copy) const {
    const MatrixView m = matrix();
    if (m.dtype == DType::f32) return static_cast<const float*>(data_);
    if (cuda_) wrong("float32 on a GPU");
    const auto* half = static_cast<const std::uint16_t*>(data_);
    for (std::int64_t i = 0; i < m.rows * m.cols; ++i)
      copy.push_back(m.dtype == DType::bf16 ? decode<formats::bf16>(half[i]) : decode<formats::f16>(half[i]));
    return copy.data();
  }

 private:
  TorchTensor tensor_ = nullptr;
  const char* name_ = "";
  void* data_ = nullptr;
  std::int32_t dtype_ = 0, index_ = 0;
  bool cuda_ = false, contiguous_ = true;
  std::vector<std::int64_t> shape_;
};

TensorHandle tensor(TorchValue value, const char* name) {
  return TensorHandle(reinterpret_cast<TorchTensor>(value), name);
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

/// fused_experts(Tensor hidden, Tensor topk_ids, Tensor topk_weights, SymInt experts) -> Tensor
void fused_experts(TorchValue* stack) {
  const TensorHandle hidden = tensor(stack[0], "hidden"), ids = tensor(stack[1], "topk_ids"),
                     weights = tensor(stack[2], "topk_weights");
  const auto layer = Handled::find<Layer>(static_cast<std::int64_t>(stack[3]), "experts");
  const MoeSpec& spec = layer->weights().spec();
  const Device device = layer->weights().device();
  const MatrixView x = hidden.expect_device(device).matrix();
  hidden.expect_shape({x.rows, spec.hidden}, "[tokens, hidden]");
  ids.expect_device(device).expect_shape({x.rows, spec.top_k}, "[tokens, top_k]");
  weights.expect_device(device).expect_shape({x.rows, spec.top_k}, "[tokens, top_k]");

  std::vector<std::int32_t> id_copy;
  std::vector<float> weight_copy;
  const MoeInputs inputs{
      .hidden = x, .topk_ids = ids.int32(id_copy), .topk_weights = weights.float32(weight_copy)};
  TensorHandle out = TensorHandle::empty(hidden.shape(), hidden.dtype(), device);
  if (x.rows != 0) {
    const auto planned = layer->planned(x.rows);
    planned->run(layer->weights(), inputs, {.hidden = out.mutable_matrix()}, hidden.stream(), true);
  }
  stack[0] = out.release();
}

/// quantize_activation(Tensor x, str scheme) -> (Tensor values, Tensor scales, Tensor token_scales)
void quantize_activation(TorchValue* stack) {
  const TensorHandle x = tensor(stack[0], "x");
  const SchemeId id = to_scheme(string(stack[1]));
  const MatrixView view = x.matrix();
  const ActivationRow row = value(activation_row(id, view.cols));
  const bool two_level = scheme(id).activation.tensor_scale.stored();
  const std::int32_t u8 = torch.aoti_torch_dtype_uint8();
  TensorHandle values = TensorHandle::empty({view.rows, row.value_bytes}, u8, x.device());
  TensorHandle scales = TensorHandle::empty({view.rows, row.scale_bytes}, u8, x.device());
  TensorHandle token_scales =
      TensorHandle::empty({two_level ? view.rows : 0}, torch.aoti_torch_dtype_float32(), x.device());
  if (x.device().kind == Device::Kind::cpu) {
    const QuantizedActivation q = value(gatefold::quantize_activation(id, view));
    std::memcpy(values.data(), q.values.data(), q.values.size());
    std::memcpy(scales.data(), q.scales.data(), q.scales.size());
    std::memcpy(token_scales.data(), q.token_scales.data(), q.token_scales.size() * sizeof(float));
  } else if (view.rows != 0) {
    const cuda::DeviceGuard guard(x.device().index);
    const TorchMemory workspace(value(cuda::activation_layout(id, view.rows, view.cols)).workspace_bytes,
                                x.device().index);
    check(cuda::quantize_activations(id, {.x = view, .rows = view.rows},
                                     {.values = values.data(),
                                      .scales = scales.data(),
                                      .token_scales = static_cast<float*>(token_scales.data())},
                                     workspace.bytes(), x.stream()));
  }
  stack[0] = values.release();
  stack[1] = scales.release();
  stack[2] = token_scales.release();
}

std::vector<std::byte> bytes_of(const TensorHandle& tensor, std::int64_t each = 1) {
  std::int64_t count = each;
  for (const std::int64_t size : tensor.shape()) count *= size;
  const auto* data = static_cast<const std::byte*>(tensor.data());
  return {data, data + count};
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
  const std::int32_t u8 = torch.aoti_torch_dtype_uint8();
  for (const TensorHandle* bytes : {&x, &x_scales, &w, &w_scales}) {
    if (bytes->shape().size() != 2 || bytes->dtype() != u8)
      bytes->wrong("a contiguous matrix of bytes (uint8)");
    bytes->expect_shape(bytes->shape(), "bytes").expect_device(Device::cpu());
  }
  const Scheme& row = scheme(id);
  if (!row.quantizes_activations()) invalid(fmt::format("{} leaves activations in 16 bit", row.name));
  if (row.activation.tensor_scale.stored() && x_token_scales.dtype() != torch.aoti_torch_dtype_float32())
    x_token_scales.wrong("float32");
  const std::int64_t k = x.shape()[1] * 8 / row.activation.value.bits;
  QuantizedActivation a{.scheme = id, .rows = x.shape()[0], .k = k};
  a.values = bytes_of(x);
  a.scales = bytes_of(x_scales);
  if (row.activation.tensor_scale.stored()) {
    x_token_scales.expect_shape({a.rows}, "[rows]").expect_device(Device::cpu());
    const auto* scales = static_cast<const float*>(x_token_scales.data());
    a.token_scales.assign(scales, scales + a.rows);
  }
  QuantizedMatrix b;
  b.scheme = id;
  b.n = w.shape()[0];
  b.k = k;
  b.scale_format = row.weight.scale;
  b.values = bytes_of(w);
  b.scales = bytes_of(w_scales);
  if (row.weight.tensor_scale.stored()) b.tensor_scale = {static_cast<float>(tensor_scale), true};
  TensorHandle y = TensorHandle::empty({a.rows, b.n}, torch.aoti_torch_dtype_float32(), Device::cpu());
  check(gatefold::scaled_mm(a, b, y.mutable_matrix()));
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
  implement("CPU", {{"fused_experts", boxed<fused_experts>},
                    {"quantize_activation", boxed<quantize_activation>},
                    {"scaled_mm", boxed<scaled_mm>}});
  if (torch.aoti_torch_get_current_cuda_stream != nullptr)
    implement("CUDA",
              {{"fused_experts", boxed<fused_experts>}, {"quantize_activation", boxed<quantize_activation>}});
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
