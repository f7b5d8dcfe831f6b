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

  const char* name() const { return name_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  std::size_t rank() const { return rank_; }
  std::span<const std::int64_t> shape() const { return std::span(shape_).first(rank_); }
  std::int64_t size(std::size_t axis) const { return shape_[axis]; }
  std::int64_t stride(std::size_t axis) const { return strides_[axis]; }
  std::byte* data() const { return data_; }
  bool is_torch() const { return torch_; }
  /// Of a tensor on a GPU: in which torch or cupy work now; of other libraries the default stream. With the
  /// GIL.
  cuda::Stream stream() const;
  bool contiguous() const;
  std::string shape_text() const;

  /// Errors name the argument, what it is and what was expected. -1: any size.
  void expect_shape(std::initializer_list<std::int64_t> shape, const char* meaning) const;
  void expect_contiguous() const;
  void expect_float() const;
  void expect_device(const Device& device) const;

  /// A contiguous [rows, cols] float tensor.
  MatrixView matrix() const;

  /// Waits until what a GPU has been told to write into it is there. With the GIL.
  void wait() const;
  /// A contiguous tensor in host memory, as float or, of integers, std::int64_t.
  template <class T>
  std::vector<T> to_host() const;

 private:
  static constexpr std::size_t kMaxRank = 8;

  void read(const nanobind::dlpack::dltensor& view);
  [[noreturn]] void wrong(const std::string& expected) const;

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
