#pragma once
/// \file
/// The multiple-choice knapsack problem: one option for each item, within a budget.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace gatefold {

struct Option {
  std::uint64_t size = 0;
  double loss = 0;
};

/// The option of each item with the least sum of losses whose sizes add up to at most `budget`; of several,
/// the smallest. Nothing if even the smallest options do not fit. Exact: dynamic programming over the
/// undominated pairs of size and loss (Nemhauser and Ullmann 1969). Their number is at most that of different
/// sums of sizes; layers of one shape have few, since all their sizes are multiples of a large number.
std::optional<std::vector<std::size_t>> least_loss(std::span<const std::vector<Option>> items,
                                                   std::uint64_t budget);

/// Up to `count` other choices within the budget, those with the least sums of losses first, of all that
/// differ from `choice` in one item or two.
std::vector<std::vector<std::size_t>> near_choices(std::span<const std::vector<Option>> items,
                                                   std::uint64_t budget,
                                                   const std::vector<std::size_t>& choice, std::size_t count);

}  // namespace gatefold
