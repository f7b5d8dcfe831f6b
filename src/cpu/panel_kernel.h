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
template <PanelForm kPanelForm, bool kNarrow, int kShortBlock, bool kHasScales, InputScale kInputScale>
struct Arithmetic {
  static constexpr PanelForm kForm = kPanelForm;
  static constexpr bool kScaled = kHasScales;
  static constexpr InputScale kInput = kInputScale;

  static constexpr bool kBytes = kForm == PanelForm::limbs1 || kForm == PanelForm::limbs2;
  static constexpr int kLimbs = kForm == PanelForm::limbs2 ? 2 : 1;
  static constexpr int kColumns = kBytes ? 4 : kForm == PanelForm::pairs ? 2 : 1;  // of a unit
  static constexpr int kBlockUnits = kShortBlock / kColumns;
  /// Whether matrix tiles multiply (panel_tiles.h). Their sums of floats round at other places, so that they
  /// do those of few tokens as well.
  static constexpr bool kTiles = kHasTiles && kForm != PanelForm::floats && kBlockUnits == 0;
  /// The most tokens of one stream: as many as their sums leave room for.
  static constexpr int kStreamTokens = kTiles                       ? (kBytes ? 2 : 0)
                                       : kRowsRegisters == 1        ? 8
                                       : kRowsRegisters == 4        ? 2
                                       : kForm == PanelForm::limbs1 ? 5
                                                                    : 3;
  /// Sums of a block that run side by side, as one would wait for itself; sum c takes units c, c + chains,
  /// ... Floats always have as many, so that a token's result does not depend on its neighbours. Blocks of
  /// few units overlap, and dot4s has less to wait for.
  static constexpr int chains(int tokens) {
    return kBytes && (kBlockUnits != 0 || tokens > 2 || !kAnyDot4) ? 1 : 2;
  }
  /// Where the activations of a column are in a row, in bytes. Limbs take turns.
  static constexpr std::int64_t position(std::int64_t column) {
    return kLimbs == 2 ? column / kLimbColumns * (2 * kLimbColumns) + column % kLimbColumns
                       : column * 4 / kColumns;
  }
  using Sum = std::conditional_t<kBytes, Ints, Rows>;
  /// Sums that nothing scales run through the row: of bytes as integers, which start with starts of all
  /// blocks.
  static constexpr bool kPlain = !kScaled && kInput == InputScale::none && kForm != PanelForm::limbs2;
  static constexpr bool kIntegers = kPlain && kBytes;
  using Total = std::conditional_t<kIntegers, Ints, Rows>;

  static Sum zero() {
    if constexpr (kBytes)
      return ints(0);
    else
      return rows(0);
  }

  /// sums += a step of kUnits units times the activations at x.
  template <int kUnits, int kSums>
  [[gnu::always_inline]] static void accumulate(Sum (&sums)[kSums], const Codes (&units)[kUnits],
                                                const std::byte* x) {
    if constexpr (kBytes && kSums == 1) {
      sums[0] = dot4s<kNarrow>(sums[0], units, x);
    } else {
      unrolled<kUnits>([&](auto u) __attribute__((always_inline)) {
        Sum& sum = sums[u % kSums];
        const auto numbers = load_at<std::uint32_t>(x, u);
        if constexpr (kBytes)
          sum = dot4<kNarrow>(sum, units[u], static_cast<std::int32_t>(numbers));
#if defined(GATEFOLD_DOT2)
        else
          sum = dot2(sum, units[u], numbers);
#endif
      });
    }
  }

  static Total first_total(const PanelInput& in) {
    if constexpr (kIntegers)
      return ints(in.start);
    else
      return rows(0);
  }
  static Ints start(const PanelInput& in, std::int64_t b) {
    return ints(kIntegers ? 0 : in.starts[b]);
  }

  /// part + the sum of block b, scaled.
  static Ints add_block(Ints part, Ints sum, Rows, const PanelInput&, std::int64_t) {
    return part + sum;
  }
  static Rows add_block(Rows part, Rows sum, Rows scales, const PanelInput& in, std::int64_t b) {
    if constexpr (kInput == InputScale::block) sum = sum * rows(in.scales[b]);
    if constexpr (!kScaled) return part + sum;
    return multiply_add(sum, scales, part);
  }
};

/// Arithmetic, and how weights are decoded for it, in steps.
template <Format kValue, BlockScale kBlockScale, int kShortBlock, bool kHasZeros, PanelForm kPanelForm,
          InputScale kInputScale>
