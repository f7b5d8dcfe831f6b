#pragma once
/// \file
/// What conventions share: finding the tensors of one linear layer, with messages that name the tensor, what
/// it is, and the part of the config that asks for something else.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/convention.h"
#include "checkpoint/module_list.h"

namespace gatefold {

inline constexpr DType kWideDtypes[] = {DType::f32, DType::bf16, DType::f16};
inline constexpr DType kI32[] = {DType::i32};
inline constexpr DType kE4m3[] = {DType::f8_e4m3};
inline constexpr DType kExponents[] = {DType::u8, DType::f8_e8m0};

/// The format of F32, BF16 and F16.
Format wide_format(DType dtype);

/// Finds tensors of a linear layer, and checks them against what the config asks for. The first error stays.
class TensorFinder {
 public:
  /// `asked_by`: the part of the config: "/models/x/config.json: quantization_config".
  TensorFinder(const Source& source, const Linear& linear, std::string asked_by)
      : source_(source), linear_(linear), asked_by_(std::move(asked_by)) {}

  bool has(std::string_view suffix) const { return find(suffix) != nullptr; }
  const TensorEntry* find(std::string_view suffix) const;
  /// A shape of {1} stands for a single number, which is written as [1], [1, 1] or [].
  const TensorEntry* require(std::string_view suffix, std::vector<std::int64_t> shape,
                             std::span<const DType> dtypes);
  /// The tensor must not exist.
  void refuse(std::string_view suffix, std::string_view why, Code code = Code::bad_file);
  void fail(Code code, const std::string& what);
  /// The layer, which is quantized, must not be in a list of those that are not.
  void check_ignored(const ModuleList& ignore);

  const Status& status() const { return status_; }

 private:
  const Source& source_;
  const Linear& linear_;
  std::string asked_by_;
  Status status_;
};

/// The positive finite number that a tensor of one F32, BF16 or F16 holds.
Result<float> read_single(const Source& source, const TensorEntry& entry);

/// A copy of a tensor's data.
std::vector<std::byte> read_bytes(const Source& source, const TensorEntry& entry);
std::vector<std::int32_t> read_i32(const Source& source, const TensorEntry& entry);

/// Error: a code of ue4m3 with a sign.
Status check_unsigned(const Source& source, const TensorEntry& entry);

/// Error: <module>.weight has 8-bit numbers, which mean nothing without one of the `companions`.
Status check_not_codes(const Source& source, const std::string& module,
                       std::span<const std::string_view> companions);

/// [rows, cols] to [cols, rows] of elements of `size` bytes.
std::vector<std::byte> transpose(const std::byte* data, std::int64_t rows, std::int64_t cols,
                                 std::int64_t size);

/// "quantization_config" may name things in many ways; this is "<config>: quantization_config".
inline std::string quantization_of(const std::string& config) {
  return config + ": quantization_config";
}

}  // namespace gatefold
