#include "tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>

#include <nanobind/stl/string.h>

#include "errors.h"
#include "gatefold/codec.h"
#include "torch_abi.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {
namespace {

std::optional<DType> find_dtype(nb::dlpack::dtype type) {
  using Dl = nb::dlpack::dtype_code;
  struct Entry {
    Dl code;
    int bits;
    DType dtype;
  };
  constexpr Entry all[] = {
      {Dl::Float, 32, DType::f32},
      {Dl::Float, 16, DType::f16},
      {Dl::Float, 64, DType::f64},
      {Dl::Bfloat, 16, DType::bf16},
      {Dl::Int, 32, DType::i32},
      {Dl::Int, 64, DType::i64},
      {Dl::Int, 16, DType::i16},
      {Dl::Int, 8, DType::i8},
      {Dl::UInt, 8, DType::u8},
      {Dl::UInt, 16, DType::u16},
      {Dl::UInt, 32, DType::u32},
      {Dl::UInt, 64, DType::u64},
      {Dl::Bool, 8, DType::boolean},
      {Dl::Float8_E4M3FN, 8, DType::f8_e4m3},
      {Dl::Float8_E5M2, 8, DType::f8_e5m2},
      {Dl::Float8_E8M0FNU, 8, DType::f8_e8m0},
  };
  for (const Entry& entry : all)
    if (static_cast<int>(entry.code) == type.code && entry.bits == type.bits && type.lanes == 1)
      return entry.dtype;
  return std::nullopt;
}

/// What numpy and others call it; empty for types of which no tensors are made here.
const char* numpy_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::u8:
      return "uint8";
    default:
      return "";
  }
}

/// Where tensors without elements lie: null pointers would say that there are none.
alignas(16) std::byte nothing[16];

std::string type_of(nb::handle object) {
  return nb::repr(object.type()).c_str();
}

/// DLPack's table of functions (DLPackExchangeAPI of its version 1), with which a type gives its tensors'
/// places without a call into Python.
struct ExchangeTable {
  std::uint32_t major, minor;
  const ExchangeTable* earlier;
  void (*allocate)(), (*export_object)(), (*import_object)();
  int (*view)(void* object, nb::dlpack::dltensor* out);
  void (*stream)();
};

const ExchangeTable* exchange_table(nb::handle type) {
  static const nb::handle name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  const nb::object capsule = nb::getattr(type, name, nb::none());
  if (capsule.is_none()) return nullptr;
  const auto* table =
      static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) throw nb::python_error();
  while (table != nullptr && table->major != 1) table = table->earlier;
  return table;
}

}  // namespace

std::string package_of(nb::handle object) {
  const auto module = nb::cast<std::string>(
      nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()))).attr("__module__"));
  return module.substr(0, module.find('.'));
}

Tensor::Tensor(nb::handle object, const char* name, bool writable)
    : name_(name), object_(nb::borrow(object)) {
  static const nb::handle requires_grad = PyUnicode_InternFromString("requires_grad");
  const nb::object gradient = nb::getattr(object, requires_grad, nb::none());
  torch_ = !gradient.is_none();
  if (torch_ && nb::cast<bool>(gradient))
    invalid(fmt::format("{} requires a gradient, but this is inference only: pass {}.detach()", name, name));
  static const nb::handle is_neg = PyUnicode_InternFromString("is_neg");
  if (torch_ && nb::cast<bool>(object.attr(is_neg)()))
    invalid(
        fmt::format("{} is a view whose signs are not those in memory: pass {}.resolve_neg()", name, name));
  const ExchangeTable* table = torch_ ? exchange_table(object.type()) : nullptr;
  if (table != nullptr && table->view != nullptr) {
    nb::dlpack::dltensor view;
    if (table->view(object.ptr(), &view) != 0) {
      const nb::python_error error;
      const std::string why = nb::str(error.value()).c_str();
      invalid(fmt::format("{} cannot be read: {}", name, why.substr(0, why.find('\n'))));
    }
    read(view);
    return;
  }
  // Torch's own function orders no streams, as __dlpack__ does.
  const nb::object source =
      torch_ ? nb::module_::import_("torch.utils.dlpack").attr("to_dlpack")(object) : object_;
  if (!nb::try_cast(source, array_, false))
    throw nb::type_error(
        fmt::format("{} is a {}, expected a tensor (DLPack or buffer protocol)", name, type_of(object))
            .c_str());
  nb::ndarray<> probe;
  if (writable && !torch_ && !nb::try_cast(object, probe, false))
    invalid(fmt::format("{} is read-only", name));
  read({const_cast<void*>(array_.data()),
        {array_.device_type(), array_.device_id()},
        static_cast<std::int32_t>(array_.ndim()),
        array_.dtype(),
        const_cast<std::int64_t*>(array_.shape_ptr()),
        const_cast<std::int64_t*>(array_.stride_ptr())});
}

