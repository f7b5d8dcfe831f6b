#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/slots.h"

namespace gatefold::cuda {
namespace {

TEST(EvenCut, PartsDifferByAtMostOne) {
  for (int whole = 1; whole <= 70; ++whole)
    for (int parts = 1; parts <= whole; ++parts) {
      const EvenCut cut(whole, parts);
      EXPECT_EQ(cut.begin(0), 0);
      EXPECT_EQ(cut.begin(parts), whole);
      for (int part = 0; part < parts; ++part) {
        const int size = cut.begin(part + 1) - cut.begin(part);
        EXPECT_TRUE(size == whole / parts || size == (whole + parts - 1) / parts)
            << "part " << part << " of " << parts << " of " << whole << ": " << size;
        for (int at = cut.begin(part); at < cut.begin(part + 1); ++at) EXPECT_EQ(cut.part_of(at), part);
      }
    }
}

/// Steps and items of the largest number of tokens that positions can count.
TEST(EvenCut, DoesNotOverflow) {
  constexpr int steps = (1 << 30) / 8, items = steps / 20 + 1;
  const EvenCut cut(steps, items);
  EXPECT_EQ(cut.begin(items), steps);
  EXPECT_EQ(cut.part_of(steps - 1), items - 1);
  EXPECT_LE(cut.each + 1, 20);
}

// The loop that an item's tokens take: the least one that is enough.
TEST(TokenLoops, AreEnoughAndNoMore) {
  constexpr cuda::TokenLoops all{{16, 24, 32, 40, 48, 64}};
  for (int count = 1; count <= 64; ++count) {
    const int tokens = all.of(count);
    EXPECT_GE(tokens, count);
    for (const int other : all.tokens)
      EXPECT_TRUE(other < count || tokens <= other) << count << " tokens by " << tokens;
  }
  constexpr cuda::TokenLoops some = all.up_to(40);
  EXPECT_EQ(some.of(1), 16);
  EXPECT_EQ(some.of(33), 40);
  EXPECT_EQ(some.tokens[4], 0);
}

// Stages have room for the tokens of a tile: items do not take more, unless the least loop does.
TEST(TokenLoops, OfEachKernelEndWithItsTiles) {
  int kernels = 0;
  for_each_scheme([&]<class S>() {
    for (const InputKind input :
         {InputKind::bf16, InputKind::f16, InputKind::bf16_record_scales, InputKind::e4m3,
          InputKind::e4m3_fast, InputKind::e4m3_record_scales, InputKind::int8})
      for (const int tokens :
           {32, kFewTokensOfBytes, kFewTokensOfTile, 128, kManyTokensOfTile, 192, kMostTokensOfTile}) {
        const GemmKernel kernel = find_warpgroup_gemm(S::id, input, tokens);
        if (kernel.function == nullptr || tokens % kernel.token_step != 0) continue;
        ++kernels;
        const int tile = std::min(tokens, kernel.tokens);
        EXPECT_EQ(kernel.loops.of(tile), std::max(tile, kernel.loops.of(1)))
            << S::scheme.name << ", " << tokens << " tokens";
        EXPECT_EQ(kernel.loops.of(kernel.tokens), kernel.tokens) << S::scheme.name;
      }
  });
  EXPECT_GT(kernels, 100);
}

}  // namespace
}  // namespace gatefold::cuda
