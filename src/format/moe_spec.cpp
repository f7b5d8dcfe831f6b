#include "gatefold/moe_spec.h"

#include <fmt/format.h>

#include <cmath>

#include "gatefold/quantize.h"

namespace gatefold {
namespace {

Status invalid(std::string message) {
  return {Code::invalid_argument, std::move(message)};
}

Status check_routing(const Routing& routing, int experts, int top_k) {
  if (top_k < 1 || top_k > experts)
    return invalid(fmt::format("top_k {} is not in [1, {}], the number of experts", top_k, experts));
  if (routing.groups < 1 || routing.groups > 64 || experts % routing.groups != 0)
    return invalid(
        fmt::format("{} experts cannot be divided into {} groups (at most 64)", experts, routing.groups));
  if (routing.top_groups < 1 || routing.top_groups > routing.groups)
    return invalid(fmt::format("top_groups {} is not in [1, {}], the number of groups", routing.top_groups,
                               routing.groups));
  const int group = experts / routing.groups;
  if (top_k > routing.top_groups * group)
    return invalid(fmt::format("top_k {} is more than the {} experts of {} chosen groups of {}", top_k,
                               routing.top_groups * group, routing.top_groups, group));
  if (routing.groups > 1 && routing.group_score == GroupScore::top2_sum && group < 2)
    return invalid(fmt::format("groups of {} expert have no two best experts", group));
  if (!std::isfinite(routing.scaling_factor))
    return invalid(fmt::format("scaling_factor {} is not finite", routing.scaling_factor));
  if (!std::isfinite(routing.epsilon) || routing.epsilon < 0)
    return invalid(fmt::format("epsilon {} is not a finite number >= 0", routing.epsilon));
  return {};
}

Status check_activation(const Activation& activation) {
  if (!std::isfinite(activation.alpha) || !std::isfinite(activation.beta))
    return invalid(
        fmt::format("activation: alpha {}, beta {} are not finite", activation.alpha, activation.beta));
  if (!(activation.limit > 0))
    return invalid(fmt::format("activation: limit {} is not positive", activation.limit));
  return {};
}

/// The matrices of an expert: gate and up [intermediate, hidden], down [hidden, intermediate].
Status check_matrices(const char* what, SchemeId scheme, int intermediate, int hidden) {
  Status status = check_shape(scheme, intermediate, hidden);
  if (status.ok()) status = check_shape(scheme, hidden, intermediate);
  if (status.ok()) return status;
  return {status.code(), fmt::format("{}: {}", what, status.message())};
}

}  // namespace

Status MoeSpec::validate() const {
  // Sizes up to 2^21 - 1: products of three fit in 64 bits.
  constexpr int limit = (1 << 21) - 1;
  const auto in_range = [&](int size) { return size >= 1 && size <= limit; };
  if (!in_range(experts) || !in_range(hidden) || !in_range(intermediate))
    return invalid(fmt::format("experts {}, hidden {}, intermediate {}: each must be in [1, {}]", experts,
                               hidden, intermediate, limit));
  if (shared.intermediate < 0 || shared.intermediate > limit)
    return invalid(
        fmt::format("shared expert: intermediate {} is not in [0, {}]", shared.intermediate, limit));
  if (act_dtype != DType::bf16 && act_dtype != DType::f16)
    return invalid(fmt::format("act_dtype {} is neither BF16 nor F16", name(act_dtype)));
  if (!in_range(ep_size) || std::int64_t{experts} * ep_size > limit)
    return invalid(fmt::format("ep_size {} of {} experts: both and their product must be in [1, {}]", ep_size,
                               experts, limit));
  if (Status status = check_routing(routing, experts * ep_size, top_k); !status.ok()) return status;
  if (Status status = check_activation(activation); !status.ok()) return status;
  if (Status status = check_matrices("experts", scheme, intermediate, hidden); !status.ok()) return status;
  if (shared.intermediate == 0) return {};
  return check_matrices("shared expert", shared.scheme, shared.intermediate, hidden);
}

}  // namespace gatefold