Tensor::Tensor(const char* name, DType dtype, const Device& device, void* data,
               std::span<const std::int64_t> shape, const std::int64_t* strides)
    : name_(name), dtype_(dtype), device_(device), torch_(true) {
  place(data, shape, strides);
}

std::optional<Tensor> Tensor::maybe(nb::handle object, const char* name) {
  if (object.is_none()) return std::nullopt;
  return Tensor(object, name);
}

void Tensor::read(const nb::dlpack::dltensor& view) {
  const auto dtype = find_dtype(view.dtype);
  if (!dtype)
    invalid(fmt::format("{} has a type that is not known here (DLPack code {}, {} bits)", name_,
                        view.dtype.code, view.dtype.bits));
  dtype_ = *dtype;
  if (view.device.device_type == nb::device::cuda::value)
    device_ = Device::cuda(view.device.device_id);
  else if (view.device.device_type != nb::device::cpu::value &&
           view.device.device_type != nb::device::cuda_host::value)
    invalid(fmt::format("{} is on a device of DLPack type {}, expected a CPU or CUDA", name_,
                        view.device.device_type));
  place(view.data == nullptr ? nullptr : static_cast<std::byte*>(view.data) + view.byte_offset,
        std::span(view.shape, static_cast<std::size_t>(view.ndim)), view.strides);
}

void Tensor::place(void* data, std::span<const std::int64_t> shape, const std::int64_t* strides) {
  rank_ = shape.size();
  if (rank_ > kMaxRank)
    invalid(fmt::format("{} has {} dimensions, expected at most {}", name_, rank_, kMaxRank));
  std::ranges::copy(shape, shape_.begin());
  std::copy_n(strides, rank_, strides_.begin());
  data_ = data == nullptr ? nothing : static_cast<std::byte*>(data);
}

cuda::Stream Tensor::stream() const {
  if (device_.kind == Device::Kind::cpu) return nullptr;
  if (torch_) return torch_stream(device_.index);
  if (package_of(object_) != "cupy") return nullptr;
  const nb::object stream = nb::module_::import_("cupy").attr("cuda").attr("get_current_stream")();
  return reinterpret_cast<cuda::Stream>(nb::cast<std::uintptr_t>(stream.attr("ptr")));
}

bool Tensor::contiguous() const {
  std::int64_t expected = 1;
  for (const std::int64_t size : shape())
    if (size == 0) return true;
  for (std::size_t i = rank_; i-- > 0;) {
    if (shape_[i] != 1 && strides_[i] != expected) return false;
    expected *= shape_[i];
  }
  return true;
}

std::string Tensor::shape_text() const {
  return fmt::format("[{}]", fmt::join(shape(), ", "));
}

void Tensor::wrong(const std::string& expected) const {
  invalid(fmt::format("{} is {} {}, expected {}", name_, gatefold::name(dtype_), shape_text(), expected));
}

bool Tensor::has_shape(std::initializer_list<std::int64_t> shape) const {
  return std::ranges::equal(shape, this->shape(), [](std::int64_t wanted, std::int64_t size) {
    return wanted == -1 || wanted == size;
  });
}

void Tensor::expect_shape(std::initializer_list<std::int64_t> shape, const char* meaning) const {
  if (!has_shape(shape)) wrong(fmt::format("{} = [{}] (-1: any)", meaning, fmt::join(shape, ", ")));
}

void Tensor::expect_bytes(std::int64_t rows, std::int64_t row_bytes, DType type) const {
  const std::int64_t columns = row_bytes * 8 / bits(type);
  const bool as_bytes = dtype_ == DType::u8 && has_shape({rows, row_bytes});
  const bool as_numbers =
      dtype_ == type && (has_shape({rows, columns}) || (columns == 1 && has_shape({rows})));
  if (!as_bytes && !as_numbers)
    wrong(fmt::format("U8 [{}, {}] or {} [{}, {}]", rows, row_bytes, gatefold::name(type), rows, columns));
  expect_contiguous();
}

