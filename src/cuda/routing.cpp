#include "cuda/routing.h"

#include <fmt/format.h>

namespace gatefold::cuda {

Status route(const RouteArgs& args, Stream stream) {
  if (args.experts < 1 || args.experts > kMostExperts || args.top_k < 1 || args.top_k > kMostTopK ||
      (args.given_ids == nullptr && args.top_k > args.experts))
    return {Code::unsupported,
            fmt::format("routing to {} of {} experts: the CUDA backend routes to at most {} of {}",
                        args.top_k, args.experts, kMostTopK, kMostExperts)};
  if (args.first_expert < 0 || args.end_expert < args.first_expert || args.end_expert > args.experts)
    return {Code::invalid_argument, fmt::format("experts {} to {} are not a range of {}", args.first_expert,
                                                args.end_expert, args.experts)};
  if (args.tokens < 0 || (args.tokens > 0 && (args.logits == nullptr) == (args.given_ids == nullptr)))
    return {Code::invalid_argument, fmt::format("routing {} tokens needs either logits or ids", args.tokens)};
  return check(launch_route(args, {}, native(stream)), "route tokens");
}

Status router_logits(const RouterArgs& args, Stream stream) {
  if (args.tokens == 0) return {};
  if (args.dtype != DType::f32 && args.dtype != DType::f16 && args.dtype != DType::bf16)
    return {Code::invalid_argument, fmt::format("hidden states are {}", name(args.dtype))};
  return check(launch_router_logits(args, native(stream)), "compute router logits");
}

}  // namespace gatefold::cuda
