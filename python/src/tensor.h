#pragma once
/// \file
/// Tensors of other Python libraries, through DLPack or the buffer protocol: never copied, never converted.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gatefold/moe.h"
#include "gatefold/tensor.h"

namespace gatefold::python {

/// What comes first in the name of an object's module: "numpy".
std::string package_of(nanobind::handle object);

/// A borrowed tensor; keeps its owner alive.
class Tensor {
 public:
  /// `name` is the argument's, for errors. Errors: TypeError for what is no tensor; InvalidArgument for one
  /// that requires a gradient, or whose type or device is not known here.
  Tensor(nanobind::handle object, const char* name, bool writable = false);
  /// One of torch's C interface. Needs no GIL.
  Tensor(const char* name, DType dtype, const Device& device, void* data, std::span<const std::int64_t> shape,
         const std::int64_t* strides);
  /// None if the object is None.
  static std::optional<Tensor> maybe(nanobind::handle object, const char* name);

  const char* name() const { return name_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  std::size_t rank() const { return rank_; }
  std::span<const std::int64_t> shape() const { return std::span(shape_).first(rank_); }
  std::int64_t size(std::size_t axis) const { return shape_[axis]; }
  std::int64_t stride(std::size_t axis) const { return strides_[axis]; }
  /// Not null, also where there are no elements.
  std::byte* data() const { return data_; }
  bool is_torch() const { return torch_; }
  /// Of a tensor on a GPU: in which torch or cupy work now; of other libraries the default stream. With the
  /// GIL, unless it is torch's.
  cuda::Stream stream() const;
  bool contiguous() const;
  std::string shape_text() const;

  /// Errors name the argument, what it is and what was expected. -1: any size.
  [[noreturn]] void wrong(const std::string& expected) const;
  void expect_shape(std::initializer_list<std::int64_t> shape, const char* meaning) const;
  void expect_contiguous() const;
  void expect_float() const;
  void expect_device(const Device& device) const;
  /// Rows of so many bytes each, one after the other: as uint8, or as numbers of `type`; [rows] if each has
  /// one.
  void expect_bytes(std::int64_t rows, std::int64_t row_bytes, DType type) const;

  /// A contiguous [rows, cols] float tensor.
  MatrixView matrix() const;
  MutableMatrixView mutable_matrix() const;
  /// The elements of a contiguous tensor on this device, as f32 and int32; on the CPU 16-bit numbers and
  /// int64 are converted into `copy`, if it is given.
  const float* floats(std::initializer_list<std::int64_t> shape, const char* meaning, const Device& device,
                      std::vector<float>* copy = nullptr) const;
  const std::int32_t* integers(std::initializer_list<std::int64_t> shape, const char* meaning,
                               const Device& device, std::vector<std::int32_t>* copy = nullptr) const;
  /// A new tensor of the same library, on the same device. With the GIL. Throws for libraries other than
  /// numpy, torch and cupy, and for types that they have not.
  nanobind::object make(std::initializer_list<std::int64_t> shape, DType dtype) const;

  /// Waits until what a GPU has been told to write into it is there. With the GIL.
  void wait() const;
  /// A contiguous tensor in host memory, as float or, of integers, std::int64_t.
  template <class T>
  std::vector<T> to_host() const;

 private:
  static constexpr std::size_t kMaxRank = 8;

  void read(const nanobind::dlpack::dltensor& view);
  bool has_shape(std::initializer_list<std::int64_t> shape) const;
  void place(void* data, std::span<const std::int64_t> shape, const std::int64_t* strides);

  const char* name_;
  nanobind::object object_;
  nanobind::ndarray<nanobind::ro> array_;  ///< keeps what it points to; none of torch
  DType dtype_ = DType::f32;
  Device device_;
  std::size_t rank_ = 0;
  std::array<std::int64_t, kMaxRank> shape_{}, strides_{};
  std::byte* data_ = nullptr;
  bool torch_ = false;
};

/// One matrix of a stack, in any strides; to be copied row by row where it is not contiguous or on a GPU.
class StridedMatrix {
 public:
  /// Rows first, first + step, ... of matrix `index` of `stack` [E, N, K], or of [E, K, N] if `transposed`.
  StridedMatrix(const Tensor& stack, std::int64_t index, std::int64_t first, std::int64_t rows,
                std::int64_t step, bool transposed);
  /// Points into the tensor where it is contiguous in host memory, else into `copy`.
  MatrixView view(std::vector<std::byte>& copy) const;

 private:
  const std::byte* data_;
  DType dtype_;
  Device device_;
  std::int64_t rows_, cols_, row_stride_, col_stride_;  // in elements
};

}  // namespace gatefold::python