void Tensor::expect_contiguous() const {
  if (!contiguous())
    invalid(fmt::format("{} {} has strides [{}], expected a contiguous tensor", name_, shape_text(),
                        fmt::join(std::span(strides_).first(rank_), ", ")));
}

void Tensor::expect_float() const {
  if (dtype_ != DType::f32 && dtype_ != DType::f16 && dtype_ != DType::bf16) wrong("F32, F16 or BF16");
}

void Tensor::expect_device(const Device& device) const {
  const auto text = [](const Device& d) {
    return d.kind == Device::Kind::cpu ? std::string("the CPU") : fmt::format("GPU {}", d.index);
  };
  if (!(device_ == device))
    invalid(fmt::format("{} is on {}, expected {}", name_, text(device_), text(device)));
}

MatrixView Tensor::matrix() const {
  expect_shape({-1, -1}, "[rows, columns]");
  expect_float();
  expect_contiguous();
  return {data_, dtype_, shape_[0], shape_[1]};
}

MutableMatrixView Tensor::mutable_matrix() const {
  const MatrixView m = matrix();
  return {data_, m.dtype, m.rows, m.cols};
}

const float* Tensor::floats(std::initializer_list<std::int64_t> shape, const char* meaning,
                            const Device& device, std::vector<float>* copy) const {
  expect_shape(shape, meaning);
  expect_device(device);
  expect_contiguous();
  if (dtype_ == DType::f32) return reinterpret_cast<const float*>(data_);
  const bool on_gpu = device.kind == Device::Kind::cuda, converts = copy != nullptr && !on_gpu;
  if (!converts || (dtype_ != DType::f16 && dtype_ != DType::bf16))
    invalid(fmt::format("{} is {}, expected F32{}", name_, gatefold::name(dtype_),
                        converts ? ", F16 or BF16"
                        : on_gpu ? " on a GPU"
                                 : ""));
  *copy = to_host<float>();
  return copy->empty() ? reinterpret_cast<const float*>(data_) : copy->data();
}

const std::int32_t* Tensor::integers(std::initializer_list<std::int64_t> shape, const char* meaning,
                                     const Device& device, std::vector<std::int32_t>* copy) const {
  expect_shape(shape, meaning);
  expect_device(device);
  expect_contiguous();
  if (dtype_ == DType::i32) return reinterpret_cast<const std::int32_t*>(data_);
  const bool on_gpu = device.kind == Device::Kind::cuda, converts = copy != nullptr && !on_gpu;
  if (!converts || dtype_ != DType::i64)
    invalid(fmt::format("{} is {}, expected I32{}", name_, gatefold::name(dtype_),
                        converts ? " or I64"
                        : on_gpu ? " on a GPU"
                                 : ""));
  for (const std::int64_t wide : to_host<std::int64_t>()) {
    if (wide != static_cast<std::int32_t>(wide))
      invalid(fmt::format("{}[{}] = {} does not fit 32 bits", name_, copy->size(), wide));
    copy->push_back(static_cast<std::int32_t>(wide));
  }
  return copy->empty() ? reinterpret_cast<const std::int32_t*>(data_) : copy->data();
}

nb::object Tensor::make(std::initializer_list<std::int64_t> shape, DType dtype) const {
  const std::string package = torch_ ? "torch" : package_of(object_);
  if (package != "numpy" && package != "torch" && package != "cupy")
    invalid(fmt::format(
        "{} is of {}, whose tensors cannot be made here: give `out`, or those of numpy, torch or cupy", name_,
        package));
  struct Library {
    nb::object module, empty_like;
  };
  static auto& libraries = *new std::map<std::string, Library>;  // looked up once, as long as the process
  Library& library = libraries[package];
  if (!library.empty_like.is_valid()) {
    library.module = nb::module_::import_(package.c_str());
    library.empty_like = library.module.attr("empty_like");
  }
  if (dtype == dtype_ && has_shape(shape)) return library.empty_like(object_);
  const nb::object type = nb::getattr(library.module, numpy_name(dtype), nb::none());
  if (type.is_none())
    invalid(fmt::format("{} has no {} for results: give `out`", package, gatefold::name(dtype)));
  nb::list sizes;
  for (const std::int64_t size : shape) sizes.append(size);
  if (torch_) return object_.attr("new_empty")(sizes, "dtype"_a = type);
  return library.module.attr("empty")(sizes, "dtype"_a = type);
}

