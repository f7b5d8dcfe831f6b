// The multiply over panels (panel.h): each panel is one stream, decoded in registers for a few tokens at a
// time, or once for all of them where registers have room for few; or by tiles where the CPU has matrix
// multiplies.

#include <algorithm>

#include "cpu/panel_columns.h"
#include "cpu/panel_kernel.h"
#include "cpu/panel_tiles.h"

#if defined(GATEFOLD_ISA_BELOW)
namespace gatefold::GATEFOLD_ISA_BELOW {
extern const PanelKernels panel_kernels;
}
#endif

namespace gatefold::GATEFOLD_ISA {
namespace {

/// One panel by M tokens.
template <class K, int M>
void stream(const PanelShape& shape, const std::byte* panel, Ahead ahead, const PanelInput* inputs,
            float* out, std::int64_t stride) {
  using V = typename K::V;
  constexpr int chains = K::chains(M);
  const V values{};
  const std::int64_t block = K::kBlockUnits != 0 ? K::kBlockUnits * K::kColumns : shape.block;
  const std::int64_t run =
      (K::kLimbs == 2 ? std::min(block, kLimbColumns) : block) / K::kStepColumns;  // steps
  const std::int64_t runs = block / K::kStepColumns / run;
  const std::int64_t chunk_blocks = kPanelChunk / block;
  Blocks blocks(shape, panel);
  typename K::Total parts[M];
  [[maybe_unused]] Rows totals[M];  // of chunks
  for (int m = 0; m < M; ++m) {
    parts[m] = K::first_total(inputs[m]);
    totals[m] = rows(0);
    if (!shape.write_around) __builtin_prefetch(out + m * stride, 1);
  }
  for (std::int64_t b = 0, chunk = 0; b < shape.blocks; ++chunk) {
    for (const std::int64_t end = std::min(b + chunk_blocks, shape.blocks); b < end; ++b) {
      blocks.enter(shape);
      const Codes zeros = blocks.zeros<K>();
      typename K::Sum sums[M][K::kLimbs][chains];
      for (int m = 0; m < M; ++m)
        for (int l = 0; l < K::kLimbs; ++l)
          for (int c = 0; c < chains; ++c) sums[m][l][c] = K::zero();
      if constexpr (K::kBytes)
        for (int m = 0; m < M; ++m) sums[m][K::kLimbs - 1][0] = K::start(inputs[m], b);
      std::int64_t at = K::position(b * block);  // of the activations
      for (std::int64_t r = 0; r < runs; ++r, at += (K::kLimbs - 1) * kLimbColumns)
        for (std::int64_t i = 0; i < run; ++i, at += K::position(K::kStepColumns)) {
          ahead.fetch(K::kStepBytes);
          if constexpr (K::kForm == PanelForm::floats) {
            // One column at a time, as registers do not hold a step of them beside the sums.
            unrolled<K::kUnits>([&](auto u) __attribute__((always_inline)) {
              const Rows column = K::template column<u>(zeros, blocks.next);
              unrolled<M>([&](auto m) __attribute__((always_inline)) {
                add_product(sums[m][0][u % chains], column, rows(load_at<float>(inputs[m].codes + at, u)));
              });
            });
            blocks.next += V::kBytes;
          } else {
            Codes units[K::kTimes * K::kUnits];
            for (int t = 0; t < K::kTimes; ++t, blocks.next += V::kBytes)
              K::decode(values, zeros, blocks.next, units + t * K::kUnits);
            unrolled<M>([&](auto m) __attribute__((always_inline)) {
              unrolled<K::kLimbs>([&](auto l) __attribute__((always_inline)) {
                K::accumulate(sums[m][l], units, inputs[m].codes + at + l * kLimbColumns);
              });
            });
          }
        }
      const Rows scales = block_scales<K::kScale>(blocks.scales);
      for (int m = 0; m < M; ++m) {
        typename K::Sum limbs[K::kLimbs];
        for (int l = 0; l < K::kLimbs; ++l)
          limbs[l] = chains == 2 ? sums[m][l][0] + sums[m][l][1] : sums[m][l][0];
        typename K::Total sum;
        if constexpr (!K::kBytes || K::kIntegers)
          sum = limbs[0];
        else
          sum = to_float(K::kLimbs == 2 ? shift_left<8>(limbs[0]) + limbs[1] : limbs[0]);
        parts[m] = K::add_block(parts[m], sum, scales, inputs[m], b);
      }
    }
    if constexpr (K::kInput == InputScale::chunk)
      for (int m = 0; m < M; ++m) {
        totals[m] = multiply_add(parts[m], rows(inputs[m].scales[chunk]), totals[m]);
        parts[m] = rows(0);
      }
  }
  for (int m = 0; m < M; ++m)
    if constexpr (K::kInput == InputScale::chunk)
      write(shape, out + m * stride, K::result(shape, panel, inputs[m], totals[m]));
    else
      write(shape, out + m * stride, K::result(shape, panel, inputs[m], parts[m]));
}

/// One panel by any number of tokens, some at a time. All but the first find it in a cache; each fetches a
/// part of the next one.
template <class K, int M = K::kStreamTokens>
void streams(const PanelShape& shape, const std::byte* panel, Ahead ahead, const PanelInput* inputs,
             std::int64_t tokens, float* out, std::int64_t stride) {
  for (std::int64_t left = (tokens + M - 1) / M; left > 0; --left) {
    const std::int64_t m = (tokens + left - 1) / left;
    if constexpr (M > 1)
      if (m < M) return streams<K, M - 1>(shape, panel, ahead, inputs, tokens, out, stride);
    stream<K, M>(shape, panel, ahead, inputs, out, stride);
    ahead.next += static_cast<std::int64_t>(shape.panel_bytes) / 64 * ahead.step;
    inputs += M;
    out += M * stride;
    tokens -= M;
  }
}

template <class K>
void multiply(const PanelShape& shape, const std::byte* first, std::int64_t apart, int panels,
              const PanelInput* inputs, std::int64_t tokens, float* out, std::int64_t stride,
              std::int64_t out_apart) {
  if constexpr (K::kTiles)
    if (tokens > K::kStreamTokens)
      return by_tiles<K>(shape, first, apart, panels, inputs, tokens, out, stride, out_apart);
  if constexpr (K::kStreamTokens > 0)
    for (int panel = 0; panel < panels; ++panel) {
      const std::byte* at = first + panel * apart;
      const std::int64_t times = (tokens + K::kStreamTokens - 1) / K::kStreamTokens;
      const Ahead ahead = times > 1 ? Ahead{at + shape.panel_bytes, (64 + times - 1) / times}
                                    : Ahead{at + (K::slow(tokens) ? kSlowPrefetch : shape.prefetch), 64};
      float* to = out + panel * out_apart;
      if constexpr (K::by_columns(kPanelTokens))
        if (K::by_columns(tokens)) {
          multiply_by_columns<K>(shape, at, ahead, inputs, tokens, to, stride);
          continue;
        }
      streams<K>(shape, at, ahead, inputs, tokens, to, stride);
    }
  if (shape.write_around) order_streams();
}

constexpr BlockScale block_scale(const Operand& w, bool foreign) {
  if (w.group.k == 0) return BlockScale::none;
  if (w.group.n > 1) return BlockScale::one_f32;
  return foreign                     ? BlockScale::f32
         : w.scale == formats::bf16  ? BlockScale::bf16
         : w.scale == formats::ue8m0 ? BlockScale::ue8m0
         : w.scale == formats::ue4m3 ? BlockScale::ue4m3
                                     : BlockScale::f32;
}

/// Whether format F can be multiplied in a form here.
template <Format F>
constexpr bool can_multiply(PanelForm form) {
  if (form == PanelForm::floats) return true;
  if (form != PanelForm::pairs) return F.bits == 4 || F == formats::int8;
#if defined(GATEFOLD_DOT2)
  return F == formats::bf16 || F == formats::e4m3 || F == formats::e5m2;
#else
  return false;
#endif
}

/// The multiply of a scheme's weights; nullptr if there is none, or none that is new here.
template <class S, PanelForm kForm, InputScale kInput, bool kForeign>
constexpr PanelMultiply choose() {
  constexpr Operand w = S::scheme.weight, activation = S::scheme.activation;
  static_assert(w.group.k == 0 || (w.group.k >= kLeastPanelBlock && kMostPanelBlock % w.group.k == 0),
                "weights are scaled in groups of 16, 32, 64 or 128 columns");
  static_assert(activation.group.k == 0 || w.group.k == 0 || activation.group.k == w.group.k,
                "activations are scaled in the groups of the weights");
  constexpr bool by_block = activation.group.k != 0;
  constexpr bool possible = kInput == InputScale::block   ? by_block && kForm != PanelForm::floats
                            : kInput == InputScale::chunk ? kForm == PanelForm::limbs2
                                                          : kForm != PanelForm::limbs2;
  constexpr int short_block = w.group.k <= 32 ? w.group.k : 0;
  if constexpr (possible && can_multiply<w.value>(kForm)) {
    using K = Kernel<w.value, block_scale(w, kForeign), short_block, w.zero_point.stored(), kForm, kInput>;
    if constexpr (K::kIsNew) return multiply<K>;
  }
  return nullptr;
}

constexpr int kForms = 4, kInputScales = 3;
struct Table {
  PanelMultiply at[std::size(operands::table)][kForms][kInputScales][2];
};

constexpr Table table = [] {
  Table all{};
  for_each_scheme([&]<class S>() {
    [&]<int... kEach>(std::integer_sequence<int, kEach...>) {
      const auto fill = [&]<int kForm, int kInput>() {
        constexpr auto form = static_cast<PanelForm>(kForm);
        constexpr auto input = static_cast<InputScale>(kInput);
        auto& row = all.at[static_cast<std::size_t>(S::id)][kForm][kInput];
        row[0] = choose<S, form, input, false>();
        row[1] = choose<S, form, input, true>();
      };
      (fill.template operator()<kEach / kInputScales, kEach % kInputScales>(), ...);
    }
    (std::make_integer_sequence<int, kForms * kInputScales>());
  });
  return all;
}();

PanelMultiply find(SchemeId id, PanelForm form, InputScale scale, bool foreign) {
  const PanelMultiply found =
      table.at[static_cast<std::size_t>(id)][static_cast<int>(form)][static_cast<int>(scale)][foreign];
#if defined(GATEFOLD_ISA_BELOW)
  if (found == nullptr) return GATEFOLD_ISA_BELOW::panel_kernels.find(id, form, scale, foreign);
#endif
  return found;
}

}  // namespace

extern const PanelKernels panel_kernels;
const PanelKernels panel_kernels{find};

}  // namespace gatefold::GATEFOLD_ISA
