#include <gtest/gtest.h>

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

}  // namespace
}  // namespace gatefold::cuda