void Tensor::wait() const {
  if (device_.kind != Device::Kind::cuda) return;
  const cuda::DeviceGuard guard(device_.index);
  check(cuda::synchronize(stream()));
}

template <class T>
std::vector<T> Tensor::to_host() const {
  expect_contiguous();
  std::size_t count = 1;
  for (std::size_t i = 0; i < rank(); ++i) count *= static_cast<std::size_t>(shape_[i]);
  const std::byte* data = data_;
  std::vector<std::byte> copy;
  if (device_.kind == Device::Kind::cuda) {
    const cuda::DeviceGuard guard(device_.index);
    wait();
    copy.resize(count * static_cast<std::size_t>(bits(dtype_) / 8));
    check(cuda::copy(copy.data(), data, copy.size()));
    data = copy.data();
  }
  std::vector<T> out(count);
  const auto convert = [&]<class From>(auto&& widen) {
    for (std::size_t i = 0; i < count; ++i) {
      From from;
      std::memcpy(&from, data + i * sizeof(From), sizeof(From));
      out[i] = static_cast<T>(widen(from));
    }
  };
  const auto same = [](auto x) { return x; };
  switch (dtype_) {
    case DType::f32:
      convert.template operator()<float>(same);
      break;
    case DType::i32:
      convert.template operator()<std::int32_t>(same);
      break;
    case DType::i64:
      convert.template operator()<std::int64_t>(same);
      break;
    case DType::bf16:
      convert.template operator()<std::uint16_t>([](auto x) { return decode<formats::bf16>(x); });
      break;
    case DType::f16:
      convert.template operator()<std::uint16_t>([](auto x) { return decode<formats::f16>(x); });
      break;
    default:
      invalid(fmt::format("{} is {}, which cannot be read here", name_, gatefold::name(dtype_)));
  }
  return out;
}

template std::vector<float> Tensor::to_host() const;
template std::vector<std::int64_t> Tensor::to_host() const;

StridedMatrix::StridedMatrix(const Tensor& stack, std::int64_t index, std::int64_t first, std::int64_t rows,
                             std::int64_t step, bool transposed)
    : dtype_(stack.dtype()), device_(stack.device()), rows_(rows) {
  const std::size_t n = transposed ? 2 : 1, k = transposed ? 1 : 2;
  cols_ = stack.size(k);
  col_stride_ = stack.stride(k);
  row_stride_ = stack.stride(n) * step;
  data_ = stack.data() + (index * stack.stride(0) + first * stack.stride(n)) * (bits(dtype_) / 8);
}

MatrixView StridedMatrix::view(std::vector<std::byte>& copy) const {
  const bool contiguous = col_stride_ == 1 && (row_stride_ == cols_ || rows_ == 1);
  const std::int64_t each = bits(dtype_) / 8;
  if (contiguous && device_.kind == Device::Kind::cpu) return {data_, dtype_, rows_, cols_};

  const bool by_rows = col_stride_ == 1;
  const std::byte* from = data_;
  std::vector<std::byte> host;
  if (device_.kind == Device::Kind::cuda) {  // all that lies between the first element and the last
    const cuda::DeviceGuard guard(device_.index);
    host.resize(static_cast<std::size_t>(((rows_ - 1) * row_stride_ + (cols_ - 1) * col_stride_ + 1) * each));
    check(cuda::copy(host.data(), data_, host.size()));
    from = host.data();
  }
  copy.resize(static_cast<std::size_t>(rows_ * cols_ * each));
  for (std::int64_t r = 0; r < rows_; ++r) {
    std::byte* out = copy.data() + r * cols_ * each;
    const std::byte* row = from + r * row_stride_ * each;
    if (by_rows)
      std::memcpy(out, row, static_cast<std::size_t>(cols_ * each));
    else
      for (std::int64_t c = 0; c < cols_; ++c)
        std::memcpy(out + c * each, row + c * col_stride_ * each, static_cast<std::size_t>(each));
  }
  return {copy.data(), dtype_, rows_, cols_};
}

}  // namespace gatefold::python
