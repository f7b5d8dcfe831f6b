#pragma once
/// \file
/// Where the rows of one operand lie in a workspace.

#include <algorithm>

#include "cuda/inputs.h"
#include "moe/kernel.h"

namespace gatefold::cuda {

template <class T>
struct Buffer {
  std::size_t offset = 0;
  T* at(std::byte* base) const { return reinterpret_cast<T*>(base + offset); }
};

constexpr std::int64_t padded(std::int64_t k) {
  return (k + kRecordColumns - 1) / kRecordColumns * kRecordColumns;
}

/// Rows of one operand: what inputs.h writes and a multiply reads.
struct InputBuffers {
  Operand activation;
  std::int64_t stride = 0;
  std::int32_t tile_rows = 0;
  Buffer<std::uint16_t> rows;
  Buffer<float> row_scales, record_scales, amax;

  InputBuffers() = default;
  /// Room for so many rows as they are, or in tiles.
  InputBuffers(std::string_view name, const Operand& a, std::size_t count, std::size_t tiles, std::int64_t k,
               WorkspaceLayout& layout)
      : activation(a), stride(padded(k)), tile_rows(static_cast<std::int32_t>(tiles)) {
    count = std::max(count, tiles);
    rows = {layout.add<std::uint16_t>(name, count * static_cast<std::size_t>(stride))};
    row_scales = {layout.add<float>("row_scales", has_row_scales(a) ? count : 0)};
    record_scales = {layout.add<float>(
        "record_scales",
        has_record_scales(a) ? count * static_cast<std::size_t>(stride / kRecordColumns) : 0)};
    amax = {layout.add<float>("row_amax", a.quantized() && a.group.n == 0 ? count : 0)};
  }
  /// Whether the multiply can read x as it is.
  bool are(const MatrixView& x) const {
    const DType dtype = activation.value == formats::f16 ? DType::f16 : DType::bf16;
    return !activation.quantized() && x.dtype == dtype && x.cols == stride &&
           reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
  }
  /// What makes `count` rows of x, in an order.
  InputArgs args(std::byte* base, const MatrixView& x, std::int64_t count, InputOrder order) const {
    InputArgs args{.activation = activation, .x = x};
    args.x.rows = count;
    args.amax = amax.at(base);
    args.rows = rows.at(base);
    args.stride = stride;
    args.order = order;
    args.tile_rows = order.tiled ? tile_rows : 0;
    args.row_scales = row_scales.at(base);
    args.record_scales = record_scales.at(base);
    return args;
  }
  GemmInputs gemm(std::byte* base, bool tiled) const {
    return {.rows = rows.at(base),
            .stride = stride,
            .row_scales = has_row_scales(activation) ? row_scales.at(base) : nullptr,
            .record_scales = has_record_scales(activation) ? record_scales.at(base) : nullptr,
            .tile_rows = tiled ? tile_rows : 0};
  }
};

}  // namespace gatefold::cuda