struct Kernel : Arithmetic<kPanelForm, kAnyDot4 || Values<kValue>::kNarrow, kShortBlock,
                           kBlockScale != BlockScale::none, kInputScale> {
  using A = Arithmetic<kPanelForm, kAnyDot4 || Values<kValue>::kNarrow, kShortBlock,
                       kBlockScale != BlockScale::none, kInputScale>;
  using V = Values<kValue>;
  static constexpr BlockScale kScale = kBlockScale;
  static constexpr bool kZeroPoints = kHasZeros;
  /// A step of a stream: dot4s wants more units where it sums them in 16 bits, and look-ups overlap.
  static constexpr int kTimes =
      (A::kBytes && V::kNarrow && !kAnyDot4) || (kPanelForm == PanelForm::pairs && kValue.bits == 8) ? 2 : 1;
  static constexpr int kStepBytes = kTimes * V::kBytes, kStepColumns = kTimes * V::kColumns;
  static constexpr int kUnits = V::kColumns / A::kColumns;  // of V::kBytes
  /// Whether so many tokens share columns that are decoded into a cache (panel_columns.h): a stream of few
  /// takes longer to decode than to multiply. bf16 is decoded by one instruction, f16 by its load.
  static constexpr bool by_columns(std::int64_t tokens) {
    return kPanelForm == PanelForm::floats && kRowsRegisters == 2 && kValue != formats::f16 &&
           tokens > (kValue == formats::bf16 ? 16 : A::kStreamTokens);
  }
  /// Whether a stream takes longer than memory: then the CPU's own prefetchers fall behind.
  static constexpr bool slow(std::int64_t tokens) {
    if (tokens <= 2) return kPanelForm == PanelForm::pairs && kValue != formats::bf16;
    return tokens * A::kLimbs * kUnits * 64 / V::kBytes >= 6;  // multiplies of a line
  }
  /// Whether a chunk can be multiplied as it lies in memory.
  static constexpr bool kDecoded =
      !A::kScaled &&
      (A::kBytes ? kValue == formats::int8 : kPanelForm == PanelForm::pairs && kValue == formats::bf16);
  /// Whether it has instructions that GATEFOLD_ISA_BELOW lacks; else that one's kernel is taken.
#if defined(__AMX_TILE__)
  static constexpr bool kIsNew = A::kTiles;
#elif defined(GATEFOLD_DOT2)  // and look-ups of bytes
  static constexpr bool kIsNew =
      kPanelForm == PanelForm::pairs || (A::kBytes && kValue.bits == 4 && kValue.is_float());
#elif defined(GATEFOLD_ISA_BELOW)
  static constexpr bool kIsNew = A::kBytes;
#else
  static constexpr bool kIsNew = true;
#endif

  static void decode(const V& values, Codes zeros, const std::byte* p, Codes* units) {
    if constexpr (A::kBytes) {
      V::to_bytes(p, units);
      for (int u = 0; kZeroPoints && u < kUnits; ++u) units[u] = add_bytes(units[u], zeros);
    } else {
      values.to_pairs(p, units);
    }
  }
  /// The same in f32, one column.
  template <int kColumn>
  static Rows column(Codes zeros, const std::byte* p) {
    const Rows column = V::template column<kColumn>(p);
    if constexpr (kZeroPoints) return column + to_float(byte<0>(zeros));
    return column;
  }

  static Rows result(const PanelShape& shape, const std::byte* panel, const PanelInput& in, Ints total) {
    return result(shape, panel, in, to_float(total));
  }
  static Rows result(const PanelShape& shape, const std::byte* panel, const PanelInput& in, Rows total) {
    const Rows row_scales = shape.row_scale_bytes != 0 ? load_rows(panel) : rows(1);
    return total * (row_scales * rows(in.row_scale * (V::kFactor * scale_factor(kScale))));
  }
};

inline void write(const PanelShape& shape, float* out, Rows y) {
  if (shape.write_around)
    stream_rows(out, y);
  else
    store_rows(out, y);
}

/// What is fetched meanwhile: `step` bytes for every line of a panel.
struct Ahead {
  const std::byte* next;
  std::int64_t step;

  void fetch(int bytes) {
    for (int line = 0; line < bytes; line += 64, next += step) __builtin_prefetch(next, 0, 2);
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
    zeros_ = record_ + shape.zeros_at + in_record_ * kPanelRows;
    ++in_record_;
  }
  /// What is added to the bytes of the block.
  template <class K>
  Codes zeros() const {
    if constexpr (K::kZeroPoints)
      return load_bytes_16_repeated(zeros_);
    else
      return Codes();
  }

  const std::byte* next = nullptr;  // values of the block; who reads them moves it on
  const std::byte* scales = nullptr;

 private:
  const std::byte *record_ = nullptr, *zeros_ = nullptr;
  std::int64_t in_record_ = 0;
};

}  // namespace
}  // namespace gatefold::GATEFOLD_ISA
