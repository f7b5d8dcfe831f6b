#pragma once
/// \file
/// What a multiply over panels is made for, and what all of them do. For *.lanes.cpp files only.

#include <type_traits>

#include "cpu/panel.h"
#include "cpu/panel_values.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

/// What decoded units are multiplied with, and what scales the sums. A unit holds 4 columns in bytes, 2 in
/// bf16, 1 in f32, and meets 4 bytes of the activations. kShortBlock: columns of a block, if they are few;
/// else 0.
template <PanelForm kPanelForm, bool kNarrow, int kShortBlock, bool kHasScales, bool kHasZeros,
          InputScale kInputScale>
struct Arithmetic {
  static constexpr PanelForm kForm = kPanelForm;
  static constexpr bool kScaled = kHasScales, kZeroPoints = kHasZeros;
  static constexpr InputScale kInput = kInputScale;

  static constexpr bool kBytes = kForm == PanelForm::limbs1 || kForm == PanelForm::limbs2;
  static constexpr int kLimbs = kForm == PanelForm::limbs2 ? 2 : 1;
  static constexpr int kColumns = kBytes ? 4 : kForm == PanelForm::pairs ? 2 : 1;  // of a unit
  static constexpr int kBlockUnits = kShortBlock / kColumns;
  /// Whether matrix tiles multiply chunks (panel_tiles.h). Their sums of floats round at other places, so
  /// that they do those of one token as well.
  static constexpr bool kTiles = kHasTiles && kForm != PanelForm::floats && kBlockUnits == 0;
  static constexpr std::int64_t kLeastTokens = kTiles && !kBytes ? 1 : 3;                   // of a chunk
  static constexpr std::int64_t kChunk = kBytes || kTiles ? kPanelChunk : kPanelChunk / 2;  // columns
  using Unit = std::conditional_t<kForm == PanelForm::floats, Rows, Codes>;
  using Sum = std::conditional_t<kBytes, Ints, Rows>;
  /// Sums that nothing scales run through the row: of bytes as integers, which start with starts of all
  /// blocks.
  static constexpr bool kPlain =
      !kScaled && !kZeroPoints && kInput == InputScale::none && kForm != PanelForm::limbs2;
  static constexpr bool kIntegers = kPlain && kBytes;
  using Total = std::conditional_t<kIntegers, Ints, Rows>;

  static Sum zero() {
    if constexpr (kBytes)
      return ints(0);
    else
      return rows(0);
  }

  /// sum + unit times the activations at x.
  static Sum accumulate(Sum sum, Unit unit, std::uint32_t x) {
    if constexpr (kBytes) return dot4<kNarrow>(sum, unit, static_cast<std::int32_t>(x));
#if defined(GATEFOLD_DOT2)
    else if constexpr (kForm == PanelForm::pairs)
      return dot2(sum, unit, x);
#endif
    else
      return multiply_add(unit, rows(std::bit_cast<float>(x)), sum);
  }

  static Total zero_total() {
    if constexpr (kIntegers)
      return ints(0);
    else
      return rows(0);
  }
  static Total first_total(const PanelInput& in, std::int64_t blocks) {
    if constexpr (kIntegers) {
      std::int32_t sum = 0;
      for (std::int64_t b = 0; b < blocks; ++b) sum += in.starts[b];
      return ints(sum);
    } else {
      return rows(0);
    }
  }
  static Ints start(const PanelInput& in, std::int64_t b) {
    return ints(kIntegers ? 0 : in.starts[b]);
  }

  /// part + the sum of block b, scaled.
  static Ints add_block(Ints part, Ints sum, Rows, Rows, const PanelInput&, std::int64_t) {
    return part + sum;
  }
  static Rows add_block(Rows part, Rows sum, Rows scales, Rows zeros, const PanelInput& in, std::int64_t b) {
    if constexpr (kZeroPoints) sum = multiply_add(zeros, rows(-in.block_sums[b]), sum);
    if constexpr (kInput == InputScale::block) sum = sum * rows(in.scales[b]);
    if constexpr (!kScaled) return part + sum;
    return multiply_add(sum, scales, part);
  }
};

/// Arithmetic, and how weights are decoded for it, in steps.
template <Format kValue, BlockScale kBlockScale, int kShortBlock, bool kHasZeros, PanelForm kPanelForm,
          InputScale kInputScale>
struct Kernel : Arithmetic<kPanelForm, kAnyDot4 || Values<kValue>::kNarrow, kShortBlock,
                           kBlockScale != BlockScale::none, kHasZeros, kInputScale> {
  using A = Arithmetic<kPanelForm, kAnyDot4 || Values<kValue>::kNarrow, kShortBlock,
                       kBlockScale != BlockScale::none, kHasZeros, kInputScale>;
  using V = Values<kValue>;
  using Unit = typename A::Unit;
  static constexpr BlockScale kScale = kBlockScale;
  static constexpr int kUnits = V::kColumns / A::kColumns;  // of a step
  /// Whether a chunk can be multiplied as it lies in memory.
  static constexpr bool kDecoded =
      !A::kScaled &&
      (A::kBytes ? kValue == formats::int8 : kPanelForm == PanelForm::pairs && kValue == formats::bf16);

  static void decode(const V& values, const std::byte* p, Unit* units) {
    if constexpr (A::kBytes) {
      V::to_bytes(p, units);
    } else if constexpr (kPanelForm == PanelForm::pairs) {
      values.to_pairs(p, units);
    } else {
      const auto columns = [&]<int... kColumn>(std::integer_sequence<int, kColumn...>) {
        ((units[kColumn] = V::template column<kColumn>(p)), ...);
      };
      columns(std::make_integer_sequence<int, kUnits>());
    }
  }

  static void store(const PanelShape& shape, const std::byte* panel, const PanelInput& in, Ints total,
                    float* out) {
    store(shape, panel, in, to_float(total), out);
  }
  static void store(const PanelShape& shape, const std::byte* panel, const PanelInput& in, Rows total,
                    float* out) {
    const Rows row_scales = shape.row_scale_bytes != 0 ? load_rows(panel) : rows(1);
    store_rows(out, total * (row_scales * rows(in.row_scale * (V::kFactor * scale_factor(kScale)))));
  }
};

/// Walks the blocks of one panel.
class Blocks {
 public:
  Blocks() = default;
  Blocks(const PanelShape& shape, const std::byte* panel)
      : next(panel + shape.row_scale_bytes), in_record_(shape.record) {}

  void enter(const PanelShape& shape) {
    if (in_record_ == shape.record) {
      record_ = next;
      next += shape.values_at;
      in_record_ = 0;
    }
    scales = record_ + static_cast<std::size_t>(in_record_) * shape.scale_bytes;
    zeros = record_ + shape.zeros_at + in_record_ * kPanelRows;
    ++in_record_;
  }

  const std::byte* next = nullptr;  // values of the block; who reads them moves it on
  const std::byte* scales = nullptr;
  const std::byte* zeros = nullptr;

 private:
  const std::byte* record_ = nullptr;
  std::int64_t in_record_ = 0;
};

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
