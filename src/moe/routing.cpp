#include "moe/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "format/exponential.h"
#include "gatefold/moe.h"

namespace gatefold {
namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

void score_experts(Score score, int experts, const float* logits, float* scores) {
  if (score == Score::sigmoid) {
    for (int e = 0; e < experts; ++e) scores[e] = sigmoid(logits[e]);
  } else if (score == Score::sqrt_softplus) {
    for (int e = 0; e < experts; ++e) scores[e] = sqrt_softplus(logits[e]);
  } else {
    float largest = kExcluded;
    for (int e = 0; e < experts; ++e) largest = std::max(largest, logits[e]);
    float parts[kSumParts] = {};
    for (int e = 0; e < experts; ++e) {
      scores[e] = exponential(logits[e] - largest);
      if (!std::isnan(scores[e])) parts[e % kSumParts] += scores[e];
    }
    const float sum = add_parts(parts);
    for (int e = 0; e < experts; ++e) scores[e] /= sum;
  }
  for (int e = 0; e < experts; ++e)
    if (!(scores[e] <= std::numeric_limits<float>::max())) scores[e] = 0;  // NaN, Inf
}

float group_value(GroupScore kind, const float* selection, int size) {
  float best = kExcluded, second = kExcluded;
  for (int i = 0; i < size; ++i) {
    const float value = selection[i];
    second = std::max(second, std::min(value, best));
    best = std::max(best, value);
  }
  return kind == GroupScore::max || size == 1 ? best : best + second;
}

/// Leaves only the experts of the best groups selectable. A group is kept if fewer than top_groups groups
/// beat it, ties to the lower index.
void exclude_groups(const Routing& routing, int experts, float* selection) {
  const int size = experts / routing.groups;
  // Group values are compared pairwise: groups are few (8), and this needs no memory.
  const auto value = [&](int group) {
    return group_value(routing.group_score, selection + group * size, size);
  };
  std::uint64_t kept = 0;
  for (int group = 0; group < routing.groups; ++group) {
    const float mine = value(group);
    int better = 0;
    for (int other = 0; other < routing.groups; ++other) {
      const float theirs = value(other);
      better += theirs > mine || (theirs == mine && other < group);
    }
    if (better < routing.top_groups) kept |= std::uint64_t{1} << group;
  }
  for (int e = 0; e < experts; ++e)
    if ((kept >> (e / size) & 1) == 0) selection[e] = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

void route_token(const Routing& routing, int experts, int top_k, const float* logits,
                 const float* correction_bias, float* scratch, std::int32_t* ids, float* weights) {
  float* scores = scratch;
  float* selection = scratch + experts;  // NaN: not selectable (any more)
  score_experts(routing.score, experts, logits, scores);
  for (int e = 0; e < experts; ++e)
    selection[e] = scores[e] + (correction_bias != nullptr ? correction_bias[e] : 0);
  if (routing.groups > 1) exclude_groups(routing, experts, selection);

  float sum = 0;
  for (int slot = 0; slot < top_k; ++slot) {
    int best = -1;
    for (int e = 0; e < experts; ++e)
      if (!std::isnan(selection[e]) && (best < 0 || selection[e] > selection[best])) best = e;
    // Only a NaN bias leaves too few: any expert not chosen yet will do.
    for (int e = 0; best < 0; ++e)
      if (std::find(ids, ids + slot, e) == ids + slot) best = e;
    ids[slot] = best;
    weights[slot] = scores[best];
    sum += scores[best];
    selection[best] = std::numeric_limits<float>::quiet_NaN();
  }
  const float norm = routing.renormalize ? sum + routing.epsilon : 1.0f;
  for (int slot = 0; slot < top_k; ++slot)
    weights[slot] = weights[slot] / (norm > 0 ? norm : 1.0f) * routing.scaling_factor;
}

void route(const Routing& routing, int experts, int top_k, const float* logits, std::int64_t tokens,
           const float* correction_bias, std::int32_t* topk_ids, float* topk_weights) {
  std::vector<float> scratch(2 * static_cast<std::size_t>(experts));
  for (std::int64_t t = 0; t < tokens; ++t)
    route_token(routing, experts, top_k, logits + t * experts, correction_bias, scratch.data(),
                topk_ids + t * top_k, topk_weights + t * top_k);
}

}  // namespace gatefold
