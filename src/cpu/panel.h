#pragma once
/// \file
/// Weights as panels of 16 rows, one per 32-bit lane: the layout that all CPU kernels read. The multiply
/// works on codes; scales are applied to sums.
///
/// A panel is one stream of memory, read from its beginning to its end:
///   row scales    [16] f32: channel or tensor scale, or the matrix's second-level scale
///   records, each for `record` blocks of k, and padded to 64 bytes after the zero points:
///     block scales  [record][16] in the scheme's format, or [record] f32 where a group has 16 rows or more
///     zero points   [record][16] bytes: 16 less the zero point, so that they need only be added to a code
///     values        [record][value_bytes]; how codes lie in a line of 64 bytes: PanelPacker in
///                   panel.cpp
/// k is cut into blocks within which all scales, of weights and of activations, are constant; the last one is
/// filled up with zeros.

#include <cstddef>
#include <cstdint>

#include "format/isa.h"
#include "gatefold/quantize.h"

namespace gatefold {

inline constexpr std::int64_t kPanelRows = 16;
inline constexpr std::int64_t kPanelChunk = 256;      ///< columns that are scaled together in limbs2
inline constexpr std::int64_t kLimbColumns = 64;      ///< columns of high limbs, before those of low limbs
inline constexpr std::int64_t kMostPanelBlock = 128;  ///< columns; divides a chunk
inline constexpr std::int64_t kLeastPanelBlock = 16;  ///< columns
inline constexpr std::int64_t kPanelTokens = 128;     ///< the most of one call

inline constexpr std::int64_t kSlowPrefetch = 8192;  ///< bytes, where multiplying takes longer than reading

/// How far ahead weights are prefetched by default, where reading takes longer. AMD's own prefetchers follow
/// one stream best undisturbed; Intel's stop at pages, and do not run far enough ahead when decoding takes
/// time.
std::int64_t panel_prefetch();

/// Sizes of an [n, k] matrix in panels.
struct PanelShape {
  std::int64_t n = 0, k = 0;
  std::int64_t panels = 0, block = 0, blocks = 0, record = 0;
  std::size_t value_bytes = 0, scale_bytes = 0;  ///< of one block
  std::size_t zeros_at = 0, values_at = 0;       ///< in a record
  std::size_t row_scale_bytes = 0;               ///< 64, or 0 where there are none
  std::size_t panel_bytes = 0;
  // Not part of the layout:
  std::int64_t prefetch = panel_prefetch();  ///< bytes
  bool write_around = false;                 ///< outputs are 64-byte aligned, and too many for the caches

  std::int64_t padded_k() const { return block * blocks; }
  std::size_t bytes() const { return panel_bytes * static_cast<std::size_t>(panels); }
  /// Where the record of a block begins.
  std::size_t record_at(std::int64_t b) const {
    const std::size_t bytes = values_at + value_bytes * static_cast<std::size_t>(record);
    return row_scale_bytes + static_cast<std::size_t>(b / record) * bytes;
  }
};

/// Block scales that a checkpoint holds in another format than the scheme's become f32.
PanelShape panel_shape(const Scheme& scheme, Format scale_format, std::int64_t n, std::int64_t k);

/// Fills panels from a matrix in the canonical layout; `out` is zeroed and 64-byte aligned. The panels are
/// `stride` bytes apart, so that matrices that are multiplied by the same inputs can take turns.
void pack_panels(const QuantizedMatrix& matrix, const PanelShape& shape, std::byte* out, std::size_t stride);

/// How activations are multiplied. Weights whose codes are small integers (or twice a value is one) take
/// bytes, which int8 multiplies take four at a time:
///   limbs1  int8 and e2m1 activations (e2m1: twice the value), exact
///   limbs2  all others, as 16-bit fixed point, x = (256 * high + low) * scale, with a power of two for each
///           chunk (or block, where activations have block scales). The error is at most 2^-15 of its largest
///           number; bf16 itself is off by up to 2^-9 of each.
/// Other weights take
///   pairs   bf16, two at a time: activations that are exact in bf16
///   floats  f32, everything
enum class PanelForm { limbs1, limbs2, pairs, floats };

/// What has a scale of its own in a row of activations, beside the row.
enum class InputScale { none, block, chunk };

/// One row of activations as the multiply wants it.
struct PanelInput {
  const std::byte* codes =
      nullptr;                    ///< [padded_k] in the form's type; limbs2: [padded_k / 64][high, low][64]
  const float* scales = nullptr;  ///< [blocks] or [chunks]
  /// [blocks] what sums of bytes start with: -panel_offset times the sum of the block's bytes
  const std::int32_t* starts = nullptr;
  std::int32_t start = 0;  ///< the sum of all of them
  float row_scale = 1.0f;
};

/// `panels` panels, `apart` bytes from each other: out[t * stride + p * out_apart + r] = row r of panel p
/// times input t. At most kPanelTokens tokens.
using PanelMultiply = void (*)(const PanelShape& shape, const std::byte* first, std::int64_t apart,
                               int panels, const PanelInput* inputs, std::int64_t tokens, float* out,
                               std::int64_t stride, std::int64_t out_apart);

struct PanelKernels {
  /// nullptr if this instruction set has none. `foreign`: block scales are f32 where the scheme has a shorter
  /// format.
  PanelMultiply (*find)(SchemeId id, PanelForm form, InputScale scale, bool foreign);
};

const PanelKernels& panel_kernels(Isa isa);

/// What is added to codes of a format to make bytes of them (limbs1, limbs2); to those of uint4, less their
/// zero points.
constexpr std::int32_t panel_offset(Format value) {
  return value.bits == 8 ? 128 : value == formats::uint4 ? 16 : value.is_integer() ? 8 : 12;
}

/// Whether multiplying pairs of bf16 is faster here than multiplying f32: on some CPUs it is twice as fast,
/// on others half. Measured once.
bool pairs_are_fast(Isa isa);

}  // namespace gatefold
