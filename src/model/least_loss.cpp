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

}  // namespace gatefold
