#include "model/least_loss.h"

#include <algorithm>

namespace gatefold {
namespace {

/// A choice for the first items.
struct Node {
  std::uint64_t size = 0;
  double loss = 0;
  std::size_t option = 0;  // of the last of them
  std::size_t before = 0;  // the node for those before it
};

/// Keeps the nodes that lose less than every smaller one, in the order of sizes.
void keep_undominated(std::vector<Node>& nodes) {
  std::stable_sort(nodes.begin(), nodes.end(), [](const Node& a, const Node& b) {
    return a.size != b.size ? a.size < b.size : a.loss < b.loss;
  });
  std::size_t kept = 0;
  for (const Node& node : nodes)
    if (kept == 0 || node.loss < nodes[kept - 1].loss) nodes[kept++] = node;
  nodes.resize(kept);
}

}  // namespace

std::optional<std::vector<std::size_t>> least_loss(std::span<const std::vector<Option>> items,
                                                   std::uint64_t budget) {
  std::uint64_t needed = 0;  // by the smallest options of the items that are left
  std::vector<std::uint64_t> smallest;
  for (const std::vector<Option>& options : items) {
    if (options.empty()) return std::nullopt;
    smallest.push_back(std::min_element(options.begin(), options.end(), [](const Option& a, const Option& b) {
                         return a.size < b.size;
                       })->size);
    needed += smallest.back();
  }
  if (needed > budget) return std::nullopt;

  std::vector<std::vector<Node>> stages = {{Node{}}};
  for (std::size_t item = 0; item < items.size(); ++item) {
    needed -= smallest[item];
    std::vector<Node> nodes;
    for (std::size_t before = 0; before < stages.back().size(); ++before)
      for (std::size_t option = 0; option < items[item].size(); ++option) {
        const Option& chosen = items[item][option];
        const Node& node = stages.back()[before];
        if (node.size + chosen.size + needed <= budget)
          nodes.push_back({node.size + chosen.size, node.loss + chosen.loss, option, before});
      }
    keep_undominated(nodes);
    stages.push_back(std::move(nodes));
  }

  std::vector<std::size_t> choice(items.size());
  std::size_t at = stages.back().size() - 1;  // the largest loses least
  for (std::size_t item = items.size(); item-- > 0;) {
    const Node& node = stages[item + 1][at];
    choice[item] = node.option;
    at = node.before;
  }
  return choice;
}

std::vector<std::vector<std::size_t>> near_choices(std::span<const std::vector<Option>> items,
                                                   std::uint64_t budget,
                                                   const std::vector<std::size_t>& choice,
                                                   std::size_t count) {
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < items.size(); ++i) size += items[i][choice[i]].size;
  struct Change {
    std::size_t item, option;
    std::int64_t size;
    double loss;
  };
  std::vector<Change> changes;
  for (std::size_t i = 0; i < items.size(); ++i)
    for (std::size_t option = 0; option < items[i].size(); ++option) {
      const Option &to = items[i][option], &from = items[i][choice[i]];
      if (option != choice[i])
        changes.push_back({i, option, static_cast<std::int64_t>(to.size - from.size), to.loss - from.loss});
    }
  struct Found {
    double loss;
    std::vector<Change> changes;
  };
  std::vector<Found> found;
  const auto consider = [&](double loss, std::int64_t more, std::vector<Change> all) {
    if (static_cast<std::int64_t>(size) + more <= static_cast<std::int64_t>(budget))
      found.push_back({loss, std::move(all)});
  };
  for (auto first = changes.begin(); first != changes.end(); ++first) {
    consider(first->loss, first->size, {*first});
    for (auto second = first + 1; second != changes.end(); ++second)
      if (second->item != first->item)
        consider(first->loss + second->loss, first->size + second->size, {*first, *second});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Found& a, const Found& b) { return a.loss < b.loss; });
  found.resize(std::min(found.size(), count));
  std::vector<std::vector<std::size_t>> choices;
  for (const Found& one : found) {
    choices.push_back(choice);
    for (const Change& change : one.changes) choices.back()[change.item] = change.option;
  }
  return choices;
}

}  // namespace gatefold
