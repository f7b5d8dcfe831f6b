// The memory that packed weights take.
#include <map>

#include "format/matrix.h"
#include "moe_layer.h"

namespace gatefold {
namespace {

/// The same values under scales stored as f32.
QuantizedMatrix widened(const QuantizedMatrix& m) {
  QuantizedMatrix wide = m;
  convert_scales(wide, formats::f32);
  return wide;
}

class EveryScheme : public testing::TestWithParam<std::size_t> {
 protected:
  EveryScheme() : layer_(small_spec(static_cast<SchemeId>(GetParam()))) {}

  /// Experts from `first_wide` on store their scales as f32.
  Result<ExpertWeights> pack_wide(int first_wide) {
    return ExpertWeights::pack(layer_.spec(), {}, layer_.reference().vectors,
                               [&, first_wide](int e, Projection projection) -> Result<QuantizedMatrix> {
                                 ++asked_[{e, projection}];
                                 const ReferenceFfn& ffn = layer_.reference().routed[e];
                                 const QuantizedMatrix& m = projection == Projection::gate ? ffn.gate
                                                            : projection == Projection::up ? ffn.up
                                                                                           : ffn.down;
                                 return e < first_wide ? m : widened(m);
                               });
  }
  void expect_same_matrices(const ExpertWeights& weights, bool wide) const {
    for (int e = 0; e < weights.spec().experts; ++e) {
      const ReferenceFfn& ffn = layer_.reference().routed[static_cast<std::size_t>(e)];
      for (const auto& [projection, packed] : {std::pair{Projection::gate, &ffn.gate},
                                               {Projection::up, &ffn.up},
                                               {Projection::down, &ffn.down}}) {
        const auto matrix = weights.matrix(e, projection);
        ASSERT_TRUE(matrix.ok()) << matrix.status().message();
        const QuantizedMatrix expected = wide ? widened(*packed) : *packed;
        EXPECT_EQ(matrix->values, expected.values);
        EXPECT_EQ(matrix->scales, expected.scales);
        EXPECT_EQ(matrix->scale_format, expected.scale_format);
        EXPECT_EQ(matrix->zero_points, expected.zero_points);
        EXPECT_EQ(matrix->tensor_scale.value, expected.tensor_scale.value);
        EXPECT_EQ(matrix->tensor_scale.divides, expected.tensor_scale.divides);
      }
    }
  }
  bool can_be_wide() const {
    const Operand& w = scheme(layer_.spec().scheme).weight;
    return w.group.n == 1 && w.group.k != 0 && w.scale.bits == 16;
  }
  /// Of three matrices an expert, each at a multiple of 64.
  static std::size_t padding(const ExpertWeights& weights) {
    return static_cast<std::size_t>(weights.spec().experts) * 3 * 63;
  }

  Layer layer_;
  std::map<std::pair<int, Projection>, int> asked_;
};

TEST_P(EveryScheme, TakeWhatTheirLayoutSays) {
  const auto weights = pack_wide(1000);
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  EXPECT_GE(weights->state().memory->bytes(), weights->packed_bytes());
  EXPECT_LE(weights->state().memory->bytes(), weights->packed_bytes() + padding(*weights));
  EXPECT_EQ(asked_.size(), 3u * static_cast<std::size_t>(layer_.spec().experts));
  for (const auto& [_, times] : asked_) EXPECT_EQ(times, 1);
}

TEST_P(EveryScheme, GiveMatricesBack) {
  const auto weights = pack_wide(1000);
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  expect_same_matrices(*weights, false);
  if (can_be_wide()) expect_same_matrices(*pack_wide(0), true);
  const auto none = weights->matrix(layer_.spec().experts, Projection::up);
  EXPECT_EQ(none.status().code(), Code::invalid_argument);
}

TEST_P(EveryScheme, WiderScalesTakeMore) {
  if (!can_be_wide()) return;
  const auto narrow = pack_wide(1000), wide = pack_wide(0);
  ASSERT_TRUE(wide.ok()) << wide.status().message();
  EXPECT_GT(wide->packed_bytes(), narrow->packed_bytes());
  EXPECT_LE(wide->state().memory->bytes(), wide->packed_bytes() + padding(*wide));
}

TEST_P(EveryScheme, ScalesThatGrowAreRefused) {
  if (!can_be_wide()) return;
  const auto weights = pack_wide(3);
  ASSERT_FALSE(weights.ok());
  EXPECT_EQ(weights.status().code(), Code::unsupported);
  EXPECT_NE(weights.status().message().find("scales stored as f32"), std::string::npos)
      << weights.status().message();
}

INSTANTIATE_TEST_SUITE_P(Table, EveryScheme, testing::Range<std::size_t>(0, all_schemes().size()),
                         [](const auto& info) { return std::string(all_schemes()[info.param].name); });

}  // namespace
}  // namespace gatefold
