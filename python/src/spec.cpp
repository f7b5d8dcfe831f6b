// MoeSpec and its parts: plain data, fields as in gatefold/moe_spec.h.
#include "spec.h"

#include <fmt/format.h>

#include <cmath>

namespace nb = nanobind;
using namespace nb::literals;

namespace gatefold::python {
namespace {

template <class Enum>
struct Names {
  const char* what;
  std::vector<std::pair<const char*, Enum>> names;

  Enum find(const std::string& name) const {
    std::string known;
    for (const auto& [text, value] : names) {
      if (name == text) return value;
      known += fmt::format("{}'{}'", known.empty() ? "" : ", ", text);
    }
    invalid(fmt::format("{} = '{}', expected one of {}", what, name, known));
  }
  const char* of(Enum value) const {
    for (const auto& [text, entry] : names)
      if (entry == value) return text;
    return "?";
  }
};

const Names<Activation::Kind> kinds{"kind",
                                    {{"swiglu", Activation::Kind::swiglu},
                                     {"geglu", Activation::Kind::geglu},
                                     {"geglu_tanh", Activation::Kind::geglu_tanh}}};
const Names<Score> scores{
    "score",
    {{"softmax", Score::softmax}, {"sigmoid", Score::sigmoid}, {"sqrt_softplus", Score::sqrt_softplus}}};
const Names<GroupScore> group_scores{"group_score",
                                     {{"max", GroupScore::max}, {"top2_sum", GroupScore::top2_sum}}};
const Names<DType> act_dtypes{"act_dtype", {{"bf16", DType::bf16}, {"f16", DType::f16}}};

}  // namespace

DType to_act_dtype(const std::string& name) {
  return act_dtypes.find(name);
}

void add_spec(nb::module_& m) {
  nb::class_<Activation>(
      m, "Activation",
      "swiglu: y = g * sigmoid(alpha * g) * (u + beta); geglu, geglu_tanh: gelu(g) * u. Before "
      "that g = min(g, limit) and u = clamp(u, -limit, limit).")
      .def(
          "__init__",
          [](Activation* self, const std::string& kind, float alpha, float beta, float limit) {
            new (self) Activation{kinds.find(kind), alpha, beta, limit};
          },
          "kind"_a = "swiglu", "alpha"_a = 1.0f, "beta"_a = 0.0f, "limit"_a = INFINITY)
      .def_prop_ro("kind", [](const Activation& a) { return kinds.of(a.kind); })
      .def_ro("alpha", &Activation::alpha)
      .def_ro("beta", &Activation::beta)
      .def_ro("limit", &Activation::limit);

  nb::class_<Routing>(
      m, "Routing",
      "How router logits become ids and weights: scores = score(logits); experts are chosen by "
      "scores + correction bias, within the best top_groups of groups; weights = scores, divided by "
      "(their sum + epsilon) if renormalize, times scaling_factor.")
      .def(
          "__init__",
          [](Routing* self, const std::string& score, bool renormalize, int groups, int top_groups,
             const std::string& group_score, bool correction_bias, float scaling_factor, float epsilon) {
            new (self) Routing{
                scores.find(score), renormalize,    groups, top_groups, group_scores.find(group_score),
                correction_bias,    scaling_factor, epsilon};
          },
          nb::kw_only(), "score"_a = "softmax", "renormalize"_a = true, "groups"_a = 1, "top_groups"_a = 1,
          "group_score"_a = "top2_sum", "correction_bias"_a = false, "scaling_factor"_a = 1.0f,
          "epsilon"_a = 0.0f)
      .def_prop_ro("score", [](const Routing& r) { return scores.of(r.score); })
      .def_ro("renormalize", &Routing::renormalize)
      .def_ro("groups", &Routing::groups)
      .def_ro("top_groups", &Routing::top_groups)
      .def_prop_ro("group_score", [](const Routing& r) { return group_scores.of(r.group_score); })
      .def_ro("correction_bias", &Routing::correction_bias)
      .def_ro("scaling_factor", &Routing::scaling_factor)
      .def_ro("epsilon", &Routing::epsilon);

  nb::class_<MoeSpec>(m, "MoeSpec", "What an MoE layer computes, apart from its weights.")
      .def(
          "__init__",
          [](MoeSpec* self, const std::string& scheme, int experts, int top_k, int hidden, int intermediate,
             const Activation& activation, const Routing& routing, bool bias, const std::string& act_dtype,
             int ep_size) {
            MoeSpec spec;
            spec.scheme = to_scheme(scheme);
            spec.experts = experts;
            spec.top_k = top_k;
            spec.ep_size = ep_size;
            spec.hidden = hidden;
            spec.intermediate = intermediate;
            spec.activation = activation;
            spec.routing = routing;
            spec.bias = bias;
            spec.act_dtype = to_act_dtype(act_dtype);
            check(spec.validate());
            new (self) MoeSpec(spec);
          },
          "scheme"_a, nb::kw_only(), "experts"_a, "top_k"_a, "hidden"_a, "intermediate"_a,
          "activation"_a = Activation{}, "routing"_a = Routing{}, "bias"_a = false, "act_dtype"_a = "bf16",
          "ep_size"_a = 1,
          R"(Sizes are those of one routed expert. ep_size: of how many equal parts of an expert-parallel layer
these are the experts; calls give topk_ids, in which other parts' experts are outside 0..experts-1 (-1), and add nothing.
Raises InvalidArgument for a size <= 0, top_k > experts * ep_size, or a contraction that the scheme cannot store.)")
      .def_prop_ro("scheme", [](const MoeSpec& s) { return std::string(scheme(s.scheme).name); })
      .def_ro("experts", &MoeSpec::experts)
      .def_ro("top_k", &MoeSpec::top_k)
      .def_ro("ep_size", &MoeSpec::ep_size)
      .def_ro("hidden", &MoeSpec::hidden)
      .def_ro("intermediate", &MoeSpec::intermediate)
      .def_ro("activation", &MoeSpec::activation)
      .def_ro("routing", &MoeSpec::routing)
      .def_ro("bias", &MoeSpec::bias)
      .def_prop_ro(
          "shared_intermediate", [](const MoeSpec& s) { return s.shared.intermediate; },
          "Width of the shared expert; 0: there is none.")
      .def("__deepcopy__", [](const MoeSpec& s, nb::handle) { return s; })
      .def_prop_ro("act_dtype", [](const MoeSpec& s) { return act_dtypes.of(s.act_dtype); });
}

}  // namespace gatefold::python
